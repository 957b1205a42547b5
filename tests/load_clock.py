"""How long some processes have taken, on a machine that may be busy with other things.

The kernel says of each thread how long it ran and how long it was ready to run and had to wait for a core. The time on
the wall without that wait is what the same would have taken on an idle machine, or less where several waited at once;
so the time for which they ran is counted too, and whoever hangs or turns in a loop comes to any limit all the same.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def of_thread(file: Path) -> tuple[int, int]:
    """Nanoseconds that it ran and that it waited for a core."""
    ran, waited, _ = file.read_text().split()
    return int(ran), int(waited)


class LoadClock:
    """Of the processes that `pids` names each time it is asked; those that have ended count with what was last seen."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self.pids = pids
        self.began = time.monotonic()
        self.threads: dict[str, tuple[int, int]] = {}
        self.before = {name: (ran, waited) for name, ran, waited in self._look()}

    def seconds(self) -> float:
        self.threads.update({name: (ran, waited) for name, ran, waited in self._look()})
        ran = waited = 0
        for name, (its_run, its_wait) in self.threads.items():
            run_before, wait_before = self.before.get(name, (0, 0))
            ran, waited = ran + its_run - run_before, waited + its_wait - wait_before
        return max(time.monotonic() - self.began - waited / 1e9, ran / 1e9)

    def _look(self) -> Iterator[tuple[str, int, int]]:
        for pid in self.pids():
            for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError, ValueError):  # it has just ended
                    yield (file.parent.name, *of_thread(file))
