"""Numbers in a file, read into memory of their own.

Not mapped: pages of a mapping count as memory of the process for as long as the file is open, and a checkpoint of many
gigabytes would end up in it whole.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gptworks.errors import CheckpointError


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
