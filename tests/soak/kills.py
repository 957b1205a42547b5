"""Training that is killed: at random moments, and at every system call that publishes something."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from itertools import product
from pathlib import Path

from test_resume import SETTINGS as RESUME_SETTINGS

from soak import driver
from soak.campaign import Found, require
from soak.driver import kill_all, last_step, started, succeed, wait_until

STEPS = 8
LAYOUTS = {"1": [], **{name: ["--nproc", "2", f"parallel.{name[:-1]}=2"] for name in ("dp2", "tp2", "pp2", "fsdp2")}}
SETTINGS = [
    *(each for each in RESUME_SETTINGS if not each.startswith(("train.steps", "evaluate", "checkpoint.every"))),
    f"train.steps={STEPS}",
    "checkpoint.every=1",
    "evaluate.every=4",
    "evaluate.batches=2",
    "parallel.timeout=60",
]
SAVING = ("synchronous", "asynchronous")
# What makes files appear, disappear and last; and how often one thread does it in such a run, by how it saves: where
# that is in the background, every save has a thread of its own.
PUBLISHING = ("fsync", "rename", "mkdir", "unlink,unlinkat,rmdir")
MOST_CALLS = {
    "synchronous": dict(zip(PUBLISHING, (130, 32, 32, 55), strict=True)),
    "asynchronous": dict(zip(PUBLISHING, (17, 5, 4, 10), strict=True)),
}


class References:
    """Runs that were left alone, one for each layout."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = driver.write_recipe(folder)
        self.found: dict[str, tuple[list[dict[str, object]], bytes]] = {}

    def of(self, layout: str) -> tuple[list[dict[str, object]], bytes]:
        if layout not in self.found:
            out = self.folder / f"left-alone-{layout}-{random.randrange(10**9)}"
            succeed("train", "-c", self.recipe, *SETTINGS, *LAYOUTS[layout], "--out", out, log=self.folder / "log")
            self.found[layout] = driver.lines_of(out), driver.weights_of(out, STEPS)
        return self.found[layout]

    def require_same(self, layout: str, out: Path, text: str) -> None:
        lines, weights = self.of(layout)
        found = driver.lines_of(out)
        if found != lines:
            differs = next(
                (a for a, b in zip(found, lines, strict=False) if a != b), f"{len(found)} of {len(lines)} lines"
            )
            raise Found(f"{out}: metrics differ from those of a run left alone, first {differs}\n{text[-2000:]}")
        require(
            driver.weights_of(out, STEPS) == weights, f"{out}: the last weights differ from those of a run left alone"
        )
        left = sorted(path.name for path in (out / "checkpoints").glob(".*"))
        require(not left, f"{out}: leftovers {left}")


class Kills:
    name, share = "kills", 4.0
    goal = 0

    def ready(self, folder: Path) -> None:
        self.references = References(folder)
        self.has_strace = shutil.which("strace") is not None

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        # Five layouts and eight ways to be killed: forty tries in a row have each of them with each.
        layout, (calls, saving) = list(LAYOUTS)[number % 5], list(product(PUBLISHING, SAVING))[number % 8]
        options = [*SETTINGS, f"checkpoint.asynchronous={str(saving == 'asynchronous').lower()}", *LAYOUTS[layout]]
        words = ["train", "-c", str(self.references.recipe), *options, "--out", str(folder / "run"), "--resume", "auto"]
        faults: Counter[str] = Counter()
        kinds = ["moment", calls if self.has_strace else "moment", *(["moment"] if chance.random() < 0.3 else [])]
        chance.shuffle(kinds)
        for kind in kinds:
            if kind == "moment":
                done = self._at_a_moment(words, chance, folder)
            else:
                done = self._at_a_call(words, calls, chance.randint(1, MOST_CALLS[saving][calls]), folder)
            faults[f"{layout} {saving} {kind.partition(',')[0]}"] += done
        text = succeed(*words, log=folder / "log")
        self.references.require_same(layout, folder / "run", text)
        return +faults

    def _at_a_call(self, words: list[str], calls: str, number: int, folder: Path) -> int:
        """Killed just before the Nth call of a kind, in whichever process makes it first."""
        prefix = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}")
        with started(
            [*prefix, "-e", f"inject={calls}:signal=KILL:when={number}", *driver.command(*words)], folder / "log"
        ) as process:
            process.wait()
        return int(process.returncode != 0)

    def _at_a_moment(self, words: list[str], chance: random.Random, folder: Path) -> int:
        out = folder / "run"
        target = last_step(out) + chance.randint(0, 3)
        environment = out / "environment.json"
        began = environment.stat().st_mtime_ns if environment.exists() else None
        only_one = chance.random() < 0.3

        def arrived() -> bool:
            is_new = environment.exists() and environment.stat().st_mtime_ns != began
            return is_new and last_step(out) >= target

        with started(driver.command(*words), folder / "log") as process:
            if not wait_until(process, arrived):
                return 0
            time.sleep(chance.random() * 0.05)
            family = driver.descendants(process.pid)
            if only_one:
                process.send_signal(signal.SIGKILL)  # the launcher alone; ranks notice and end
            else:
                kill_all(process.pid)
            process.wait()
        driver.require_gone(family)
        return 1


class Ranks:
    """A rank of two that is lost, stopped or slow, in a run that may start again."""

    name, share = "ranks", 2.0
    goal = 0

    def ready(self, folder: Path) -> None:
        self.references = References(folder)

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        layout = [name for name in LAYOUTS if name != "1"][number % 4]
        fault = ("lost", "slow", "stopped")[number % 3]
        words = ["train", "-c", self.references.recipe, *SETTINGS, "parallel.timeout=20", *LAYOUTS[layout]]
        words += ["--max-restarts", "2", "--out", folder / "run"]
        target = chance.randint(0, STEPS - 2)
        with started(driver.command(*words), folder / "log") as process:
            if not wait_until(
                process, lambda: (folder / "run/metrics.jsonl").exists() and last_step(folder / "run") >= target
            ):
                raise Found(f"ended too early\n{(folder / 'log').read_text()[-2000:]}")
            ranks = [pid for pid in driver.descendants(process.pid) if not driver.descendants(pid)]
            victim = chance.choice(ranks[-2:])
            self._strike(fault, victim, chance)
            process.wait()
        text = (folder / "log").read_text(errors="replace")
        require(process.returncode == 0, f"a rank that was {fault}: exit {process.returncode}\n{text[-3000:]}")
        self.references.require_same(layout, folder / "run", text)
        return Counter([f"{layout} {fault}"])

    def _strike(self, fault: str, victim: int, chance: random.Random) -> None:
        try:
            os.kill(victim, signal.SIGKILL if fault == "lost" else signal.SIGSTOP)
            if fault == "slow":
                time.sleep(chance.uniform(0.2, 4.0))
                os.kill(victim, signal.SIGCONT)
        except ProcessLookupError:
            pass  # it had just come to its end
