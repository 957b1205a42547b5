"""Numbers in a file, read into memory of their own.

Not mapped: pages of a mapping count as memory of the process for as long as the file is open, and a checkpoint of many
gigabytes would end up in it whole. What describes the numbers is small, and a mapping is the easy way to look at it.
"""

import mmap
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gptworks.errors import CheckpointError


def mapped(path: Path, needed: str) -> memoryview:
    """To read headers in; tensors are for `read`. `needed`: what the file should be, for the error."""
    try:
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file.") from None
    except (OSError, ValueError) as error:  # a folder; an empty file cannot be mapped
        raise CheckpointError(f"{path}: cannot be read ({error}). Needed: {needed}.") from None


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
        raise CheckpointError(f"{path}: cannot be read ({error}).") from None
    return tensor
