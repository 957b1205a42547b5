"""The thread that computes: it steps the schedulers of all models in turn while any of them has work."""

import threading
import traceback
from collections.abc import Callable

from gptworks.generate.row_request import Progress, RowRequest
from gptworks.generate.scheduler import Scheduler

Deliver = Callable[[list[Progress]], None]
Observe = Callable[[int], None]


class EngineThread:
    """`deliver` is called in this thread after each step that brought something, `observe` after each with the number
    of rows that were in it. Neither may block."""

    def __init__(self, deliver: Deliver, observe: Observe = lambda rows: None) -> None:
        self._deliver, self._observe = deliver, observe
        self._schedulers: list[Scheduler] = []
        self._leaving: set[Scheduler] = set()
        self._changing = threading.Lock()  # of the two above, which other threads change
        self._wake = threading.Event()
        self._is_ending = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, scheduler: Scheduler) -> None:
        with self._changing:
            self._schedulers = [*self._schedulers, scheduler]

    def remove_when_idle(self, scheduler: Scheduler) -> None:
        """It finishes what it has; the caller sends it nothing more."""
        with self._changing:
            self._leaving.add(scheduler)
        self._wake.set()

    def submit(self, scheduler: Scheduler, requests: list[RowRequest]) -> None:
        for request in requests:
            scheduler.submit(request)
        self._wake.set()

    def cancel(self, requests: list[RowRequest]) -> None:
        for request in requests:
            Scheduler.cancel(request)
        self._wake.set()

    def end(self) -> None:
        """After the step that is running."""
        self._is_ending = True
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_ending:
            self._wake.clear()
            at_work = [scheduler for scheduler in self._schedulers if scheduler.has_work]
            for scheduler in at_work:
                self._step(scheduler)
            self._let_go()
            if not at_work:
                self._wake.wait()

    def _step(self, scheduler: Scheduler) -> None:
        try:
            progress = scheduler.step()
        except Exception:  # those who waited for it are told; others come after them
            traceback.print_exc()
            progress = scheduler.take_progress()
        self._observe(scheduler.batch_size)
        if progress:
            self._deliver(progress)

    def _let_go(self) -> None:
        with self._changing:
            idle = {each for each in self._leaving if not each.has_work}
            self._leaving -= idle
            self._schedulers = [each for each in self._schedulers if each not in idle]
