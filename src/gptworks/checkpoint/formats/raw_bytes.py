"""Numbers in a file, read into memory of their own.

Not mapped: pages of a mapping count as memory of the process for as long as the file is open, and a checkpoint of many
gigabytes would end up in it whole. What describes the numbers is small, and a mapping is the easy way to look at it.
"""

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from gptworks import file_errors
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError
from gptworks.parallel.slices import Region, size_of


def mapped(path: Path, needed: str) -> memoryview:
    """To read headers in; tensors are for `read`. `needed`: what the file should be, for the error."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except (IsADirectoryError, ValueError) as error:  # an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read ({error}). Needed: {needed}.") from None


def stored(path: Path, places: Sequence[range], shape: torch.Size, dtype: torch.dtype) -> LazyTensor:
    """A tensor whose bytes lie in these places of a file, one after the other, its last dim innermost."""

    def read_region(region: Region) -> Tensor:
        runs = (range(run.start * dtype.itemsize, run.stop * dtype.itemsize) for run in _runs(shape, region))
        return read_pieces(path, list(_within(places, runs)), dtype).view(size_of(region))

    return LazyTensor(shape, dtype, lambda: read_pieces(path, places, dtype).view(shape), read_region)


def _runs(shape: Sequence[int], region: Region) -> Iterator[range]:
    """Where the numbers of a region are among those of the whole tensor, in as few runs as they make."""
    inside = math.prod(shape[1:])
    if not shape or size_of(region[1:]) == torch.Size(shape[1:]):
        rows = region[0] if shape else slice(0, 1)
        yield range(rows.start * inside, rows.stop * inside)
        return
    for row in range(region[0].start, region[0].stop):
        for run in _runs(shape[1:], region[1:]):
            yield range(row * inside + run.start, row * inside + run.stop)


def _within(places: Sequence[range], runs: Iterable[range]) -> Iterator[range]:
    """Where runs of bytes lie that are counted from the first byte of the first place."""
    for run in runs:
        before = 0
        for place in places:
            begin, end = max(run.start - before, 0), min(run.stop - before, len(place))
            if begin < end:
                yield place[begin:end]
            before += len(place)


def read(path: Path, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from byte `offset` on."""
    return read_pieces(path, [range(offset, offset + count * dtype.itemsize)], dtype)


def read_pieces(path: Path, places: Sequence[range], dtype: torch.dtype) -> Tensor:
    """Numbers whose bytes lie in several places, one after the other."""
    tensor = torch.empty(sum(map(len, places)) // dtype.itemsize, dtype=dtype)
    room = memoryview(tensor.view(torch.uint8).numpy()) if len(tensor) else memoryview(b"")  # type: ignore[arg-type]
    try:
        with path.open("rb", buffering=0) as file:
            for place in places:
                file.seek(place.start)
                left, room = room[: len(place)], room[len(place) :]
                while left:
                    got = file.readinto(left)  # type: ignore[attr-defined]
                    if not got:
                        raise CheckpointError(
                            f"{path}: ends {len(left):,} bytes too early. It has changed since it was opened."
                        )
                    left = left[got:]
    except OSError as error:
        raise CheckpointError(file_errors.explain(error, path) or f"{path}: cannot be read ({error}).") from None
    return tensor
