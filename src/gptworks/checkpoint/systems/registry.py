"""All systems whose checkpoints are known, and which of them a path belongs to."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import cast

from gptworks import file_errors
from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.systems.contract import Opened, System
from gptworks.errors import CheckpointError

# As in --to and --from; looked at in this order. A module is imported when it is needed.
_MODULES = {
    "gptworks": "ours",
    "hf": "huggingface",
    "megatron": "megatron",
    "megatron-core": "megatron_core",
    "fleetx": "fleetx",
    "paddlenlp": "paddlenlp",
    "mindspore": "mindspore",
    "oneflow": "oneflow",
    "nanogpt": "nanogpt",
    "llmc": "llmc",
    "llama2c": "llama2c",
    "gguf": "gguf",
    "gguf-q8_0": "gguf_q8_0",
    "gguf-q4_0": "gguf_q4_0",
}
NAMES = tuple(_MODULES)
READ_ONLY = ("llama2c",)
WRITTEN = tuple(name for name in NAMES if name not in READ_ONLY)


def system(name: str) -> System:
    module = _MODULES.get(name)
    if module is None:
        raise CheckpointError(f"{name!r} is not a format of checkpoints. Known: {', '.join(NAMES)}.")
    return cast(System, import_module(f"gptworks.checkpoint.systems.{module}"))


def recognise(path: Path) -> System | None:
    """By looking at names and first bytes; None when it is nobody's."""
    return next((each for each in map(system, NAMES) if each.recognise(path)), None)


def open_any(path: Path, overrides: Mapping[str, object] | None = None, *, name: str | None = None) -> Opened:
    """`name`: the system, for what is not recognised; `overrides`: numbers of the model that the files do not carry."""
    reader = system(name) if name else recognise(path)
    if reader is None:
        file_errors.refuse_unreadable(path)
        if torch_file.is_torch_file(path):
            torch_file.read(path)  # if it cannot be read, that is why it is nobody's
        raise CheckpointError(
            f"{path}: not a checkpoint of any known system ({', '.join(NAMES)}). Name it with --from if it is one."
        )
    return reader.open(path, overrides or {})
