"""prepare, convert and export, killed: what has the final name is whole, and the same command comes to the same end."""

import hashlib
import random
import shutil
import time
from collections import Counter
from pathlib import Path

from soak import driver
from soak.campaign import Found, require
from soak.driver import kill_all, run, started, succeed
from soak.kills import PUBLISHING

WHAT = ("prepare", "prepare again", "convert", "export")
TO = {"hf": "", "megatron": "", "nanogpt": ".pt", "paddlenlp": "", "gguf": ".gguf", "llmc": ".bin"}  # endings of names
MOST_CALLS = {**dict.fromkeys(PUBLISHING, 20), "openat": 1500}
# Certificates say when they were made, and archives carry dates.
NOT_COMPARED = ("certificate.json", ".md")


def contents(folder: Path) -> dict[str, str]:
    """Hashes of all files below, by name."""
    files = [file for file in folder.rglob("*") if file.is_file() and not file.name.endswith(NOT_COMPARED)]
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class Writers:
    name, share = "writers", 0.7
    goal = 0

    def ready(self, folder: Path) -> None:
        self.folder = folder
        self.has_strace = shutil.which("strace") is not None
        self.recipe = driver.write_recipe(folder)
        succeed("train", "-c", self.recipe, "train.steps=2", "--out", folder / "run", log=folder / "log")
        text = driver.CORPUS.read_bytes()
        (folder / "long.txt").write_bytes((text + b"\n\n") * (9_000_000 // len(text)))
        self.wanted: dict[str, dict[str, str]] = {}

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        what = WHAT[number % len(WHAT)]
        out = folder / "out"
        out.mkdir()
        to = chance.choice(list(TO))
        words = {
            "prepare": self._prepare("long.txt", out),
            "prepare again": self._prepare("long.txt", out),
            "convert": ["convert", self.folder / "run", out / f"made{TO[to]}", "--to", to],
            "export": ["export", "--model", self.folder / "run", "--to", "hf", "--out", out / "made"],
        }[what]
        if what == "prepare again":
            succeed(*self._prepare(driver.CORPUS, out), log=folder / "log")
        old = contents(out)
        faults = self._kill(words, chance, folder, longest=4.0)
        new = self._wanted(f"{what} {to if what == 'convert' else ''}", words, out)
        if what.startswith("prepare"):
            self._require_old_new_or_refused(out, old, new, folder)
            succeed(*words, log=folder / "log")
        elif not self._is_whole(out, new):
            succeed(*words, log=folder / "log")
        require(
            contents(out) == new, lambda: f"{what}: the second time gave {sorted(contents(out))}, not {sorted(new)}"
        )
        return Counter({what: faults})

    def _prepare(self, text: str | Path, out: Path) -> list[str | Path]:
        tokenizer = self.folder / "store.tokenizer.json"
        return ["prepare", self.folder / text, "--tokenizer", tokenizer, "--out", out / "made", "--workers", "2"]

    def _wanted(self, key: str, words: list[str | Path], out: Path) -> dict[str, str]:
        """What the command makes when it is left alone."""
        if key not in self.wanted:
            alone = self.folder / f"alone-{len(self.wanted)}-{random.randrange(10**9)}"
            alone.mkdir()
            moved = [alone / each.name if isinstance(each, Path) and each.parent == out else each for each in words]
            succeed(*moved, log=self.folder / "log")
            self.wanted[key] = contents(alone)
        return self.wanted[key]

    def _kill(self, words: list[str | Path], chance: random.Random, folder: Path, longest: float) -> int:
        command = driver.command(*words)
        if self.has_strace and chance.random() < 0.7:
            calls = chance.choice([*PUBLISHING, "openat"])
            number = chance.randint(1, MOST_CALLS[calls])
            inject = ["-e", f"inject={calls}:signal=KILL:when={number}"]
            command = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", *inject, *command]
            with started(command, folder / "log") as process:
                process.wait()
            return int(process.returncode != 0)
        with started(command, folder / "log") as process:
            time.sleep(chance.uniform(0.1, longest))
            was_there = process.poll() is None
            kill_all(process.pid)
        return int(was_there)

    def _require_old_new_or_refused(self, out: Path, old: dict[str, str], new: dict[str, str], folder: Path) -> None:
        there = {name: value for name, value in contents(out).items() if not name.startswith("made.part")}
        if there in (old, new):
            return
        done = run("inspect", out / "made", log=folder / "log")
        driver.require_error(done, f"a dataset between old and new: {sorted(there)}")

    def _is_whole(self, out: Path, new: dict[str, str]) -> bool:
        """Nothing under the final name, or all of it."""
        named = {name: value for name, value in contents(out).items() if not name.startswith("made.part-")}
        if named and named != new:
            raise Found(f"a part of the result has its final name: {sorted(named)} of {sorted(new)}")
        return bool(named)
