"""A command in a container: the exact command line of docker or podman."""

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptworks.errors import UsageError

ENGINES = ("docker", "podman")
SHARED_MEMORY = "8g"  # of /dev/shm, through which the processes of one machine pass tensors; docker's own is 64 MB


@dataclass(frozen=True)
class Container:
    image: str
    command: Sequence[str]
    mounts: Sequence[Path] = ()
    environment: Sequence[str] = ()  # NAME=value, or NAME to pass on
    gpus: str = "none"  # all, none, or numbers such as 0,1
    folder: Path = Path()
    has_terminal: bool = False

    def command_line(self, engine: str) -> list[str]:
        """Folders have the same names inside as outside, and what is written belongs to whoever started it."""
        words = [engine, "run", "--rm", "--network", "host", "--shm-size", SHARED_MEMORY]
        if self.has_terminal:
            words += ["-i", "-t"]
        if self.gpus != "none":
            words += _gpus(engine, self.gpus)
        words += ["--userns", "keep-id"] if engine == "podman" else ["--user", f"{os.getuid()}:{os.getgid()}"]
        words += ["-e", "HOME=/tmp"]
        for each in self.environment:
            words += ["-e", each]
        here = self.folder.resolve()
        for mount in dict.fromkeys([here, *(path.resolve() for path in self.mounts)]):
            words += ["-v", f"{mount}:{mount}"]
        return [*words, "-w", str(here), self.image, *self.command]


def _gpus(engine: str, asked: str) -> list[str]:
    if engine == "docker":
        return ["--gpus", "all" if asked == "all" else f'"device={asked}"']
    return [word for name in asked.split(",") for word in ("--device", f"nvidia.com/gpu={name}")]


def engine(asked: str | None, *, needed: bool) -> str:
    """docker, or podman where there is no docker. `needed`: it is to be run, not only shown."""
    if asked:
        if needed and not shutil.which(asked):
            raise UsageError(f"--engine {asked}: is not on PATH. Install it, or look at the command with --dry-run.")
        return asked
    engine = next((name for name in ENGINES if shutil.which(name)), None)
    if engine is None and needed:
        raise UsageError("launch --image: neither docker nor podman is on PATH. Install one, or use --dry-run.")
    return engine or ENGINES[0]


def usual_gpus() -> str:
    return "all" if shutil.which("nvidia-smi") else "none"


def has_terminal() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()
