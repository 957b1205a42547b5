"""Signals that ask a run to save and end.

Batch systems send SIGTERM or SIGUSR1, often more than once and to every process of a run, and launchers pass them on:
so a repeated one asks for the same. Only a second Ctrl-C, which a person presses, means "at once". SIGHUP is a terminal
that was closed; under nohup it is ignored, and stays so.
"""

import os
import signal
import stat
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType

# Windows has the first two.
SAVE_AND_END = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)
)


def to_handle() -> tuple[signal.Signals, ...]:
    """The signals of SAVE_AND_END that this process has not been started to ignore."""
    return tuple(
        number for number in SAVE_AND_END if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN
    )


def leave_closed_terminal() -> None:
    """After SIGHUP: what is still written to a terminal that is gone must not be an error, before all is saved."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            with suppress(OSError):
                if _is_closed_terminal(number):
                    os.dup2(nowhere, number)
        os.close(nowhere)


def _is_closed_terminal(number: int) -> bool:
    """A character device that is neither a terminal any more nor one of those that are never one."""
    kind = os.fstat(number)
    if sys.platform == "win32" or not stat.S_ISCHR(kind.st_mode) or os.isatty(number):
        return False
    return kind.st_rdev != Path(os.devnull).stat().st_rdev


def stopped_code(asked: int | None, name: str) -> int:
    """Exit code of a run that this signal has stopped and that was saved.

    A person who presses Ctrl-C wants neither the rest of a script nor make to go on with an unfinished model. A batch
    system that takes a job back would count anything but 0 as a failure.
    """
    if asked is not None:
        return asked
    return 128 + signal.SIGINT if name == signal.SIGINT.name else 0


class Interrupted(Exception):
    """A signal arrived while there were no processes to pass it on to."""


class Received:
    """Signals to a launcher are for the ranks, which save and end: each kind is passed on once, a second Ctrl-C too."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.passed_on = 0

    def __enter__(self) -> "Received":
        self._before = {number: signal.signal(number, self._receive) for number in to_handle()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if not self.received or handler != signal.SIG_DFL:  # the same signal once more finds a process that ends
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received.count(number) < (2 if number == signal.SIGINT else 1):
            self.received.append(number)
        if signal.Signals(number).name == "SIGHUP":
            leave_closed_terminal()

    @property
    def ends_at_once(self) -> bool:
        return self.received.count(signal.SIGINT) > 1

    def leave_if_received(self) -> None:
        if self.received:
            raise Interrupted

    def not_passed_on(self) -> list[int]:
        """The signals that have come since this was asked last."""
        new = self.received[self.passed_on :]
        self.passed_on += len(new)
        return new
