"""The .bin weights of llm.c: 256 integers, then arrays one after the other, all of one type."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError

MAGIC = 20240326
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
_HEADER = struct.Struct("<256i")


@dataclass(frozen=True)
class LlmcFile:
    path: Path
    numbers: tuple[int, ...]  # of the header, after magic and version
    dtype: torch.dtype
    num_bytes: int  # after the header

    def arrays(self, shapes: Mapping[str, torch.Size]) -> dict[str, LazyTensor]:
        """In the order they stand. Together they must be the file: `require` asks before a long list is made."""
        self.require(sum(shape.numel() for shape in shapes.values()))
        tensors, begin = {}, _HEADER.size
        for name, shape in shapes.items():
            place = range(begin, begin + shape.numel() * self.dtype.itemsize)
            tensors[name] = raw_bytes.stored(self.path, [place], shape, self.dtype)
            begin = place.stop
        return tensors

    def require(self, count: int) -> None:
        size = count * self.dtype.itemsize
        if size != self.num_bytes:
            raise CheckpointError(
                f"{self.path}: its header announces {count:,} numbers, {size:,} bytes, and {self.num_bytes:,} follow. "
                "The file is damaged or cut short, or was written by an early llm.c."
            )


def is_llmc(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == struct.pack("<i", MAGIC)
    except OSError:
        return False


def read(path: Path) -> LlmcFile:
    data = raw_bytes.mapped(path, "a .bin file of llm.c")
    if len(data) < _HEADER.size:
        raise CheckpointError(f"{path}: {len(data)} bytes; the header of llm.c alone has {_HEADER.size}.")
    magic, version, *numbers = _HEADER.unpack(data[: _HEADER.size])
    if magic != MAGIC:
        raise CheckpointError(f"{path}: begins with {magic}, needed {MAGIC}: not weights of llm.c.")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: version {version} of llm.c's weights, needed 3 (fp32) or 5 (bf16).")
    return LlmcFile(path, tuple(numbers), VERSIONS[version], len(data) - _HEADER.size)


def write(path: Path, numbers: Sequence[int], dtype: torch.dtype, arrays: Mapping[str, LazyTensor]) -> None:
    version = next(version for version, known in VERSIONS.items() if known == dtype)
    header = [MAGIC, version, *numbers]
    with path.open("wb") as file:
        file.write(_HEADER.pack(*header, *[0] * (256 - len(header))))
        for each in arrays.values():
            file.write(each.read().detach().cpu().to(dtype).contiguous().view(torch.uint8).numpy().data)
