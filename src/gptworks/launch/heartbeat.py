"""Each rank says every moment that it lives and where it is, so that a hang can be given a name."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

TRACES = "TORCH_FR_DUMP_TEMP_FILE"  # torch's name for where a rank writes its last collectives; its number follows
TRACE = "collectives-rank-"

FAILED_S = 6.0  # for which a rank may go on after another has failed: its own group tells it so before, most often
_GOODBYE = -1  # instead of the number of a beat

_where = ""  # such as "step 7"; the rest is read from the stack
_moves = 0

# Under NCCL a rank that waits for another stands in the next call that needs the device, somewhere in the step. Outside
# of it (evaluation, saving, reading data) and while something is compiled, standing still is no sign of a hang.
_STEP = "gptworks.train.step"
_COMPILING = ("torch._dynamo.convert_frame", "torch._inductor.compile_fx")


def note(where: str) -> None:
    """What this process is at; costs nothing, and is told when somebody waits for it in vain."""
    global _where
    _where = where
    moved()


def moved() -> None:
    """The step goes on, with another micro-batch: whatever follows is not the wait that was seen before."""
    global _moves
    _moves += 1


@dataclass(frozen=True)
class Beat:
    count: int
    where: str


class Heartbeat:
    """Beats in a thread of its own, on a connection of its own: the main one may be waiting. Rank 0 hears the beats of
    all others, and these hear rank 0's, so that no rank but that one has more to do where there are many."""

    def __init__(self, store: Any, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        self.interval = min(5.0, max(0.2, timeout / 20))
        self.store = store.clone()
        self.store.set_timeout(timedelta(seconds=max(3.0, 2 * self.interval)))
        self._others: dict[int, Beat] = {}  # as they were heard last
        self._has_failed = False  # whether a rank has told the store so
        self._main = threading.get_ident()
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._beat, name="heartbeat", daemon=True)]

    def start(self) -> None:
        self._threads[0].start()

    def watch(self, on_silence: Callable[[int | None, str], None], on_hang: Callable[[str], None] | None) -> None:
        """Both are called once, in a thread, with the place at which the main one is.

        on_silence: a rank (the first argument) has not beaten for `timeout`, whatever this one waits in, such as the
        group of saving, which gives a slow disk hours; None: a rank has told that it failed, and this one goes on.
        on_hang: the main thread has stood in a step for `timeout`. None where the wait ends with an error by itself, as
        gloo's does.
        """
        self._threads.append(
            threading.Thread(target=self._watch, args=(on_silence, on_hang), name="watch", daemon=True)
        )
        self._threads[-1].start()

    def stop(self) -> None:
        self._end.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2 * self.interval)

    def say_goodbye(self) -> None:
        """After `stop`, at a good end: whoever goes on is not to take this rank for a silent one."""
        self.store.set(f"beat/{self.rank}", json.dumps([_GOODBYE, ""]))

    def _beat(self) -> None:
        count = 0
        while not self._end.is_set():
            count += 1
            place = describe(sys._current_frames().get(self._main))
            try:
                self.store.set(f"beat/{self.rank}", json.dumps([count, place]))
                self._listen()
            except RuntimeError:  # the store is gone with its rank: groups and launchers notice that
                self._others = {}
                return
            self._end.wait(self.interval)

    def _listen(self) -> None:
        """Where a cable is out or rank 0 is stopped, this has no end, and what was heard last stays as it is."""
        keys = [f"beat/{rank}" for rank in (range(self.world_size) if self.rank == 0 else (0,))]
        if self.store.check(keys):
            heard = [Beat(*json.loads(text)) for text in self.store.multi_get(keys)]
            self._others = {rank: beat for rank, beat in enumerate(heard) if rank != self.rank}
        self._has_failed = self.store.check(["failed"])

    def _watch(self, on_silence: Callable[[int | None, str], None], on_hang: Callable[[str], None] | None) -> None:
        # What one look may add is limited, so that a process that was itself suspended has not been waiting.
        standing, silence, most = _Standing(), _Silence(), 2 * self.interval
        while not self._end.wait(self.interval):
            frame = sys._current_frames().get(self._main)
            place = describe(frame)
            has_stood = standing.seconds(frame, most)
            del frame  # it holds all that the main thread works with
            silence.look(self._others, most, has_failed=self._has_failed)
            # Where a group gives up after `timeout` it speaks first, since it knows which collective it was.
            silent = silence.longer_than(self.timeout + 4 * self.interval)
            if silence.since_failure > FAILED_S:
                on_silence(None, place)
                return
            if silent is not None:
                on_silence(silent, place)
                return
            if on_hang is not None and has_stood >= self.timeout:
                on_hang(place)
                return

    def explain(self, waited_in: str) -> str:
        """Who did not come to the collective this rank has waited for in vain."""
        try:
            self.store.set(f"gave-up/{self.rank}", waited_in)
            before = self._beats()
            time.sleep(2.5 * self.interval)
            after = self._beats()
            came = {rank for rank in range(self.world_size) if self.store.check([f"gave-up/{rank}"])}
        except RuntimeError:
            return self.without_store(waited_in)
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            last = after.get(rank)
            if last is None or last == before.get(rank):
                return self._silent(rank, last.where if last else "", f"waited for it in {waited_in}")
        for rank in others:
            if rank not in came:
                return (
                    f"rank {rank} of {self.world_size} did not come to {waited_in} within {self.timeout:g} s. It is "
                    f"alive, in {after[rank].where}. Raise parallel.timeout if that may take so long."
                )
        places = "; ".join(f"rank {rank} in {self.store.get(f'gave-up/{rank}').decode()}" for rank in sorted(came))
        return f"all ranks waited for each other for {self.timeout:g} s: {places}."

    def without_store(self, waited_in: str) -> str:
        """Rank 0 keeps the store: when that does not answer, rank 0 does not."""
        if self.rank:
            return self._silent(0, "", f"waited for it in {waited_in}")
        return f"{waited_in}: no answer, and no word from anybody."

    def describe_silence(self, rank: int, place: str) -> str:
        """What to say about a rank that `watch` has found silent."""
        last = self._others.get(rank)
        return self._silent(rank, last.where if last else "", f"was in {place}")

    def silent_ranks(self) -> list[int]:
        """The ranks that do not beat any more. Takes a moment."""
        try:
            before = self._beats()
            time.sleep(min(3.0, 2.5 * self.interval))
            after = self._beats()
        except RuntimeError:
            return [0] if self.rank else []
        return [rank for rank in range(self.world_size) if rank != self.rank and after.get(rank) == before.get(rank)]

    def _silent(self, rank: int, last: str, this_rank: str) -> str:
        seen = f"; last seen in {last}" if last else ""
        return (
            f"rank {rank} of {self.world_size} has not answered for {self.timeout:g} s{seen}. "
            f"Rank {self.rank} {this_rank}. "
            "Its process is stopped or its machine is gone; go on with --resume auto."
        )

    def _beats(self) -> dict[int, Beat]:
        keys = {rank: f"beat/{rank}" for rank in range(self.world_size)}
        there = {rank: key for rank, key in keys.items() if self.store.check([key])}
        values = self.store.multi_get(list(there.values())) if there else []
        return {rank: Beat(*json.loads(value)) for rank, value in zip(there, values, strict=True)}


