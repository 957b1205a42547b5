"""The slice of a tensor that is on this rank, and the name it is stored under."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from gptworks.parallel.parts import canonical_name


@dataclass(frozen=True)
class Slice:
    """`here` is the part of a tensor of `shape` that begins at `offsets`."""

    here: Tensor
    offsets: torch.Size
    shape: torch.Size

    @property
    def key(self) -> tuple[int, ...]:
        """Replicas of a slice have the same."""
        return (*self.offsets, *self.here.shape)


def slice_of(tensor: Tensor | Slice) -> Slice:
    """No copy is made, and nothing is sent."""
    if isinstance(tensor, Slice):
        return tensor
    if not isinstance(tensor, DTensor):
        return Slice(tensor.detach(), torch.Size([0] * tensor.ndim), tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()
    here = tensor.to_local().detach()
    assert here.shape == chunk.sizes, f"holds {list(here.shape)}, but {list(chunk.sizes)} belongs here"
    return Slice(here, chunk.offsets, tensor.shape)


def copied_to_cpu(tensors: dict[str, Tensor]) -> dict[str, Slice]:
    """What is here now, whatever becomes of the tensors later."""
    found = {}
    for name, tensor in tensors.items():
        part = slice_of(tensor)
        found[name] = Slice(part.here.to("cpu", copy=True), part.offsets, part.shape)
    return found


def to_store(named: Iterable[tuple[str, Tensor]], *, tied: bool) -> dict[str, Tensor]:
    """Each tensor once: the copy of a tied head is left out, the embedding is stored by the rank that has it."""
    return {name: tensor for name, tensor in named if canonical_name(name, tied=tied) == name}


def to_fill(named: Iterable[tuple[str, Tensor]], *, tied: bool) -> Iterator[tuple[str, Tensor]]:
    """Each tensor with the name under which its contents are stored; a name can come twice."""
    return ((canonical_name(name, tied=tied), tensor) for name, tensor in named)
