"""The schedulers by name."""

from typing import cast

from gptworks.errors import UsageError
from gptworks.launch.schedulers import kubernetes, skypilot, slurm
from gptworks.launch.schedulers.job import Scheduler

SCHEDULERS = cast(dict[str, Scheduler], {"slurm": slurm, "kubernetes": kubernetes, "skypilot": skypilot})


def scheduler(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise UsageError(f"--to: {name!r} is not known. Needed: {', '.join(SCHEDULERS)}.")
    return SCHEDULERS[name]
