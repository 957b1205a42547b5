"""States that a power failure could leave, not only kills: recorded by strace, built and opened."""

import random
import sys
from collections import Counter
from pathlib import Path

from soak import driver
from soak.campaign import LeftOut, require
from soak.driver import succeed
from soak.recorded import has_strace

STATES = 25  # of one recording, besides those that kills leave
SECONDS = 900.0  # for all of one recording on a busy machine

LAYOUTS = ("dp2", "tp2", "pp2", "fsdp2")
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
    "export-hf",
    *(f"save-{layout}{how}" for layout in LAYOUTS for how in ("", "-asynchronous")),
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
    name, share = "crashes", 2.8
    goal = 0

    def ready(self, folder: Path) -> None:
        if not has_strace():
            raise LeftOut("strace is missing, or may not trace here (Debian: apt-get install strace)")
        self.material = folder
        material(folder)
        add_run(folder)

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        scenario = SCENARIO_NAMES[number % len(SCENARIO_NAMES)]
        killed, crashed = states_of(scenario, chance.randrange(10**9), STATES, folder, self.material)
        return Counter({f"{scenario}, every publishing step": killed, f"{scenario}, power": crashed})


def states_of(scenario: str, seed: int, count: int, folder: Path, made: Path) -> tuple[int, int]:
    """How many states of kills and of power failures were opened."""
    words = [sys.executable, "-m", "soak.open_states", scenario, str(seed), str(count), str(folder), str(made)]
    with driver.started(words, folder / "log", seconds=SECONDS, cwd=driver.TESTS) as process:
        process.wait()
    text = (folder / "log").read_text(errors="replace")
    require(process.returncode == 0, lambda: f"{scenario}: exit {process.returncode}\n{text[-4000:]}")
    killed, crashed = map(int, text.split()[-2:])
    return killed, crashed
