"""Damaged and hostile files for every reader, in children whose memory and time are bounded."""

import random
import sys
from collections import Counter
from pathlib import Path

import bounded_child
from test_limits import CASES, stated

from soak import driver
from soak.campaign import require
from soak.readers import all_readers

# Files of one reader at a time, by how its name begins: a whole command takes longer than a read.
BATCH = {"run-folder": 8, "run-looked": 100, "yaml": 250, "foreign": 250, "script": 250, "rank": 500, "": 2000}
SECONDS = 900.0  # for a batch on a busy machine; each file has its own limit
AT_ONCE = 4  # readers in one child: to import what they need takes longer than to read a thousand files


class Files:
    """A batch of damaged files of some readers."""

    name, share = "files", 2.6

    def ready(self, folder: Path) -> None:
        self.readers = list(all_readers())

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        readers = [self.readers[(AT_ONCE * number + each) % len(self.readers)] for each in range(AT_ONCE)]
        asked = {reader: next(n for start, n in BATCH.items() if reader.startswith(start)) for reader in readers}
        words = [
            sys.executable,
            "-m",
            "soak.read_mutated",
            str(chance.randrange(10**9)),
            str(folder),
            *(f"{reader}:{count}" for reader, count in asked.items()),
        ]
        with driver.started(words, folder / "log", seconds=SECONDS, cwd=driver.TESTS) as process:
            process.wait()
        text = (folder / "log").read_text(errors="replace")
        require(process.returncode == 0, lambda: f"{', '.join(readers)}: exit {process.returncode}\n{text[-4000:]}")
        return Counter(asked)


class Bombs:
    """Files that ask for much: refused, within the memory that is stated."""

    name, share = "bombs", 0.3
    SECONDS = 60

    def ready(self, folder: Path) -> None:
        pass

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        name = list(CASES)[number % len(CASES)]
        limit, make, words = CASES[name]
        ended = bounded_child.run(*make(folder), seconds=self.SECONDS)
        told = f"{name}: exit {ended.code} after {ended.seconds:.1f} s and {ended.peak >> 20:,} MB\n{ended.err[-2000:]}"
        require(ended.code == 2 and all(word in ended.err for word in words), told)
        require(ended.peak < stated(limit), told)
        return Counter([name])
