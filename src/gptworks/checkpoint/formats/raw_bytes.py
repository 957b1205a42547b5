"""Numbers in a file, read into memory of their own.

Not mapped: pages of a mapping count as memory of the process for as long as the file is open, and a checkpoint of many
gigabytes would end up in it whole.
"""

from pathlib import Path

import torch
from torch import Tensor

from gptworks.errors import CheckpointError


def read(path: Path, offset: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from byte `offset` on."""
    tensor = torch.empty(count, dtype=dtype)
    left = memoryview(tensor.view(torch.uint8).numpy()) if count else memoryview(b"")  # type: ignore[arg-type]
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
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
