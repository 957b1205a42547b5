"""The live processes of a run."""

import atexit
import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from gptworks import cpu
from gptworks.config.derive import Layout, solve_layout
from gptworks.config.schema import ParallelConfig, RunFolderConfig
from gptworks.errors import ConfigError
from gptworks.parallel import placement
from gptworks.parallel.failures import Connection
from gptworks.parallel.heartbeat import note as note

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; 32 MB is the most that glibc accepts for the second


@dataclass(frozen=True)
class World:
    """This process among all: its device, its place in the layout, and the groups it talks to."""

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    mesh: "DeviceMesh | None" = None  # axes pp, dp, fsdp, tp; None where there is one process
    memory: AbstractContextManager[Any] = field(default_factory=nullcontext)  # in which tensors are made on the device

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

    @property
    def computes_on_cpu(self) -> bool:
        """An imagined world computes nothing."""
        return self.device.type == "cpu" and isinstance(self.memory, nullcontext)

    def axis(self, name: str) -> "DeviceMesh | None":
        """The one-dimensional mesh of this process's neighbours in that direction; None where it has none."""
        return self.mesh[name] if self.mesh is not None and getattr(self.layout, name) > 1 else None


_world: World | None = None  # once joined, this process is of one world
_connection: Connection | None = None


def start(parallel: ParallelConfig, run: RunFolderConfig) -> World:
    """The world that the environment says this process is part of (torchrun, srun, our launcher); else it is alone."""
    global _world, _connection
    place = placement.read(os.environ)
    layout = solve_layout(parallel, place.world_size)
    if run.threads:
        torch.set_num_threads(run.threads)
    elif place.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, _num_cores() // place.local_size))
    keep_freed_memory()
    device = pick_device(run.device, place.local_rank)
    if device.type == "cpu":
        cpu.settle()  # here: a process group has threads
    if place.world_size == 1:
        return World(device, layout)
    if _world is not None and _world.layout == layout:
        return _world
    if device.type == "mps":
        raise ConfigError("run.device", ["run.device: mps has one process only. Use --device cpu for several."])
    timeout = float(parallel.timeout)
    # As torchrun sets them already: its agent may keep the store, which torch looks up by these names.
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port),
    }
    _world = join(layout, place.rank, device, timeout=timedelta(seconds=timeout))
    from torch import distributed

    # Torch keeps no other record of the store. Restarted ranks meet in a new one, so its keys are this attempt's.
    store = distributed.PrefixStore("gptworks", distributed.distributed_c10d._get_default_store())
    _connection = Connection(store, place.rank, place.world_size, timeout)
    atexit.register(close)
    return _world


def connection() -> Connection | None:
    return _connection


def forget() -> None:
    """After a failure: leave the group as it is. Taking it apart needs ranks that may be gone."""
    atexit.unregister(close)


def close() -> None:
    """Rank 0 leaves last: it keeps the store."""
    global _world, _connection
    from torch import distributed

    if _connection is not None:
        _connection.leave()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    _world = _connection = None
    atexit.unregister(close)


def join(layout: Layout, rank: int, device: torch.device, **group: Any) -> World:
    """Meet the other processes of the layout. `group`: as init_process_group takes it."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    if "timeout" in group:
        # Groups that are made later, such as those of the mesh, take torch's defaults: up to 30 minutes of silence.
        distributed_c10d.default_pg_timeout = distributed_c10d.default_pg_nccl_timeout = group["timeout"]
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        group.setdefault("device_id", device)
    distributed.init_process_group(backend, rank=rank, world_size=layout.world_size, **group)
    return World(device, layout, rank, _mesh(layout, device.type))


@contextmanager
def imagined(layout: Layout, rank: int, memory: "FakeTensorMode | None" = None) -> Iterator[World]:
    """A world of which nobody but this process exists. What its groups are sent goes nowhere, and its tensors have
    shapes but no memory: what a rank of a large layout would hold can be seen on a small machine.

    memory: of fake tensors, with which also what it would do can be seen; None = the meta device.
    """
    # Fake tensors of a GPU need a torch that was built for one.
    device, within = (torch.device("meta"), nullcontext()) if memory is None else (torch.device("cpu"), memory)
    if layout.world_size == 1:
        yield World(device, layout, memory=within)
        return
    from torch import distributed
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known

    assert not distributed.is_initialized(), "this process is of another world already"
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield World(device, layout, rank, _mesh(layout, "cpu"), within)
    finally:
        distributed.destroy_process_group()
        # DTensor remembers its operations with the mesh they were first done on, and takes that of another rank of the
        # same layout for the same.
        _clear_sharding_prop_cache()


def _mesh(layout: Layout, device_type: str) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    sizes = vars(layout)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


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


def pick_device(name: str, local_rank: int = 0) -> torch.device:
    """auto = cuda, then mps, then cpu. A device that is asked for by name and not there is refused."""
    present = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        name = next(kind for kind, there in present.items() if there)
    if name not in present:
        raise ConfigError("device", [f"device: got {name!r}; needs auto, {', '.join(present)}."])
    if not present[name]:
        have = ", ".join(kind for kind, there in present.items() if there)
        raise ConfigError(
            "run.device",
            [f"run.device: {name} is not available here. Available: {have}. Use --device {have.split(', ')[0]}."],
        )
    if name != "cuda" or not local_rank:
        return torch.device(name)
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            "run.device",
            [
                f"run.device: process {local_rank} of this machine has no device: there are "
                f"{torch.cuda.device_count()}. Start at most so many processes here."
            ],
        )
    return torch.device(name, local_rank)


def _num_cores() -> int:
    """Those this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
