"""Writes api.md from the docstrings. Run: python docs/reference/make_api_reference.py

A test fails when the file is stale, so a function is described in one place: where it is written.
"""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import gptworks
from gptworks.callable_package import CallablePackage

TARGET = Path(__file__).with_name("api.md")

INTRODUCTION = """\
# Python

Made from the docstrings by `docs/reference/make_api_reference.py`; do not edit. How these go together:
[in Python](../howto/python.md).

Everything below is a name of `gptworks`, imported when it is first used. What a user can fix is a `GPTWorksError`.
"""

# In the order in which they are met; the methods that people call, where a class has more.
NAMES: dict[str, list[str]] = {
    "GPT": ["from_pretrained", "from_config", "loss", "save_pretrained"],
    "ModelConfig": [],
    "Tokenizer": ["from_pretrained", "__call__", "encode", "decode", "train", "save"],
    "generate": [],
    "generations": [],
    "pipeline": [],
    "Trainer": ["train", "finetune", "evaluate", "predict"],
    "load_config": [],
    "prepare": [],
    "train": [],
    "evaluate": [],
    "GPTWorksError": [],
}


def text() -> str:
    parts = [INTRODUCTION]
    for name, methods in NAMES.items():
        described = real(getattr(gptworks, name))
        is_class = inspect.isclass(described)
        parts.append(f"## {name}\n")
        # The constructor of a model takes a shape and of an error a text: neither is how people come by one.
        if not is_class or name == "Trainer":
            parts.append(_signature(name, described))
        parts.append(_body(described))
        if name == "ModelConfig":
            parts.append(_keys(described))
        for method in methods:
            function = getattr(described, method)
            called = f"{name}.{method}" if method != "__call__" else name.lower()
            parts += [f"### {called}\n", _signature(called, function), _body(function)]
    return "\n".join(parts)


def _keys(section: Any) -> str:
    """The keys of a section, which are the keywords of its class."""
    rows = []
    for name, field in section.model_fields.items():
        default = "derived" if field.default_factory else f"`{field.default!r}`"
        rows.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(["| keyword | default | |", "|---|---|---|", *rows, ""])


def real(thing: Any) -> Any:
    """The function that a callable package stands for."""
    if isinstance(thing, CallablePackage):
        module, function = thing.__target__
        return getattr(import_module(module), function)
    return thing


def _signature(name: str, function: Callable[..., Any]) -> str:
    signature = inspect.signature(function)
    given = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    shown = str(signature.replace(parameters=given))
    shown = re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", shown)  # pathlib.Path -> Path
    shown = shown.replace("~Self", "GPT").replace("Self", "GPT").replace("PretrainedGPT", "GPT")
    shown = shown.replace("-> 'Tokenizer'", "-> Tokenizer").replace("'", '"')
    if inspect.isclass(function):
        shown = shown.removesuffix(" -> None")
    return f"```\n{_wrapped(f'{name}{shown}')}\n```\n"


def _wrapped(call: str, width: int = 110) -> str:
    """One parameter per line where a line would be too long."""
    if len(call) <= width:
        return call
    head, _, rest = call.partition("(")
    inner, _, result = rest.rpartition(") -> ") if ") -> " in rest else (rest.removesuffix(")"), "", "")
    parameters, depth, current = [], 0, ""
    for character in inner:
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            parameters.append(current.strip())
            current = ""
        else:
            current += character
    lines = [f"    {parameter}," for parameter in [*parameters, current.strip()]]
    return "\n".join([f"{head}(", *lines, ")" + (f" -> {result}" if result else "")])


def _body(described: Any) -> str:
    """The docstring, its examples as code."""
    lines: list[str] = []
    in_example = False
    for line in (inspect.getdoc(described) or "").splitlines():
        is_example = line.startswith((">>>", "...")) or (in_example and line != "")
        if is_example and not in_example:
            lines.append("```python")
        if in_example and not is_example:
            lines.append("```")
        in_example = is_example
        lines.append(re.sub(r"\s*# doctest: .*", "", line))
    if in_example:
        lines.append("```")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    print(f"{TARGET}: {len(NAMES)} names")
