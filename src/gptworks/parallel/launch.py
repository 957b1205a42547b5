"""The live processes of a run."""

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass

import torch

from gptworks.config.schema import ParallelConfig, RunFolderConfig
from gptworks.errors import ConfigError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; 32 MB is the most that glibc accepts for the second


@dataclass(frozen=True)
class World:
    """This process among all: its device, and which part of each global batch it reads."""

    device: torch.device
    data_rank: int = 0
    data_parallel: int = 1


def start(parallel: ParallelConfig, run: RunFolderConfig) -> World:
    if parallel.world_size != 1:
        degrees = " x ".join(f"{name}={value}" for name, value in parallel.model_dump().items())
        raise ConfigError(
            "parallel",
            [f"parallel: {degrees} needs {parallel.world_size} processes, but this run has 1. Set all of them to 1."],
        )
    if run.threads:
        torch.set_num_threads(run.threads)
    keep_freed_memory()
    return World(pick_device(run.device))


def keep_freed_memory() -> None:
    """Let malloc reuse what was freed instead of returning it to the system after every operation.

    By default glibc maps each block above 128 KB anew, and filling fresh pages costs a fifth of a small training step.
    """
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):  # another C library: nothing to set
        library = ctypes.CDLL(None)
        for option, value in ((_M_MMAP_THRESHOLD, 32 * 2**20), (_M_TRIM_THRESHOLD, 2**31 - 1)):
            library.mallopt(option, value)


def pick_device(name: str) -> torch.device:
    """auto = cuda, then mps, then cpu. A device that is asked for by name and not there is refused."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return torch.device(next(kind for kind, there in present.items() if there))
    if not present[name]:
        have = ", ".join(kind for kind, there in present.items() if there)
        raise ConfigError(
            "run.device",
            [f"run.device: {name} is not available here. Available: {have}. Use --device {have.split(', ')[0]}."],
        )
    return torch.device(name)
