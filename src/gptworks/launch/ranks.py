"""All processes of a run as one: what one of them does for all, and what all of them must agree on.

A function that fails on one rank fails on every rank, with the same words: nobody is left waiting for the others.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from gptworks import errors, file_errors
from gptworks.errors import GPTWorksError, TrainingError
from gptworks.launch.world import World

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")
_shared: "tuple[World, dict[timedelta | None, Ranks]] | None" = None


class Ranks:
    """Has a gloo group of its own, whatever the model talks through: made by all ranks in the same order.

    One for each thread: two threads that talk through the same group would take each other's messages.
    """

    def __init__(self, world: World | None = None, timeout: timedelta | None = None) -> None:
        self.rank = world.rank if world else 0
        self.size = world.layout.world_size if world else 1
        self.group: ProcessGroup | None = None
        if self.size > 1:
            from torch import distributed

            self.group = distributed.new_group(backend="gloo", timeout=timeout)

    @classmethod
    def shared(cls, world: World | None, timeout: timedelta | None = None) -> "Ranks":
        """The one of that world and timeout: a group stays open for as long as its world, so that each kind is made
        once, however often a program trains. For one thread at a time."""
        global _shared
        if world is None or world.layout.world_size == 1:
            return cls()
        if _shared is None or _shared[0] is not world:
            _shared = (world, {})
        if timeout not in _shared[1]:
            _shared[1][timeout] = cls(world, timeout)
        return _shared[1][timeout]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The value of every rank, on every rank."""
        if self.group is None:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def on_all(self, function: Callable[[], T]) -> T:
        """Call it on every rank, and fail on every rank if it fails on one. Messages inside it must not be left
        half-exchanged by a failure."""
        if self.group is None:
            return function()
        result, mine = None, None
        try:
            result = function()
        except Exception as error:
            mine = _for_the_user(error)
        failures = self.gather(None if mine is None else (type(mine).__name__, str(mine)))
        self._raise_first(failures, mine)
        return result  # type: ignore[return-value]

    def on_main(self, function: Callable[[], T]) -> T:
        """Call it on the main process only; every rank gets what it returned, or fails as it failed."""
        if self.group is None:
            return function()
        from torch import distributed

        outcome: list[Any] = [None, None]
        mine = None
        if self.is_main:
            try:
                outcome[0] = function()
            except Exception as error:
                mine = _for_the_user(error)
                outcome[1] = (type(mine).__name__, str(mine))
        distributed.broadcast_object_list(outcome, src=0, group=self.group)
        self._raise_first([outcome[1]] * self.size, mine)
        return outcome[0]  # type: ignore[no-any-return]

    def _raise_first(self, failures: list[tuple[str, str] | None], mine: Exception | None) -> None:
        """What went wrong on the lowest rank that failed, as the same kind of error everywhere."""
        failed = [rank for rank, failure in enumerate(failures) if failure]
        if not failed:
            return
        first = failures[failed[0]]
        assert first is not None
        kind, text = first
        if mine is not None and not isinstance(mine, GPTWorksError):
            raise mine  # a fault of ours: its traceback is here
        where = "" if failures == [first] * self.size else f" (rank {failed[0]} of {self.size})"
        error_type = getattr(errors, kind, None)
        if error_type is None:
            raise TrainingError(f"rank {failed[0]} of {self.size}: {kind}: {text}")
        error: GPTWorksError = error_type.__new__(error_type)
        Exception.__init__(error, text + where)
        raise error from mine

    def send(self, tensor: Tensor, to: int) -> None:
        from torch import distributed

        distributed.send(tensor, to, group=self.group)

    def receive(self, tensor: Tensor, source: int) -> None:
        from torch import distributed

        distributed.recv(tensor, source, group=self.group)


def _for_the_user(error: Exception) -> Exception:
    """What the system refuses on one rank, in the words that one process alone would have for it."""
    message = file_errors.explain(error) if isinstance(error, OSError) else ""
    if not message:
        return error
    raised = TrainingError(message)
    raised.__cause__ = error
    return raised
