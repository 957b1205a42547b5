"""A safetensors file written tensor by tensor, so that no more than one of them is in memory.

Byte for byte what safetensors.torch.save_file writes: it wants all tensors at once.
"""

import json
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import torch
from torch import Tensor

_TYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def header(shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> bytes:
    """Length and description of what follows. Tensors stand in the order of their names; all are of one type."""
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in sorted(shapes.items()):
        begin, end = end, end + num_bytes(shape, dtype)
        described[name] = {"dtype": _TYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def num_bytes(shape: torch.Size, dtype: torch.dtype) -> int:
    return shape.numel() * dtype.itemsize


class Writer:
    """Tensors are given in the order of their names, each whole or in pieces one after the other."""

    def __init__(self, path: Path, shapes: dict[str, tuple[torch.Size, torch.dtype]]) -> None:
        self.path = path
        self.shapes = shapes
        self.file: BinaryIO | None = None

    def __enter__(self) -> Self:
        self.file = self.path.open("wb")
        self.file.write(header(self.shapes))
        return self

    def write(self, piece: Tensor) -> None:
        assert self.file is not None
        self.file.write(piece.detach().cpu().contiguous().view(torch.uint8).numpy().data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self.file is not None
        self.file.close()
