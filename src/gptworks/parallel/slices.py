"""The slice of a tensor that is on this rank, and the name it is stored under."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from gptworks.architecture import canonical_name

Region = tuple[slice, ...]  # of a tensor: from where to where in each dim


@dataclass(frozen=True)
class Slice:
    """`here` is the part of a tensor of `shape` that begins at `offsets`."""

    here: Tensor
    offsets: torch.Size
    shape: torch.Size

    @property
    def region(self) -> Region:
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.here.shape, strict=True))

    @property
    def key(self) -> tuple[int, ...]:
        """Replicas of a slice have the same."""
        return (*self.offsets, *self.here.shape)


@dataclass(frozen=True)
class Pieces:
    """Several slices of one tensor."""

    slices: tuple[Slice, ...]
    shape: torch.Size
    dtype: torch.dtype


def slices_of(tensor: Any) -> tuple[Slice, ...]:
    """All that is here of a tensor, a DTensor, a slice or pieces."""
    return tensor.slices if isinstance(tensor, Pieces) else (slice_of(tensor),)


def local_of(tensor: Any) -> Tensor:
    here: Tensor = tensor.to_local().detach()
    return here


def slice_of(tensor: Any) -> Slice:
    """What is here of a tensor, a DTensor or a slice. No copy is made, and nothing is sent."""
    if isinstance(tensor, Slice):
        return tensor
    if not hasattr(tensor, "placements"):  # a plain one; to import DTensor would take as long as half of torch
        return Slice(tensor.detach(), torch.Size([0] * tensor.ndim), tensor.shape)
    region, here = region_of(tensor), tensor.to_local().detach()
    assert here.shape == size_of(region), f"holds {list(here.shape)}, but {list(size_of(region))} belongs here"
    return Slice(here, torch.Size(each.start for each in region), tensor.shape)


def region_of(tensor: Any) -> Region:
    """Which part of the whole tensor this rank holds of a DTensor, found without asking anyone."""
    # Not by the DTensor's own word: torch 2.13 is wrong about uneven cuts of one dim by two axes.
    place, offsets, sizes = tensor.device_mesh.get_coordinate(), [0] * tensor.ndim, list(tensor.shape)
    assert place is not None
    for axis, num_pieces in splits(tensor):
        dim = tensor.placements[axis].dim
        step = -(-sizes[dim] // num_pieces)
        begin = min(step * place[axis], sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(step, sizes[dim] - begin)
    return tuple(slice(begin, begin + size) for begin, size in zip(offsets, sizes, strict=True))


def size_of(region: Region) -> torch.Size:
    return torch.Size(each.stop - each.start for each in region)


def splits(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """(axis of its mesh, parts) wherever it is cut.

    The mesh names FSDP first, which splits what tensor parallelism left: so the last axis cuts first.
    """
    for axis, placement in reversed(list(enumerate(getattr(tensor, "placements", ())))):
        if not placement.is_replicate():
            yield axis, tensor.device_mesh.size(axis)  # type: ignore[attr-defined]


def copied_to_cpu(tensors: Mapping[str, Tensor | Pieces]) -> dict[str, Pieces]:
    """What is here now, whatever becomes of the tensors later."""
    on_cpu = {}
    for name, tensor in tensors.items():
        copied = [Slice(piece.here.to("cpu", copy=True), piece.offsets, piece.shape) for piece in slices_of(tensor)]
        on_cpu[name] = Pieces(tuple(copied), tensor.shape, tensor.dtype)
    return on_cpu


AnyTensor = TypeVar("AnyTensor")


def to_store(named: Iterable[tuple[str, AnyTensor]], *, tied: bool) -> dict[str, AnyTensor]:
    """Each tensor once: the copy of a tied head is left out, the embedding is stored by the rank that has it."""
    return {name: tensor for name, tensor in named if canonical_name(name, tied=tied) == name}


def to_fill(named: Iterable[tuple[str, AnyTensor]], *, tied: bool) -> Iterator[tuple[str, AnyTensor]]:
    """Each tensor with the name under which its contents are stored; a name can come twice."""
    return ((canonical_name(name, tied=tied), tensor) for name, tensor in named)
