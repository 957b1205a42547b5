"""All targets, and which of them a folder was exported to."""

from importlib import import_module
from pathlib import Path
from typing import cast

from gptworks.errors import UsageError
from gptworks.export.contract import Target

# As in --to; looked at in this order. A module is imported when it is needed.
_MODULES = {
    "hf": "huggingface",
    "onnx": "onnx_graph",
    "torch": "torch_program",
    "gguf": "gguf_file",
    "ctranslate2": "ctranslate2_model",
}
NAMES = tuple(_MODULES)


def target(name: str) -> Target:
    module = _MODULES.get(name)
    if module is None:
        raise UsageError(f"--to {name}: no such target. Known: {', '.join(NAMES)}.")
    return cast(Target, import_module(f"gptworks.export.{module}"))


def recognise(folder: Path) -> tuple[Target, Path] | None:
    """With the file to open."""
    for each in map(target, NAMES):
        if file := each.recognise(folder):
            return each, file
    return None
