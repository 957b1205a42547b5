"""Counts the bytes of the tensors that are alive, operator by operator, and remembers what there was at the peak.

It works on real tensors and on fake ones alike, and sees what operators return: what a kernel allocates inside itself
and gives back before it returns is not seen, nor what an allocator keeps beside it.

torch.distributed._tools.MemTracker is not used: it refuses a second forward pass before the first is taken back
(accumulation, pipelines) and takes several times as long.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode

KINDS = ("parameter", "gradient", "optimizer", "gathered", "other")
_resize = UntypedStorage.resize_


@dataclass(slots=True)
class Piece:
    """One storage, from the time it is first seen."""

    bytes: int
    kind: str
    made_by: str  # operator
    shape: tuple[int, ...]  # of the first tensor that was seen of it
    dtype: torch.dtype
    alive: Any = None  # weak reference whose callback says that it is gone


@dataclass(frozen=True)
class Group:
    """Pieces that were alive at the peak and look alike."""

    kind: str
    made_by: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int
    bytes: int

    def __str__(self) -> str:
        shape = "x".join(str(size) for size in self.shape) or "scalar"
        name = str(self.dtype).removeprefix("torch.")
        return f"{self.bytes:>16,}  {self.kind:9}  {self.number:>4} x {name}[{shape}] by {self.made_by}"


class Tracker(TorchDispatchMode):
    """`with Tracker() as tracker: tracker.tell("parameter", part.parameters()); ...`, then `tracker.peak`.

    A storage is counted from the first operator that returns a tensor of it, or from `tell`, until it is freed. Its
    kind can be told at any time while it is alive and holds from its beginning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.moment = ""  # of the peak: forward, backward, or what `within` was
        self.within = ""  # "loss", "update": said by who knows; the passes are told apart without help
        self._is_paused = False
        self._pieces: list[Piece] = []
        self._numbers: dict[int, int] = {}  # storage -> piece
        self._changes: list[tuple[int, int]] = []  # (piece, bytes)
        self._changes_to_peak = 0

    def __enter__(self) -> Self:
        tracker = self

        def resize_(storage: UntypedStorage, size: int) -> UntypedStorage:
            """FSDP frees and fills what it gathers this way, which no operator shows."""
            result = _resize(storage, size)
            number = tracker._numbers.get(storage._cdata)
            if number is not None:
                tracker._change(number, storage.nbytes() - tracker._pieces[number].bytes)
                tracker._pieces[number].bytes = storage.nbytes()
            return result

        UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
        for piece in self._pieces:
            piece.alive = None  # what is freed from now on is not asked about

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented  # a DTensor: first let it become operators on local tensors
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._see(result, func)
        return result

    def paused(self) -> "_Paused":
        """A context, to be entered any number of times, in which what is made is not counted."""
        return _Paused(self)

    def tell(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """What these are. Of a tensor that is cut among ranks, what is here."""
        for tensor in tensors:
            if tensor is not None:
                self._pieces[self._number(getattr(tensor, "_local_tensor", tensor), "told")].kind = kind

    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind that were alive then."""
        bytes_of: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        for number, size in self._alive_at_peak().items():
            bytes_of[self._pieces[number].kind] += size
        return dict(bytes_of)

    def groups_at_peak(self) -> list[Group]:
        """What they were, the largest first."""
        sizes_of: dict[tuple[str, str, tuple[int, ...], torch.dtype], list[int]] = {}
        for number, size in self._alive_at_peak().items():
            piece = self._pieces[number]
            sizes_of.setdefault((piece.kind, piece.made_by, piece.shape, piece.dtype), []).append(size)
        groups = [Group(*like, len(sizes), sum(sizes)) for like, sizes in sizes_of.items()]
        return sorted(groups, key=lambda group: -group.bytes)

    def _alive_at_peak(self) -> dict[int, int]:
        counts: Counter[int] = Counter()
        for number, change in self._changes[: self._changes_to_peak]:
            counts[number] += change
        return {number: size for number, size in counts.items() if size}

    def _see(self, result: Any, func: Any) -> None:
        if isinstance(result, Tensor):
            self._number(result, func)
        elif isinstance(result, (tuple, list)):
            for one in result:
                self._see(one, func)

    def _number(self, tensor: Tensor, made_by: Any) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._numbers.get(key)
        if known is not None:
            return known
        number, size = len(self._pieces), storage.nbytes()

        def gone(_: Any) -> None:
            del self._numbers[key]
            self._change(number, -self._pieces[number].bytes)

        piece = Piece(size, "other", str(made_by), tuple(tensor.shape), tensor.dtype, ref(storage, gone))
        self._pieces.append(piece)
        self._numbers[key] = number
        self._change(number, size)
        return number

    def _change(self, number: int, size: int) -> None:
        if size:
            self.live += size
            self._changes.append((number, size))
            if self.live > self.peak:
                self.peak, self._changes_to_peak = self.live, len(self._changes)
                in_backward = torch._C._current_graph_task_id() != -1  # type: ignore[attr-defined]
                self.moment = self.within or ("backward" if in_backward else "forward")


class _Paused:
    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker

    def __enter__(self) -> None:
        self.tracker._is_paused = True

    def __exit__(self, *failure: Any) -> None:
        self.tracker._is_paused = False
