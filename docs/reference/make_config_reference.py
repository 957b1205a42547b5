"""Writes config.md from the schema. Run: python docs/reference/make_config_reference.py

A test fails when the file is stale, so a key is described in one place: `src/gptworks/config/schema.py`.
"""

from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gptworks.config import RunConfig
from gptworks.config.load import known_keys
from gptworks.config.presets import aliases, model_config, names
from gptworks.plan.sizes import num_parameters

TARGET = Path(__file__).with_name("config.md")

INTRODUCTION = """\
# Configuration

Made from the schema by `docs/reference/make_config_reference.py`; do not edit.

A value comes from one of these, the later winning: the default below, the model of `init.checkpoint` (when training),
a preset, the files named by `base:`, the file given with `-c`, `section.key=value` on the command line.
`gptworks config show --origin` says which it was. An empty value means the default. Unknown keys, wrong types and
contradictions are errors, reported together. `gptworks config schema` prints the same as a JSON schema, for editors.

Two words stand at the top level of a file beside the sections: `preset: NAME` fills the `model` section, and
`base: FILE` (or a list of files, relative to this one) is read first. `<<: *name` (or a list of
names) brings the keys of another block into one, below its own.
"""

# What a description cannot say because it is not about one key.
NOTES = {
    "parallel": "[How training is split](../explain/parallelism.md), [how to start it](../howto/launch.md).",
    "generate": "`gptworks generate` reads them from the run it generates from; its options come before them.",
}


def text() -> str:
    parts = [INTRODUCTION]
    for name, field in RunConfig.model_fields.items():
        parts.append(_section(name, _section_type(field)))
    parts.append(_presets())
    return "\n".join(parts)


def _section(name: str, section: type[BaseModel]) -> str:
    about = [" ".join((section.__doc__ or "").partition(">>>")[0].split()), NOTES.get(name, "")]
    lines = [f"## {name}", "", " ".join(about).strip(), ""]
    nested: list[str] = []
    rows = []
    for key, field in section.model_fields.items():
        path = f"{name}.{key}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            nested.append(_section(path, _section_type(field)))
        else:
            rows.append(f"| `{path}` | {kind_of(field)} | {_default(field)} | {_cell(field.description or '')} |")
    lines += ["| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    return "\n".join([*lines, *nested])


def _section_type(field: FieldInfo) -> type[BaseModel]:
    assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    return field.annotation


def kind_of(field: FieldInfo) -> str:
    """The type of a key and the limits of its value, for people."""
    return _kind(field.annotation, field.metadata)


def _kind(annotation: Any, limits: list[Any]) -> str:
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        limits = [limit for part in more for limit in (part.metadata if isinstance(part, FieldInfo) else [part])]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{str(c).lower() if isinstance(c, bool) else c}`" for c in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_kind(get_args(annotation)[0], [])}"
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_kind(choice, []) for choice in get_args(annotation))
    assert annotation not in (None, NoneType, Any), annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"{{{', '.join(annotation.model_fields)}}}"
    word = {int: "whole number", float: "number", bool: "true or false", str: "text"}[annotation]
    shown = [text for limit in limits if (text := _limit(limit))]
    return f"{word} {' and '.join(shown)}".strip()


def _limit(limit: Any) -> str:
    for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
        if hasattr(limit, attribute):
            return f"{sign} {getattr(limit, attribute):g}"
    return ""


def _default(field: FieldInfo) -> str:
    if field.default_factory is not None:
        return "derived"
    value = field.default
    if isinstance(value, tuple):
        value = [f"{item:g}" if isinstance(item, float) else item for item in value]
        return f"`[{', '.join(value)}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if value == "":
        return "empty"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def _cell(description: str) -> str:
    return description.replace("|", "\\|")


def _presets() -> str:
    lines = ["## Presets", "", "`--preset NAME`, or `preset: NAME` in a file.", ""]
    lines += ["| preset | also | parameters | layers | hidden | heads | vocabulary | context |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|---:|"]
    for name in names():
        model = model_config(name)
        also = ", ".join(f"`{alias}`" for alias, target in aliases().items() if target == name)
        shape = (model.num_layers, model.hidden_size, model.num_heads, model.vocab_size, model.max_positions)
        lines.append(f"| `{name}` | {also} | {num_parameters(model):,} | " + " | ".join(map(str, shape)) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    print(f"{TARGET}: {len(known_keys())} keys")
