"""Reading ahead: while a GPU works on one step, a thread reads the micro-batches of the next and pins their memory."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from gptworks.data.loader import Batch, Batches
from gptworks.launch.devices import use_device

# On a CPU the thread would take its time from the step: what it could hide is less than a hundredth of that.
READ_AHEAD = {"cuda"}


@contextmanager
def reading(batches: Batches, device: torch.device) -> Iterator["Batches | Prefetch"]:
    """Whoever gives the micro-batches of the next step."""
    if device.type not in READ_AHEAD:
        yield batches
        return
    ahead = Prefetch(batches, device)
    try:
        yield ahead
    finally:
        ahead.close()


class Prefetch:
    """The steps of `batches`, whose `consumed` counts those that were handed out, not the one that is read ahead.

    A failure of the reader is raised by the step that needs what it read. `close` ends the thread.
    """

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches, self.device = batches, device
        self._thread = ThreadPoolExecutor(1, "prefetch", initializer=use_device, initargs=(device,))
        self._ahead: tuple[int, Future[list[Batch]]] | None = None

    def next_step(self) -> list[Batch]:
        batches = self.batches
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0] != batches.consumed:  # the first step, or one that is done again
            ahead = self._begin(batches.consumed)
        micro_batches = ahead[1].result()
        batches.consumed += batches.plan.global_size
        self._ahead = self._begin(batches.consumed)
        return micro_batches

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _begin(self, consumed: int) -> tuple[int, Future[list[Batch]]]:
        return consumed, self._thread.submit(self._read, consumed)

    def _read(self, consumed: int) -> list[Batch]:
        return [batch.pinned_for(self.device) for batch in self.batches.read(consumed)]
