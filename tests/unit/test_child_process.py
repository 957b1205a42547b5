"""Work in a child that may die, raise, hang, or be interrupted together with its parent."""

import faulthandler
import os
import resource
import signal
import time
from collections.abc import Iterator

import pytest

from gptworks import child_process

needs_fork = pytest.mark.skipif(not child_process.POSSIBLE, reason="processes are copied on Linux only")


def die(number: int = signal.SIGILL) -> None:
    os.kill(os.getpid(), number)


def test_what_is_yielded_comes_back() -> None:
    assert child_process.run(lambda: iter([1, "two", {"three": [3.5]}])).answers == [1, "two", {"three": [3.5]}]
    many = child_process.run(lambda: iter(["x" * 1000] * 1000))
    assert len(many.answers) == 1000 and many.failure == ""


@needs_fork
def test_a_process_with_more_descriptors_than_select_can_count() -> None:
    """The limit of 1,024 is raised for runs of many ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1100:
        pytest.skip(f"the hard limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1100), hard))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1030:
            opened.append(os.dup(opened[0]))
        assert child_process.run(lambda: iter([1])).answers == [1]
    finally:
        for file in opened:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@needs_fork
@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_death_is_named_and_leaves_no_traceback_and_no_core(number: int) -> None:
    def work() -> Iterator[object]:
        yield faulthandler.is_enabled()  # in the parent: by pytest
        yield resource.getrlimit(resource.RLIMIT_CORE)[0]
        die(number)
        yield "after"

    outcome = child_process.run(work)
    assert (outcome.answers, outcome.ended_by) == ([False, 0], signal.Signals(number).name)
    assert outcome.failure == f"the process dies of {signal.Signals(number).name}"


@needs_fork
def test_a_child_that_somebody_else_ended_is_not_called_faulty() -> None:
    def work() -> Iterator[str]:
        die(signal.SIGTERM)  # passed on by a batch system to all of its processes: left to the parent
        yield "alive"
        die(signal.SIGKILL)
        yield "not alive"

    outcome = child_process.run(work)
    assert (outcome.answers, outcome.ended_by, outcome.failure) == (["alive"], "", "ended by SIGKILL")


def test_what_it_raises_is_told() -> None:
    def work() -> Iterator[str]:
        yield "before"
        raise ValueError("17 is too much")

    outcome = child_process.run(work)
    assert (outcome.answers, outcome.failure) == (["before"], "ValueError: 17 is too much")


@needs_fork
def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, started = os.fork, list[int]()

    def noted() -> int:
        started.append(fork())
        return started[-1]

    def work() -> Iterator[int]:
        time.sleep(60)
        yield 0

    monkeypatch.setattr(os, "fork", noted)
    outcome = child_process.run(work, timeout=0.2)
    assert outcome.failure == "no answer within 0.2 seconds"
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@needs_fork
def test_an_interrupted_parent_leaves_no_child() -> None:
    reader, writer = os.pipe()

    def work() -> Iterator[int]:
        os.write(writer, str(os.getpid()).encode())
        time.sleep(0.5)  # within os.fork itself, where Python's own hooks run, the parent would not see the signal
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
        yield 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have begun these tests without it
    try:
        with pytest.raises(KeyboardInterrupt):
            child_process.run(work)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(ProcessLookupError):
        os.kill(int(os.read(reader, 100)), 0)
    os.close(reader)
    os.close(writer)


@needs_fork
def test_after_a_death_the_next_is_tried() -> None:
    def work(item: int) -> int:
        if item in (2, 3):
            die()
        if item == 5:
            raise ValueError("five")
        return item * item

    found = child_process.run_each([1, 2, 3, 4, 5, 6], work)
    assert [(each.answers, each.failure) for each in found] == [
        ([1], ""),
        ([], "the process dies of SIGILL"),
        ([], "the process dies of SIGILL"),
        ([16], ""),
        ([], "ValueError: five"),
        ([36], ""),
    ]


@needs_fork
def test_what_hangs_once_is_not_waited_for_again() -> None:
    started, writer = os.pipe()

    def work(item: int) -> None:
        os.write(writer, b".")
        time.sleep(60)

    found = child_process.run_each([1, 2, 3], work, timeout=0.2)
    assert [each.failure for each in found] == ["no answer within 0.2 seconds"] * 3
    os.close(writer)
    assert os.read(started, 100) in (b".", b"")  # a busy machine may not even have let the first one begin
    os.close(started)


def test_without_fork_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "POSSIBLE", False)
    assert child_process.run(lambda: iter([os.getpid()])).answers == [os.getpid()]

    def work(item: int) -> int:
        return 6 // item

    found = child_process.run_each([1, 0, 2], work)
    assert [each.answers for each in found] == [[6], [], [3]] and "ZeroDivisionError" in found[1].failure
