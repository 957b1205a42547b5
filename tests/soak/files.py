"""Damaged and hostile files for every reader, in children whose memory and time are bounded."""

import multiprocessing
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path

import bounded_child
from test_limits import CASES, stated

from soak import driver
from soak.campaign import Found, require
from soak.read_mutated import read_all
from soak.readers import all_readers

# Files of one reader at a time, by how its name begins: a whole command takes longer than a read.
BATCH = {
    "run-folder": 8,
    "run-looked": 100,
    "yaml": 250,
    "foreign": 250,
    "script": 250,
    "rank": 500,
    "records": 250,
    "": 2000,
}
SECONDS = 900.0  # for a batch; each file has its own limit
AT_ONCE = 4  # readers in one child
MEMORY_DISK = Path("/dev/shm")


class Files:
    """A batch of damaged files of some readers."""

    name, share = "files", 2.6
    goal = 60_000  # files in 30 minutes

    def ready(self, folder: Path) -> None:
        self.readers = list(all_readers())
        # To import what readers need takes longer than to read a thousand files: children are copies of one process
        # that has imported it, and has read nothing.
        os.environ.update(driver.ENVIRONMENT)
        self.copies = multiprocessing.get_context("forkserver")
        self.copies.set_forkserver_preload(["soak.preload"])

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        readers = [self.readers[(AT_ONCE * number + each) % len(self.readers)] for each in range(AT_ONCE)]
        asked = {reader: next(n for start, n in BATCH.items() if reader.startswith(start)) for reader in readers}
        # In memory where it can be: a disk is given each file as it is replaced, and the reader waits for it.
        with tempfile.TemporaryDirectory(prefix="soak-", dir=MEMORY_DISK if MEMORY_DISK.is_dir() else folder) as place:
            try:
                self._read(chance.randrange(10**9), Path(place), asked, folder / "log")
            except Found:
                shutil.copytree(place, folder / "files")
                raise
        return Counter(asked)

    def _read(self, seed: int, place: Path, asked: dict[str, int], log: Path) -> None:
        child = self.copies.Process(target=read_all, args=(seed, place, asked, log))
        child.start()
        assert child.pid is not None
        with driver.limited(child.pid, log, SECONDS, ", ".join(asked)):
            child.join()
        text = log.read_text(errors="replace") if log.exists() else ""
        require(child.exitcode == 0, lambda: f"{', '.join(asked)}: exit {child.exitcode}\n{text[-4000:]}")


class Bombs:
    """Files that ask for much: refused, within the memory that is stated."""

    name, share = "bombs", 0.3
    goal = 0
    SECONDS = 60  # without those that it waits for a core

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
