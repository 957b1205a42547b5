"""Disks that are full, or turn read-only in the middle."""

import random
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from soak import driver
from soak.campaign import LeftOut, require
from soak.driver import run, succeed
from soak.kills import SETTINGS, References

# A small disk of its own, seen by the command alone; {size} in KB.
MOUNTED = (
    'mount -t tmpfs -o size={size}k soak "$0" && cp -a "$1/." "$0" && "${{@:3}}"; '
    'code=$?; cp -a "$0/." "$2"; exit $code'
)


class Disks:
    name, share = "disks", 0.8
    goal = 0

    def ready(self, folder: Path) -> None:
        tried = subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False)
        if tried.returncode:
            raise LeftOut("no mount namespaces here (unshare -rm)")
        self.references = References(folder)
        self.has_strace = shutil.which("strace") is not None

    def attempt(self, number: int, chance: random.Random, folder: Path) -> Counter[str]:
        if self.has_strace and number % 2:
            return Counter({"read-only": self._read_only(chance, folder)})
        return Counter({"full": self._full(chance, folder)})

    def _full(self, chance: random.Random, folder: Path) -> int:
        """Trained on a disk that is too small; then with what it left, on a large one, to the end."""
        for name in ("disk", "before", "after"):
            (folder / name).mkdir()
        size = chance.randint(60, 3000)
        prefix = ["unshare", "-rm", "bash", "-c", MOUNTED.format(size=size)]
        places = [str(folder / name) for name in ("disk", "before", "after")]
        done = run(*self._train(folder / "disk" / "run"), log=folder / "log", prefix=(*prefix, *places))
        if done.code == 0:
            return 0  # large enough
        driver.require_error(done, f"a disk of {size} KB")
        shutil.rmtree(folder / "disk")
        shutil.move(folder / "after", folder / "disk")
        text = succeed(*self._train(folder / "disk" / "run"), log=folder / "log")
        self.references.require_same("1", folder / "disk" / "run", text)
        return 1

    def _read_only(self, chance: random.Random, folder: Path) -> int:
        """From one moment on the disk takes no new names, as one that was remounted after an error."""
        number = chance.randint(1, 40)
        calls = "mkdir,rename,unlink,unlinkat,rmdir"
        prefix = ("strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}")
        prefix += ("-e", f"inject={calls}:error=EROFS:when={number}+")
        done = run(*self._train(folder / "run"), log=folder / "log", prefix=prefix)
        if done.code == 0:
            return 0
        driver.require_error(done, f"read-only from call {number} on")
        text = succeed(*self._train(folder / "run"), log=folder / "log")
        self.references.require_same("1", folder / "run", text)
        require("Traceback" not in text, text[-2000:])
        return 1

    def _train(self, out: Path) -> list[str | Path]:
        return ["train", "-c", self.references.recipe, *SETTINGS, "--out", out, "--resume", "auto"]
