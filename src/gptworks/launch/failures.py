"""What a rank says when it fails, so that one error reaches the user: that of the rank that failed first."""

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from gptworks import file_errors
from gptworks.errors import TRY_AGAIN, GPTWorksError
from gptworks.launch import heartbeat, rank_env
from gptworks.launch.heartbeat import Heartbeat

ANSWER = 8.0  # seconds in which the store must answer a rank that fails
PATIENCE = 3.0  # seconds a rank that lost its connection waits to hear why
GRACE_S = 6.0  # in which the other ranks of a failed run may say why they stop: more than PATIENCE
_LOST = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset|refused)|timed out|timeout|pair closure|broken pipe|"
    r"socket (closed|error)",
    re.I,
)
_TIMED_OUT = re.compile(r"timed out|timeout", re.I)


T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    rank: int
    message: str
    is_fault: bool = False  # of ours: with a traceback
    can_restart: bool = True
    because_of: int | None = None  # the rank whose end was the cause
    time: float = field(default_factory=time.time)

    @property
    def exit_code(self) -> int:
        if self.is_fault:
            return 1
        return TRY_AGAIN if self.can_restart else GPTWorksError.exit_code

    def dump(self) -> str:
        return json.dumps(asdict(self))

    def write(self, folder: Path) -> None:
        new = folder / f".rank-{self.rank}.new"
        new.write_text(self.dump(), encoding="utf-8")
        new.replace(folder / f"rank-{self.rank}.json")


def read(text: str) -> Failure:
    return Failure(**json.loads(text))


def read_all(folder: Path) -> dict[int, Failure]:
    failures = [read(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("rank-*.json"))]
    return {failure.rank: failure for failure in failures}


def first(failures: dict[int, Failure]) -> Failure | None:
    """The cause: the earliest failure that no other one has caused, as far as this machine knows."""
    return min(failures.values(), key=lambda failure: (failure.because_of is not None, failure.time), default=None)


def named(failures: dict[int, Failure], world_size: int) -> Failure:
    """The cause, with the rank in front of its words where they do not speak of ranks themselves."""
    cause = first(failures)
    assert cause is not None
    # All ranks can find the same mistake, such as missing data: then it is not one rank's.
    same = len(failures) == world_size > 1 and len({failure.message for failure in failures.values()}) == 1
    speaks_of_ranks = cause.because_of is not None or cause.message.startswith("rank ")
    where = "" if same or speaks_of_ranks else f"rank {cause.rank} of {world_size}: "
    return replace(cause, message=where + cause.message)


def say_failure(failure: Failure) -> int:
    """How a run ends that has failed; its exit code."""
    say(f"error: {failure.message}")
    if failure.is_fault:
        say("\nThis is a fault of gptworks, not of your input. Please report it with the lines above.")
    return failure.exit_code


def say(text: str) -> None:
    with suppress(OSError):  # a pipe or a terminal that is gone
        print(text, file=sys.stderr, flush=True)