class _Silence:
    """For how long each rank has not beaten, and for how long it is known that one has failed."""

    def __init__(self) -> None:
        self._beats: dict[int, Beat] = {}
        self._seconds: dict[int, float] = {}
        self._looked = time.monotonic()
        self.since_failure = 0.0

    def look(self, beats: dict[int, Beat], most: float, *, has_failed: bool) -> None:
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, most), now
        self._seconds = {
            rank: self._seconds.get(rank, 0.0) + passed if beat == self._beats.get(rank) else 0.0
            for rank, beat in beats.items()
            if beat.count != _GOODBYE
        }
        self._beats = beats
        self.since_failure = self.since_failure + passed if has_failed else 0.0

    def longer_than(self, seconds: float) -> int | None:
        return next((rank for rank, silent in self._seconds.items() if silent > seconds), None)


class _Standing:
    """For how long the main thread has been at the very same place of a step."""

    def __init__(self) -> None:
        self._place: object = None
        self._seconds, self._looked = 0.0, time.monotonic()

    def seconds(self, frame: FrameType | None, most: float) -> float:
        """most: what one look may add, so that a process that was itself suspended has not been waiting."""
        now, place = time.monotonic(), _place_in_step(frame)
        is_same = place is not None and place == self._place
        self._seconds = self._seconds + min(now - self._looked, most) if is_same else 0.0
        self._place, self._looked = place, now
        return self._seconds


def _place_in_step(frame: FrameType | None) -> object:
    """The instruction in each function, from the innermost outwards; None where standing still is not waiting."""
    calls, is_step = [], False
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module in _COMPILING:
            return None
        is_step = is_step or module == _STEP
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return (_moves, calls) if is_step else None


def write_trace(rank: int) -> str:
    """The last collectives of this rank, as torch writes them when NCCL gives up: `torchfrtrace` reads them. Where they
    are, without the rank's number; empty if nowhere."""
    from torch._C import _distributed_c10d as c10d

    prefix = os.environ.get(TRACES, "")
    dump = getattr(c10d, "_dump_nccl_trace", None) or getattr(c10d, "_dump_fr_trace", None)
    if not prefix or dump is None:
        return ""
    path = Path(f"{prefix}{rank}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(dump())
    except (OSError, RuntimeError):
        return ""  # the verdict is worth more than its illustration
    return prefix


def describe(frame: FrameType | None) -> str:
    """Such as "step 7, all_reduce in backward": the note, the collective, and the function of ours it is in."""
    return _place_in(_outwards(frame))


def describe_traceback(traceback: TracebackType | None) -> str:
    frames = []
    while traceback is not None:
        frames.append((traceback.tb_frame.f_globals.get("__name__", ""), traceback.tb_frame.f_code.co_name))
        traceback = traceback.tb_next
    return _place_in(reversed(frames))


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, str]]:
    while frame is not None:
        yield frame.f_globals.get("__name__", ""), frame.f_code.co_name
        frame = frame.f_back


# Where torch waits for a collective, by the name of that.
_CALLED = {
    "_wait_batch_p2p": "send/receive between stages",
    "foreach_all_gather_copy_out": "all_gather",
    "foreach_reduce": "reduce_scatter",
}


def _place_in(calls: Any) -> str:
    """`calls`: (module, function) from the innermost outwards."""
    collective = function = ""
    for module, name in calls:
        if module.startswith("torch.distributed.") and not collective and not function:
            is_internal = name.startswith(("_", "wrapper", "<"))
            collective = _CALLED.get(name, "" if is_internal else name)
        if not function and not module.startswith(("torch", "threading", "contextlib", "runpy")):
            function = name
    place = " in ".join(part for part in (collective, function) if part and part != "<module>")
    return ", ".join(part for part in (_where, place) if part) or "its start"
