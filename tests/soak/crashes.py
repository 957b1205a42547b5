"""States that a power failure could leave, not only kills: recorded by strace, built and opened."""

import random
import sys
from pathlib import Path

from soak import driver
from soak.campaign import LeftOut, require
from soak.driver import succeed
from soak.recorded import has_strace

STATES = 25  # of one recording

SCENARIO_NAMES = (
    "save",
    "save-keep-one",
    "save-asynchronous",
    "save-best",
    "save-first",
    "prepare",
    "prepare-again",
    "prepare-nanogpt",
    "prepare-paddle",
    "convert-hf",
    "convert-gguf",
)


def material(folder: Path) -> None:
    """A store, a recipe, and two texts of the same documents in another order, which have as many tokens."""
    driver.write_recipe(folder)
    documents = driver.CORPUS.read_text(encoding="utf-8").strip().split("\n\n")
    (folder / "old.txt").write_text("\n\n".join(documents), encoding="utf-8")
    (folder / "new.txt").write_text("\n\n".join(reversed(documents)), encoding="utf-8")


def add_run(folder: Path) -> None:
    succeed("train", "-c", folder / "tiny.yaml", "train.steps=2", "--out", folder / "run", log=folder / "log")


class Crashes:
    name, share = "crashes", 2.0

    def ready(self, folder: Path) -> None:
        if not has_strace():
            raise LeftOut("strace is missing, or may not trace here (Debian: apt-get install strace)")
        self.material = folder
        material(folder)
        add_run(folder)

    def attempt(self, chance: random.Random, folder: Path) -> int:
        return states_of(chance.choice(SCENARIO_NAMES), chance.randrange(10**9), STATES, folder, self.material)


def states_of(scenario: str, seed: int, count: int, folder: Path, made: Path) -> int:
    words = [sys.executable, "-m", "soak.open_states", scenario, str(seed), str(count), str(folder), str(made)]
    with driver.started(words, folder / "log", cwd=driver.TESTS) as process:
        process.wait()
    text = (folder / "log").read_text(errors="replace")
    require(process.returncode == 0, lambda: f"{scenario}: exit {process.returncode}\n{text[-4000:]}")
    return count
