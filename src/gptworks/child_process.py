"""Work that may kill its process is done in a forked child: what it answers comes back, and so does what ended it."""

import faulthandler
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

# Elsewhere libraries are not safe to copy once they are loaded, or there is no fork.
POSSIBLE = sys.platform == "linux"
T = TypeVar("T")
_FOR_PARENT = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
# A child that a person or a batch system ended says nothing about its work.
FAULTS = {"SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP", "SIGSYS"}


@dataclass(frozen=True)
class Outcome:
    answers: list[Any] = field(default_factory=list)  # all that was yielded before the end, as JSON carries it
    ended_by: str = ""  # the name of a signal that is a fault of the work, such as SIGILL
    error: str = ""  # what it raised, or that it did not end
    in_time: bool = True

    @property
    def failure(self) -> str:
        return f"the process dies of {self.ended_by}" if self.ended_by else self.error


def run(work: Callable[[], Iterator[Any]], timeout: float = 60.0) -> Outcome:
    """All that `work` yields in a copy of this process. Where processes cannot be copied it is done in this one.

    The copy has one thread and whatever locks others held: `work` should not depend on threads that this process has.
    """
    if not POSSIBLE:
        return _run_here(work)
    reader, writer = os.pipe()
    pid, in_time, text = 0, False, b""
    # An interrupt between the fork and the `try` would leave the child behind: it waits until it can be answered.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_PARENT)
    try:
        pid = _fork()
        if pid == 0:
            os.close(reader)
            _work_and_exit(work, writer, timeout, mask)
        os.close(writer)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        text, in_time = _read(reader, timeout)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(reader)
        if pid and not in_time:  # or this process is being interrupted
            os.kill(pid, signal.SIGKILL)
        ended_by = _signal_of(pid) if pid else ""
    lines = [json.loads(line) for line in text.split(b"\n")[:-1]]
    answers = [value for kind, value in lines if kind == "answer"]
    if lines and lines[-1][0] == "raised":
        return Outcome(answers, error=lines[-1][1])
    if lines and lines[-1][0] == "done":
        return Outcome(answers)
    if not in_time:
        return Outcome(answers, error=f"no answer within {timeout:g} seconds", in_time=False)
    return Outcome(answers, ended_by if ended_by in FAULTS else "", f"ended by {ended_by or 'itself'}")


def run_each(items: Sequence[T], work: Callable[[T], Any], timeout: float = 60.0) -> list[Outcome]:
    """`work` of each of them, in one child; where it dies another child goes on with the next."""
    outcomes: list[Outcome] = []
    while len(outcomes) < len(items):
        left = items[len(outcomes) :]
        outcome = run(lambda: map(work, left), timeout)  # noqa: B023  called before it changes
        outcomes += [Outcome([answer]) for answer in outcome.answers]
        if len(outcome.answers) == len(left):
            break
        # What is stuck once is not waited for again.
        times = 1 if outcome.ended_by or outcome.in_time else len(left) - len(outcome.answers)
        outcomes += [Outcome([], outcome.ended_by, outcome.error, outcome.in_time)] * times
    return outcomes


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of a BLAS, which is prepared to be copied
        return os.fork()


def _run_here(work: Callable[[], Iterator[Any]]) -> Outcome:
    answers: list[Any] = []
    try:
        for answer in work():
            answers.append(json.loads(json.dumps(answer)))
    except Exception as error:
        return Outcome(answers, error=f"{type(error).__name__}: {error}")
    return Outcome(answers)


def _work_and_exit(work: Callable[[], Iterator[Any]], writer: int, timeout: float, mask: Iterable[int]) -> None:
    """Never returns into what the parent was doing, whatever happens."""
    try:
        _prepare_child(timeout, mask)
        for answer in work():
            _write(writer, "answer", answer)
        _write(writer, "done", None)
    except BaseException as error:
        _write(writer, "raised", f"{type(error).__name__}: {error}")
    finally:
        os._exit(0)


def _prepare_child(timeout: float, mask: Iterable[int]) -> None:
    """Prepares a child whose death is expected: no core file, no traceback, and it ends even if its parent is gone."""
    import resource

    faulthandler.disable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    for number in _FOR_PARENT:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(int(timeout) + 2)


def _write(writer: int, kind: str, value: Any) -> None:
    text = json.dumps([kind, value]).encode() + b"\n"
    while text:
        text = text[os.write(writer, text) :]


def _read(reader: int, timeout: float) -> tuple[bytes, bool]:
    """What was written, and whether the writer ended in time."""
    text, end = b"", time.monotonic() + timeout
    waiting = select.poll()  # select would refuse a descriptor above 1,023, and a process may have more of them
    waiting.register(reader, select.POLLIN)
    while (left := end - time.monotonic()) > 0:
        # In short turns: a signal that another thread took, or that came just before, does not end the wait.
        if not waiting.poll(1000 * min(left, 0.2)):
            continue
        received = os.read(reader, 65536)
        if not received:
            return text, True
        text += received
    return text, False


def _signal_of(pid: int) -> str:
    try:
        status = os.waitpid(pid, 0)[1]
    except ChildProcessError:  # this process has children collected by the system
        return ""
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ""
