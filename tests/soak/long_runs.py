"""A long run: memory, descriptors and threads stay where they are once it has warmed up."""

import random
import time
from collections import Counter
from pathlib import Path

from soak import driver
from soak.campaign import Found, require
from soak.driver import last_step, started, wait_until

WARM = 150  # steps
SECONDS = 45.0
MOST_GROWTH = 8 << 20  # bytes of resident memory between the two halves of what follows


class LongRuns:
    name, share = "long", 0.4
    goal = 0

    def ready(self, folder: Path) -> None:
        self.recipe = driver.write_recipe(folder)

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        out = folder / "run"
        is_asynchronous = str(number % 2 == 1).lower()
        settings = ["train.steps=10000000", "checkpoint.every=20", f"checkpoint.asynchronous={is_asynchronous}"]
        words = driver.command(
            "train", "-c", self.recipe, *settings, "evaluate.every=50", "evaluate.batches=2", "--out", out
        )
        with started(words, folder / "log") as process:
            if not wait_until(process, lambda: last_step(out) >= WARM):
                raise Found((folder / "log").read_text()[-3000:])
            samples, deadline = [], time.monotonic() + SECONDS
            while time.monotonic() < deadline and process.poll() is None:
                samples.append(_sample(process.pid))
                time.sleep(0.25)
            steps = last_step(out) - WARM
            require(process.poll() is None, lambda: (folder / "log").read_text()[-3000:])
        half = len(samples) // 2
        early, late = samples[:half], samples[half:]
        # A file that is just being written is open, so that of descriptors and threads the fewest are compared.
        for what, most, of in (("memory", MOST_GROWTH, max), ("descriptors", 0, min), ("threads", 0, min)):
            before, after = (of(sample[what] for sample in part) for part in (early, late))
            require(after - before <= most, f"{what} grew from {before:,} to {after:,} in {steps} steps")
        return Counter({f"steps, asynchronous={is_asynchronous}": steps})


def _sample(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "threads": int(status["Threads"]),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }
