"""A test that hangs is ended, and its report has the stacks of all its processes.

Each phase of a test (set-up, call, teardown) has `time_limit` seconds, an option of pyproject.toml; a test marked
time_limit(n) has n, one marked slow four times as many. When they are over, this process and all that it started are
stopped, say where they are, and are gone. It is no measure of speed: the limit is far above what any test takes.

Where others say it: PYTHONFAULTHANDLER makes a Python that gets SIGABRT write the stacks of its threads to its standard
error, which is a pipe that ends here, or a log file. A process that is forked writes them to `stacks_file()`.
"""

import faulthandler
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_LAST_WORDS = 5.0  # seconds that a process has to write its stacks
_AGAIN = 30.0  # seconds until what has swallowed the failure is failed again
_GIVEN_UP = 120.0  # seconds until a process that does not even do that is ended with all its tests
_TAIL = 16000  # bytes

os.environ["PYTHONFAULTHANDLER"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("time_limit", "seconds that a phase of a test may take before it counts as hanging", default="600")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "time_limit(seconds): what never ends fails after so long")


def stacks_file(pid: int | None = None) -> Path:
    """Where a process that was forked from a test, by default this one, writes its stacks."""
    return Path(tempfile.gettempdir()) / f"gptworks-test-stacks-{os.getuid()}-{pid or os.getpid()}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    with _limited(item):
        return (yield)


def _seconds(item: pytest.Item) -> float:
    if mark := item.get_closest_marker("time_limit"):
        return float(mark.args[0])
    return float(item.config.getini("time_limit")) * (4 if item.get_closest_marker("slow") else 1)


@contextmanager
def _limited(item: pytest.Item) -> Iterator[None]:
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    seconds = _seconds(item)

    def late(*_: object) -> None:
        pytest.fail(f"{item.nodeid} has not ended after {seconds:g} s\n{stacks_of_all()}", pytrace=False)

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
    faulthandler.dump_traceback_later(seconds + _GIVEN_UP, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def stacks_of_all() -> str:
    """The stacks of this process, and of those it has started, which are ended by it."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        said = [f"--- process {os.getpid()}, the test itself\n{file.read()}"]
    started = _descendants(os.getpid())
    for pid in started:  # all at once, so that none starts another in place of one that ends
        _signal(pid, signal.SIGSTOP)
    for pid in reversed(started):
        said.append(f"--- process {pid}: {_command(pid)}\n{_last_words(pid)}")
    return "\n".join(said)


def _last_words(pid: int) -> str:
    with suppress(OSError):
        where = str(Path(f"/proc/{pid}/fd/2").readlink())
        _signal(pid, signal.SIGABRT)
        _signal(pid, signal.SIGCONT)
        until = time.monotonic() + _LAST_WORDS
        said = ""
        while _is_running(pid) and time.monotonic() < until:
            said += _read_pipe(where)
            time.sleep(0.01)
        _signal(pid, signal.SIGKILL)
        if stacks_file(pid).exists():  # or of one that had the same number long ago
            said += stacks_file(pid).read_text(errors="replace")
            stacks_file(pid).unlink()
        if where.startswith("pipe:"):
            said += _read_pipe(where)
        elif Path(where).is_file() and not said:
            said += Path(where).read_bytes()[-_TAIL:].decode(errors="replace")
        return said or f"(its standard error is {where})"
    return "(it is gone)"


def _read_pipe(name: str) -> str:
    """What is in a pipe that another process writes to and this one could read."""
    found = b""
    for own in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            number = int(own.name)
            while str(own.readlink()) == name and select.select([number], [], [], 0)[0]:
                more = os.read(number, 65536)
                found += more
                if not more:
                    break
    return found.decode(errors="replace")


def _descendants(pid: int) -> list[int]:
    """Each after the one that started it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = entry.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]


def _is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()[:500]
    return ""


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
