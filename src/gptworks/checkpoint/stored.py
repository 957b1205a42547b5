"""A tensor in a file: its shape and type are known at once, its values are read when asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stored:
    """What `read` gives may be somebody else's memory: it is to be copied from, not written to."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def cast(self, dtype: torch.dtype) -> "Stored":
        if dtype == self.dtype:
            return self
        return Stored(self.shape, dtype, lambda: self.read().to(dtype))


StoredTensors = Mapping[str, Stored]  # by name


def in_memory(tensor: Tensor) -> Stored:
    return Stored(tensor.shape, tensor.dtype, lambda: tensor)
