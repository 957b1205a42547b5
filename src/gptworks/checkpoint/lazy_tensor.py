"""A tensor in a file: its shape and type are known at once, its values are read when asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.parallel.slices import Region, size_of


@dataclass(frozen=True)
class LazyTensor:
    """What `read` gives may be somebody else's memory: it is to be copied from, not written to.

    `read_region`, where the format has a way to: what lies in a region, read from little more than its own bytes.
    """

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_region: Callable[[Region], Tensor] | None = None

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def read_bytes(self) -> memoryview:
        """The tensor's numbers as they stand in memory, for writers: a file has been promised this shape and type."""
        tensor = self.read().detach().contiguous()
        if tensor.shape != self.shape or tensor.dtype != self.dtype:
            raise AssertionError(f"announced {self.shape} {self.dtype}, got {tensor.shape} {tensor.dtype}")
        return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")

    def region(self, region: Region | None) -> Tensor:
        """What lies there; None = all of it."""
        if region is None or size_of(region) == self.shape:
            return self.read()
        if 0 in size_of(region):
            return torch.empty(size_of(region), dtype=self.dtype)
        return self.read()[region] if self.read_region is None else self.read_region(region)

    def first_rows(self, count: int) -> "LazyTensor":
        shape = torch.Size([count, *self.shape[1:]])
        return LazyTensor(shape, self.dtype, lambda: self.read()[:count], self.read_region)

    def cast(self, dtype: torch.dtype) -> "LazyTensor":
        if dtype == self.dtype:
            return self
        return LazyTensor(
            self.shape, dtype, lambda: self.read().to(dtype), lambda region: self.region(region).to(dtype)
        )


LazyTensors = Mapping[str, LazyTensor]  # by name


def in_memory(tensor: Tensor) -> LazyTensor:
    return LazyTensor(tensor.shape, tensor.dtype, lambda: tensor)
