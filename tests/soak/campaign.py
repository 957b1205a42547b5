"""Parts, tries and the table at the end."""

import random
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class Found(Exception):
    """What should not have happened."""


class LeftOut(Exception):
    """Why a part cannot run on this machine."""


class Part(Protocol):
    """One kind of fault."""

    name: str
    share: float  # of the campaign's time
    goal: int  # faults in 30 minutes, whatever share of the time they take; 0: as many as its share allows

    def ready(self, folder: Path) -> None:
        """Once, before the first try: what tries compare with goes into this folder. May raise LeftOut."""

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        """One try, in an empty folder of its own. Gives how many faults of each kind were made; raises Found.

        Tries are numbered one after another: what must all have its turn is chosen by the number, the rest by chance.
        """


@dataclass
class Tally:
    part: Part
    tries: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    worst: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)
    left_out: str = ""
    under_way: int = 0
    next_seed: int = 0
    is_ready: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def backlog(self) -> float:
        """Time it has had for its share: the part with the least comes next."""
        return (self.seconds + 5.0 * self.under_way) / self.part.share

    def is_behind(self, minutes: float) -> bool:
        """Of the faults that are wanted by now; it is ahead when it can be, so that the last try is not needed."""
        return not self.under_way and self.faults.total() < self.part.goal * (minutes + 3) / 30


class Campaign:
    def __init__(self, parts: list[Part], folder: Path, seed: int) -> None:
        self.tallies = [Tally(part, next_seed=seed * 1_000_000) for part in parts]
        self.folder, self.lock, self.began = folder, threading.Lock(), time.monotonic()
        self.most_failures = 20  # of one part; the rest of the time is for the others

    def run(self, seconds: float, jobs: int) -> None:
        self.began = time.monotonic()
        deadline = self.began + seconds
        with ThreadPoolExecutor(jobs) as pool:
            for done in [pool.submit(self._work, deadline) for _ in range(jobs)]:
                done.result()

    def _work(self, deadline: float) -> None:
        while time.monotonic() < deadline and (tally := self._next()):
            self._attempt(tally, tally.next_seed - 1)
            with self.lock:
                tally.under_way -= 1

    def _next(self) -> Tally | None:
        with self.lock:
            there = [each for each in self.tallies if not each.left_out and len(each.failures) < self.most_failures]
            if not there:
                return None
            minutes = (time.monotonic() - self.began) / 60
            chosen = next((each for each in there if each.is_behind(minutes)), min(there, key=Tally.backlog))
            chosen.under_way += 1
            chosen.next_seed += 1
            return chosen

    def repeat(self, name: str, seed: int) -> None:
        tally = next(each for each in self.tallies if each.part.name == name)
        self._attempt(tally, seed)

    def _attempt(self, tally: Tally, seed: int) -> None:
        began = time.monotonic()
        folder = self.folder / f"{tally.part.name}-{seed}"
        try:
            if self._make_ready(tally):
                began = time.monotonic()
                folder.mkdir(parents=True)
                faults = tally.part.attempt(seed, random.Random(seed), folder)
                with self.lock:
                    tally.tries += 1
                    tally.faults.update(faults)
                shutil.rmtree(folder, ignore_errors=True)
        except Exception as error:  # a mistake of the campaign itself is shown as a failure too
            told = str(error) if isinstance(error, Found) else traceback.format_exc()
            with self.lock:
                tally.tries += 1
                tally.failures.append((seed, told))
            print(f"FAILURE {tally.part.name}:{seed} (kept in {folder})\n{told}", file=sys.stderr, flush=True)
        seconds = time.monotonic() - began
        with self.lock:
            tally.seconds, tally.worst = tally.seconds + seconds, max(tally.worst, seconds)

    def _make_ready(self, tally: Tally) -> bool:
        with tally.lock:
            if not tally.is_ready and not tally.left_out:
                place = self.folder / f"{tally.part.name}-ready"
                place.mkdir(parents=True)
                try:
                    tally.part.ready(place)
                except LeftOut as reason:
                    tally.left_out = str(reason)
                tally.is_ready = True
        return not tally.left_out

    @property
    def has_failed(self) -> bool:
        return any(each.failures for each in self.tallies)

    def table(self) -> Iterator[str]:
        yield f"| {'part':<14} | {'tries':>7} | {'faults':>8} | {'failures':>8} | {'worst try':>9} | note |"
        yield f"|{'-' * 16}|{'-' * 8}:|{'-' * 9}:|{'-' * 9}:|{'-' * 10}:|---|"
        for each in self.tallies:
            note = f"left out: {each.left_out}" if each.left_out else ""
            yield (
                f"| {each.part.name:<14} | {each.tries:>7,} | {each.faults.total():>8,} | {len(each.failures):>8} | "
                f"{each.worst:>7.1f} s | {note} |"
            )
        for each in self.tallies:
            if each.faults:
                yield f"{each.part.name}: " + "; ".join(f"{kind} {n:,}" for kind, n in sorted(each.faults.items()))
        for each in self.tallies:
            for seed, told in each.failures:
                yield f"failure: make soak REPEAT={each.part.name}:{seed}   {told.strip().splitlines()[-1][:150]}"


def require(condition: object, message: str | Callable[[], str]) -> None:
    if not condition:
        raise Found(message if isinstance(message, str) else message())
