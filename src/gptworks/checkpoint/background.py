"""Saving beside training: one checkpoint at a time, in a thread."""

from collections.abc import Callable
from threading import Thread

import torch

from gptworks.launch.devices import use_device


class Background:
    """What goes wrong in the thread is raised by the next `start` or `wait`, so nothing fails unnoticed."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device`: the one of this process."""
        self._device = device
        self._thread: Thread | None = None
        self._failure: BaseException | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Begin once the work before is done."""
        self.wait()
        # A daemon, so that a second Ctrl-C ends the process; whoever owns this waits before a normal end.
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, work: Callable[[], object]) -> None:
        try:
            use_device(self._device)
            work()
        except BaseException as failure:
            self._failure = failure
