"""Safetensors files, tensor by tensor, so that no more than one of them is in memory.

What is written is byte for byte what safetensors.torch.save_file writes: it wants all tensors at once.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import safetensors
import torch
from torch import Tensor

from gptworks import json_text
from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError

FILE_BYTES = 5 * 10**9  # a larger model is spread over files of this size, as Hugging Face does
_READ = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def read(path: Path) -> dict[str, LazyTensor]:
    """The header is checked by the safetensors library; tensors are read by their place in the file."""
    try:
        with path.open("rb") as file:  # first: what the library says of a file that may not be read is less
            with safetensors.safe_open(path, framework="pt"):  # lengths, offsets and types agree with the file
                pass
            size = int.from_bytes(file.read(8), "little")
            described = json_text.loads(file.read(size))
    except PermissionError:
        raise
    except Exception as error:  # SafetensorError, OSError
        raise CheckpointError(f"{path}: cannot be read ({error}). The file is damaged: copy it again.") from None
    described.pop("__metadata__", None)
    return {name: _stored(path, name, about, 8 + size) for name, about in described.items()}


def _stored(path: Path, name: str, about: dict[str, Any], start: int) -> LazyTensor:
    dtype = _READ.get(about["dtype"])
    if dtype is None:
        raise CheckpointError(f"{path}: '{name}' is of type {about['dtype']}, which holds no weights of a GPT.")
    begin, end = about["data_offsets"]
    return raw_bytes.stored(path, [range(start + begin, start + end)], torch.Size(about["shape"]), dtype)


def cut_into_files(
    shapes: dict[str, tuple[torch.Size, torch.dtype]], file_bytes: int = FILE_BYTES
) -> dict[str, list[str]]:
    """Which tensors go into which file, in the order given."""
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, (shape, dtype) in shapes.items():
        size = num_bytes(shape, dtype)
        if size > room and groups[-1]:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def header(shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> bytes:
    """Length and description of what follows. Tensors stand in the order of their names; all are of one type."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name, place in _places(shapes).items():
        shape, dtype = shapes[name]
        described[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [place.start, place.stop]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _places(shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> dict[str, range]:
    """The bytes of each tensor, counted from the end of the header."""
    places, end = {}, 0
    for name, (shape, dtype) in sorted(shapes.items()):
        places[name] = range(end, end + num_bytes(shape, dtype))
        end = places[name].stop
    return places


def num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


class Writer:
    """Tensors are given in the order of their names, each whole or in pieces one after the other; or in any order, each
    after `begin`."""

    def __init__(self, path: Path, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        self.path = path
        self.shapes = shapes
        self.file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self.file = self.path.open("wb")
        self.start = self.file.write(header(self.shapes))
        self.places = _places(self.shapes)
        return self

    def begin(self, name: str) -> None:
        """What is written next are the pieces of this tensor."""
        assert self.file is not None
        self.file.seek(self.start + self.places[name].start)

    def write(self, piece: Tensor) -> None:
        assert self.file is not None
        self.file.write(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.file is not None
        self.file.close()
