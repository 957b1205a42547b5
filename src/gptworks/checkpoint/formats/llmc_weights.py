"""The .bin weights of llm.c: 256 integers, then arrays one after the other, all of one type."""

import mmap
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptworks.checkpoint.stored import Stored
from gptworks.errors import CheckpointError

MAGIC = 20240326
VERSIONS = {3: torch.float32, 5: torch.bfloat16}
_HEADER = struct.Struct("<256i")


@dataclass(frozen=True)
class LlmcFile:
    path: Path
    numbers: tuple[int, ...]  # of the header, after magic and version
    dtype: torch.dtype
    data: memoryview  # after the header

    def arrays(self, shapes: Mapping[str, torch.Size]) -> dict[str, Stored]:
        """In the order they stand. Together they must be the file: `require` asks before a long list is made."""
        self.require(sum(shape.numel() for shape in shapes.values()))
        found, begin = {}, 0
        for name, shape in shapes.items():
            end = begin + shape.numel() * self.dtype.itemsize
            found[name] = _stored(self.data[begin:end], shape, self.dtype)
            begin = end
        return found

    def require(self, count: int) -> None:
        size = count * self.dtype.itemsize
        if size != len(self.data):
            raise CheckpointError(
                f"{self.path}: its header announces {count:,} numbers, {size:,} bytes, and {len(self.data):,} follow. "
                "The file is damaged or cut short, or was written by an early llm.c."
            )


def is_llmc(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == struct.pack("<i", MAGIC)
    except OSError:
        return False


def read(path: Path) -> LlmcFile:
    try:
        with path.open("rb") as file:
            # A private mapping: torch knows no read-only tensors, and writing to one would not reach the file.
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:  # a folder; an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read ({error}). Needed: a .bin file of llm.c.") from None
    if len(data) < _HEADER.size:
        raise CheckpointError(f"{path}: {len(data)} bytes; the header of llm.c alone has {_HEADER.size}.")
    magic, version, *numbers = _HEADER.unpack(data[: _HEADER.size])
    if magic != MAGIC:
        raise CheckpointError(f"{path}: begins with {magic}, needed {MAGIC}: not weights of llm.c.")
    if version not in VERSIONS:
        raise CheckpointError(f"{path}: version {version} of llm.c's weights, needed 3 (fp32) or 5 (bf16).")
    return LlmcFile(path, tuple(numbers), VERSIONS[version], data[_HEADER.size :])


def write(path: Path, numbers: Sequence[int], dtype: torch.dtype, arrays: Mapping[str, Stored]) -> None:
    version = next(version for version, known in VERSIONS.items() if known == dtype)
    header = [MAGIC, version, *numbers]
    with path.open("wb") as file:
        file.write(_HEADER.pack(*header, *[0] * (256 - len(header))))
        for each in arrays.values():
            file.write(each.read().detach().cpu().to(dtype).contiguous().view(torch.uint8).numpy().data)


def _stored(raw: memoryview, shape: torch.Size, dtype: torch.dtype) -> Stored:
    def read() -> Tensor:
        return torch.frombuffer(raw, dtype=dtype).view(shape)

    return Stored(shape, dtype, read)
