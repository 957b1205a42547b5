"""The live processes of a run."""

import ctypes
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gptworks.config.derive import Layout, solve_layout
from gptworks.config.schema import ParallelConfig, RunFolderConfig
from gptworks.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; 32 MB is the most that glibc accepts for the second


@dataclass(frozen=True)
class World:
    """This process among all: its device, its place in the layout, and the groups it talks to."""

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    mesh: "DeviceMesh | None" = None  # axes pp, dp, fsdp, tp; None where there is one process

    @property
    def place(self) -> Layout:
        """The coordinate in each direction, from 0."""
        rest, found = self.rank, {}
        for axis, size in reversed(vars(self.layout).items()):
            rest, found[axis] = divmod(rest, size)
        return Layout(**found)

    @property
    def data_rank(self) -> int:
        return self.place.dp * self.layout.fsdp + self.place.fsdp

    @property
    def data_parallel(self) -> int:
        return self.layout.data_parallel

    @property
    def is_main(self) -> bool:
        """The one process that writes what is written once."""
        return self.rank == 0

    def axis(self, name: str) -> "DeviceMesh | None":
        """The one-dimensional mesh of this process's neighbours in that direction; None where it has none."""
        return self.mesh[name] if self.mesh is not None and getattr(self.layout, name) > 1 else None


def start(parallel: ParallelConfig, run: RunFolderConfig) -> World:
    layout = solve_layout(parallel, 1)
    if run.threads:
        torch.set_num_threads(run.threads)
    keep_freed_memory()
    return World(pick_device(run.device), layout)


def join(layout: Layout, rank: int, device: torch.device, **group: Any) -> World:
    """Meet the other processes of the layout. `group`: as init_process_group takes it."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, rank=rank, world_size=layout.world_size, **group)
    sizes = vars(layout)
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return World(device, layout, rank, mesh)


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
