"""The tensors of one process, on disk: every rank of a layout compares its slices with them and gathers nothing."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gptworks.parallel.slices import Pieces, slices_of, to_fill

Named = Iterable[tuple[str, Tensor]]


@dataclass
class Compared:
    """What a rank, or all of them, found out about one tensor."""

    difference: float  # the largest
    slices: set[tuple[int, ...]]  # (offsets, sizes): which parts of it were seen

    def merge(self, other: "Compared") -> "Compared":
        return Compared(max(self.difference, other.difference), self.slices | other.slices)

    @property
    def num_seen(self) -> int:
        return sum(math.prod(key[len(key) // 2 :]) for key in self.slices)


@dataclass(frozen=True)
class Described:
    """The tensors in the order of the model."""

    size: int
    largest: float  # number in it, without its sign


def write(folder: Path, kind: str, named: Named) -> None:
    tensors = {name: tensor.detach().cpu().float().contiguous() for name, tensor in named}
    save_file(tensors, folder / f"{kind}.safetensors")
    described = {name: [t.numel(), t.abs().max().item()] for name, t in tensors.items()}
    (folder / f"{kind}.json").write_text(json.dumps(described), encoding="utf-8")


def describe(folder: Path, kind: str) -> dict[str, Described]:
    """In the order of the model; empty where nothing was written."""
    path = folder / f"{kind}.json"
    values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {name: Described(*value) for name, value in values.items()}


def compare(
    folder: Path, kind: str, named: Iterable[tuple[str, Tensor | Pieces]], *, tied: bool
) -> dict[str, Compared]:
    """The slices that are here. A tensor that one process does not have is as different as can be."""
    compared: dict[str, Compared] = {}
    with safe_open(folder / f"{kind}.safetensors", "pt") as file:
        known = set(file.keys())
        for name, tensor in to_fill(named, tied=tied):
            for piece in slices_of(tensor):
                here = piece.here.cpu().float()
                difference = math.inf
                if name in known:
                    where = tuple(slice(at, at + size) for at, size in zip(piece.offsets, here.shape, strict=True))
                    difference = _largest(here - file.get_slice(name)[where]) if here.numel() else 0.0
                one = Compared(difference, {piece.key})
                compared[name] = compared[name].merge(one) if name in compared else one
    return compared


def _largest(differences: Tensor) -> float:
    largest = differences.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def merge(all_ranks: Iterable[dict[str, Compared]]) -> dict[str, Compared]:
    merged: dict[str, Compared] = {}
    for compared in all_ranks:
        for name, one in compared.items():
            merged[name] = merged[name].merge(one) if name in merged else one
    return merged