class Connection:
    """How a rank hears of the others' ends."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size = rank, world_size
        self.heartbeat = Heartbeat(store, rank, world_size, timeout)
        self.store = self.heartbeat.store
        self._answers = True
        self._end = threading.Lock()  # held by the thread that says how this process ends
        self.heartbeat.start()

    def watch(self, *, is_step_watched: bool) -> None:
        """From now on the heartbeat ends this process when a rank is silent; also, where nothing else would explain
        it, when the main thread hangs in a step."""
        self.heartbeat.watch(self._end_silent, self._end_hung if is_step_watched else None)

    def take_the_last_word(self) -> None:
        """Called by the main thread as it ends: the heartbeat has not begun to end this process, and will not."""
        self._end.acquire()

    def tell(self, failure: Failure) -> None:
        self._ask(lambda: self.store.compare_set("failed", "", failure.dump()), None)

    def heard(self) -> Failure | None:
        def look() -> Failure | None:
            there = self.store.check(["failed"])
            return read(self.store.get("failed").decode()) if there else None

        return self._ask(look, None)

    def explain(self, place: str) -> str:
        """Why this rank has waited at `place` in vain."""
        beats = self.heartbeat
        return self._ask(lambda: beats.explain(place), beats.without_store(place), 2.5 * beats.interval)

    def _ask(self, question: Callable[[], T], otherwise: T, more: float = 0.0) -> T:
        """In a thread: where a cable is out, a question to the store has no end. Asked in vain once, it is not asked
        again. more: seconds that the question itself takes."""
        if not self._answers:
            return otherwise
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        thread = threading.Thread(target=ask, name="question", daemon=True)
        thread.start()
        thread.join(ANSWER + more)
        self._answers = not thread.is_alive()
        return answers[0] if answers else otherwise

    def _end_hung(self, place: str) -> None:
        """In a thread: the main one will not come back."""

        def verdict() -> Failure:
            failure = _explain_wait(self.rank, self, place)
            traces = heartbeat.write_trace(self.rank)
            if traces and failure.because_of is None:
                return replace(failure, message=f"{failure.message} Last collectives of each rank: {traces}N")
            return failure

        self._end_process(verdict)

    def _end_silent(self, silent: int | None, place: str) -> None:
        """In a thread. silent: the rank that does not beat any more; None: one has said that it failed."""

        def verdict() -> Failure:
            cause = _cause(self.rank, self, wait=0)
            if cause is not None:
                return because_of_another(self.rank, cause)
            if silent is None:
                return Failure(self.rank, "stopped because another rank failed", because_of=-1)
            return Failure(self.rank, self.heartbeat.describe_silence(silent, place))

        self._end_process(verdict)

    def _end_process(self, verdict: Callable[[], Failure]) -> None:
        if not self._end.acquire(blocking=False):
            return  # the main thread is about to
        failure = verdict()
        leave_words(failure, self)
        if not rank_env.is_supervised(os.environ):
            print(f"error: {failure.message}", file=sys.stderr)
        if self.rank == 0:
            time.sleep(2 * self.heartbeat.interval)  # the others still ask the store, which goes with this process
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(failure.exit_code)

    def leave(self) -> None:
        """At a good end. The store goes with rank 0, which therefore waits for the others."""
        self.take_the_last_word()
        self.heartbeat.stop()
        with suppress(RuntimeError):
            self.heartbeat.say_goodbye()
            self.store.add("left", 1)
            deadline = time.monotonic() + PATIENCE
            while self.rank == 0 and time.monotonic() < deadline and self.store.add("left", 0) < self.world_size:
                time.sleep(0.02)


def leave_words(failure: Failure, connection: Connection | None) -> None:
    """Where the other ranks, torchrun or our launcher look for them."""
    if connection is not None:
        connection.tell(failure)
    _write_for_torchrun(failure)
    if rank_env.is_supervised(os.environ):
        failure.write(Path(os.environ[rank_env.FAILURES]))
        print(f"error: {failure.message}", file=getattr(sys.stderr, "log", sys.stderr), flush=True)


def explain(error: Exception, rank: int, connection: Connection | None) -> Failure:
    # What was being done, such as saving, may have put its own words around a lost connection.
    broken = next((link for link in _chain(error) if is_communication(link)), None)
    if broken is None and isinstance(error, GPTWorksError):
        return Failure(rank, str(error), can_restart=False)
    if broken is None and isinstance(error, OSError) and (message := file_errors.explain(error)):
        return Failure(rank, message, can_restart=file_errors.may_pass(error))
    if broken is None:
        text = "".join(traceback.format_exception(error)).rstrip()
        return Failure(rank, text, is_fault=True)
    cause = _cause(rank, connection, wait=0 if _TIMED_OUT.search(str(broken)) else PATIENCE)
    if cause is not None:
        return because_of_another(rank, cause)
    place = heartbeat.describe_traceback(broken.__traceback__)
    reason = str(broken).strip().splitlines()[0]
    if connection is None:
        return Failure(
            rank, f"rank {rank} could not connect to the other ranks ({reason}). Check that all of them started."
        )
    if _TIMED_OUT.search(str(broken)):
        return _explain_wait(rank, connection, place)
    silent = connection.heartbeat.silent_ranks()
    who = f"rank {silent[0]}" if silent else "another rank"
    return Failure(
        rank,
        f"stopped because {who} ended without a word, killed or its machine gone ({place}: {reason})",
        because_of=silent[0] if silent else -1,
    )


def _explain_wait(rank: int, connection: Connection, place: str) -> Failure:
    """This rank has waited for `parallel.timeout` in vain."""
    cause = _cause(rank, connection, wait=0)
    return because_of_another(rank, cause) if cause is not None else Failure(rank, connection.explain(place))


def because_of_another(rank: int, cause: Failure) -> Failure:
    if cause.because_of is not None:  # as another rank knows it
        return replace(cause, rank=rank)
    # The first line names the error; a traceback, which belongs to its own rank's log, ends with it.
    line = cause.message.splitlines()[-1 if cause.is_fault else 0]
    message = f"stopped because rank {cause.rank} failed: {line}"
    return Failure(rank, message, cause.is_fault, cause.can_restart, cause.rank)


def _cause(rank: int, connection: Connection | None, wait: float) -> Failure | None:
    folder = os.environ.get(rank_env.FAILURES)
    deadline = time.monotonic() + wait
    while True:
        known = read_all(Path(folder)) if folder else {}
        word = connection.heard() if connection is not None else None
        if word is not None:
            known.setdefault(word.rank, word)
        known.pop(rank, None)
        cause = first(known)
        if cause is not None and cause.because_of is None:
            return cause
        if time.monotonic() >= deadline:
            # A rank of the machine where it happened may know more than this one ever will.
            return word if word is not None and word.rank != rank and word.because_of not in (None, -1, rank) else None
        time.sleep(0.1)


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_communication(error: BaseException) -> bool:
    from torch import distributed

    if isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_LOST.search(str(error)))


def _write_for_torchrun(failure: Failure) -> None:
    """torchrun shows what it finds in this file as the reason of the failure."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not rank_env.is_supervised(os.environ):
        extra = {"py_callstack": failure.message, "timestamp": str(int(failure.time))}
        text = json.dumps({"message": {"message": failure.message, "extraInfo": extra}})
        with suppress(OSError):
            Path(path).write_text(text, encoding="utf-8")
