"""Damaged and hostile files for every reader, in children whose memory and time are bounded."""

import random
import sys
from pathlib import Path

import bounded_child
from test_limits import CASES, stated

from soak import driver
from soak.campaign import require
from soak.readers import all_readers

BATCH = {"run-folder": 6}
USUAL_BATCH = 1000


class Files:
    """A batch of damaged files of one reader."""

    name, share = "files", 3.0

    def ready(self, folder: Path) -> None:
        self.readers = list(all_readers())

    def attempt(self, chance: random.Random, folder: Path) -> int:
        reader = chance.choice(self.readers)
        count = BATCH.get(reader, USUAL_BATCH)
        words = [
            sys.executable,
            "-m",
            "soak.read_mutated",
            reader,
            str(chance.randrange(10**9)),
            str(count),
            str(folder),
        ]
        with driver.started(words, folder / "log", cwd=driver.TESTS) as process:
            process.wait()
        text = (folder / "log").read_text(errors="replace")
        require(process.returncode == 0, lambda: f"{reader}: exit {process.returncode}\n{text[-4000:]}")
        return count


class Bombs:
    """Files that ask for much: refused, within the memory that is stated."""

    name, share = "bombs", 0.7
    SECONDS = 60

    def ready(self, folder: Path) -> None:
        pass

    def attempt(self, chance: random.Random, folder: Path) -> int:
        name = chance.choice(list(CASES))
        limit, make, words = CASES[name]
        ended = bounded_child.run(*make(folder), seconds=self.SECONDS)
        told = f"{name}: exit {ended.code} after {ended.seconds:.1f} s and {ended.peak >> 20:,} MB\n{ended.err[-2000:]}"
        require(ended.code == 2 and all(word in ended.err for word in words), told)
        require(ended.peak < stated(limit), told)
        return 1
