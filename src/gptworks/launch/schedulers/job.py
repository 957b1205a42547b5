"""One training run as a job of a cluster, and what each scheduler makes of it."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol

from gptworks.errors import UsageError
from gptworks.launch.schedulers.fit import Machine


@dataclass(frozen=True)
class Volume:
    """Storage that all nodes share: a folder, a claim or a bucket, and where the run sees it."""

    source: str
    path: str

    @classmethod
    def parse(cls, text: str) -> "Volume":
        """SOURCE:/PATH"""
        source, colon, path = text.rpartition(":")
        if not colon or not source or not path.startswith("/") or path.startswith("//"):
            raise UsageError(
                f"--volume: {text!r}. Needed: SOURCE:/PATH, such as my-claim:/data or s3://my-bucket:/data."
            )
        return cls(source, str(PurePosixPath(path)))

    def holds(self, path: str) -> bool:
        return PurePosixPath(path).is_relative_to(self.path)


@dataclass(frozen=True)
class ClusterJob:
    name: str
    settings: tuple[str, ...]  # words of `gptworks train` that say what to train: -c FILE, --preset NAME, KEY=VALUE
    config: str  # all of that as one YAML text, for machines that do not see these files
    machine: Machine
    time: int | None  # seconds that the job may take; None: what the cluster allows
    grace: int  # seconds of them that are for saving
    max_restarts: int
    run_folder: str
    image: str = ""
    volumes: tuple[Volume, ...] = ()
    setup: str = ""  # a shell command that makes `gptworks` a command
    kind: str = "job"  # of Kubernetes
    task_per: str = "gpu"  # of Slurm
    devices: tuple[str, ...] = ()  # GPUs that it fits on, by the names of plan/devices.toml
    head: tuple[str, ...] = ()  # what was asked and what was found out, for the first lines of the file

    def train_words(self, *settings: str) -> list[str]:
        """`gptworks train` of one process or launcher; `settings`: -c FILE where the text of `config` lies there."""
        device = "cuda" if self.machine.has_gpus else "cpu"
        return ["gptworks", "train", *(settings or self.settings), "--device", device, "--resume", "auto"]

    def launcher_words(self, node_rank: str, master: str) -> list[str]:
        """What one node adds to start its processes and to meet the other nodes."""
        words = ["--nproc", str(self.machine.processes), "--max-restarts", str(self.max_restarts)]
        if self.machine.nodes == 1:
            return words
        return ["--nnodes", str(self.machine.nodes), "--node-rank", node_rank, "--master", master, *words]

    @property
    def working_time(self) -> int | None:
        """Seconds until the run is told to save."""
        return None if self.time is None else self.time - self.grace

    @property
    def comments(self) -> str:
        return "".join(f"# {line}\n" for text in self.head for line in text.splitlines())


class Scheduler(Protocol):
    """What a module of this package has. A new scheduler is one such file and a line in registry.py."""

    SUFFIX: str  # of the file that is written
    OPTIONS: frozenset[str]  # those of `gptworks launch --to` that not all of them understand

    def check(self, job: ClusterJob) -> None: ...

    def render(self, job: ClusterJob) -> str: ...

    def submit_words(self, job: ClusterJob, path: Path) -> list[str]: ...


def default_name(stem: str) -> str:
    """A name that every scheduler takes: lower case letters, digits and dashes, a letter first."""
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    return name if name[:1].isalpha() else f"train-{name}".strip("-")


def require_name(name: str) -> str:
    """Kubernetes' rule, which is the strictest: it is part of the names of hosts."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name) or len(name) > 50:
        raise UsageError(
            f"--name: {name!r}. Needed: at most 50 lower case letters, digits and dashes, a letter first and no dash "
            "last."
        )
    return name


def require_stored(job: ClusterJob) -> None:
    """The run folder must outlive the machines and be seen by all of them."""
    folder = job.run_folder
    if folder.startswith("/") and not any(volume.holds(folder) for volume in job.volumes):
        mounted = ", ".join(volume.path for volume in job.volumes) or "there is none"
        raise UsageError(
            f"run.out: {folder} lies in no --volume ({mounted}): checkpoints would go with the machine. Needed: a "
            "folder in one of them, or a relative one, which is put into the first."
        )


def require_working_time(job: ClusterJob, early: int = 0) -> None:
    """`early`: seconds by which the scheduler may send its signal too early."""
    if job.time is None or job.time > job.grace + early:
        return
    sooner = f", and the signal may come {early} s sooner" if early else ""
    raise UsageError(
        f"--time: {job.time} s leave nothing to train: {job.grace} s of it are for saving (--grace){sooner}. Needed: "
        f"more than {job.grace + early} s, or a smaller --grace."
    )


class ShellText(str):
    """A word that the shell fills in, such as "$PWD": written as it is. All others are quoted."""


def shell_lines(words: list[str], indent: str) -> str:
    """A command over several lines: what is before `gptworks`, then each option of it with its value."""
    start = words.index("gptworks")
    text = ""
    for number, word in enumerate(words):
        is_new_line = number == start or (number > start and word.startswith("-"))
        between = "" if not text else f" \\\n{indent}" if is_new_line else " "
        text += between + (word if isinstance(word, ShellText) else shlex.quote(word))
    return text
