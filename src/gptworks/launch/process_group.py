"""The process group of a run: who this process is in it, joining it and leaving it."""

import atexit
import ctypes
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from gptworks import __version__, cpu
from gptworks.config.derive import Layout, solve_layout
from gptworks.config.schema import ParallelConfig, RunFolderConfig
from gptworks.errors import ConfigError, GPTWorksError
from gptworks.launch import devices, heartbeat, nodes, open_files, rank_env, rendezvous
from gptworks.launch.failures import Connection
from gptworks.launch.world import World

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import DeviceMesh

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h; 32 MB is the most that glibc accepts for the second


# Backends that end the process when they give up, or make it wait where no error can be raised.
WATCHED = {"nccl"}

_world: World | None = None  # once joined, this process is of one world
_connection: Connection | None = None
_stores: dict[tuple[str, int], Any] = {}  # kept for the next world, to which other ranks may come before rank 0 does
_num_worlds = 0


def start(parallel: ParallelConfig, run: RunFolderConfig, identity: Mapping[str, Any] = MappingProxyType({})) -> World:
    """The world that the environment says this process is part of (torchrun, srun, our launcher); else it is alone.

    identity: what must be the same on all ranks, beside the versions of what computes.
    """
    global _world, _connection, _num_worlds
    place = rank_env.read(os.environ)
    if run.threads:
        torch.set_num_threads(run.threads)
    elif place.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, nodes.num_cores() // place.local_size))
    keep_freed_memory()
    if run.device == "cpu" or (run.device == "auto" and devices.pick_device("auto").type == "cpu"):
        cpu.settle()  # here: a store and a process group have threads
    if place.world_size == 1:
        layout = solve_layout(parallel, 1)
        return World(_take_device(run.device, place), layout)
    if _world is not None and _world.layout == solve_layout(parallel, place.world_size):
        return _world
    timeout = float(parallel.timeout)
    # As torchrun sets them already, for what torch looks up by these names.
    os.environ |= {
        "RANK": str(place.rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank),
        "MASTER_ADDR": place.master,
        "MASTER_PORT": str(place.port),
    }
    open_files.raise_limit()
    open_files.set_up_gloo(place.world_size)
    from torch import distributed

    if _world is not None:
        close()
    _num_worlds += 1  # a store outlives a world: what was said there is not said again
    address = (place.master, place.port)
    opened = _stores.get(address) or rendezvous.open_store(place, timeout)
    opened.set_timeout(timedelta(seconds=timeout))
    base = distributed.PrefixStore(f"gptworks/{_num_worlds}", opened)

    def prepare() -> tuple[Layout, torch.device]:
        layout = solve_layout(parallel, place.world_size)
        device = _take_device(run.device, place)
        if device.type == "mps":
            raise ConfigError("run.device", ["run.device: mps has one process only. Use --device cpu for several."])
        open_files.require(place.world_size, open_files.NUM_GROUPS[device.type])
        return layout, device

    store, (layout, device) = rendezvous.agree(
        base,
        place,
        prepare,
        lambda started: f"{started[1].type} {devices.identity(started[1])}",
        timeout,
        _versions() | dict(identity),
    )
    set_up_nccl(device, os.environ.get(rank_env.LOG_DIR) or run.out)
    _world = join(layout, place.rank, device, timeout=timeout, store=distributed.PrefixStore("groups", store))
    _connection = Connection(store, place.rank, place.world_size, timeout)
    _connection.watch(is_step_watched=backend_of(device) in WATCHED)
    _stores[address] = opened
    atexit.register(close)
    return _world


def _versions() -> dict[str, str]:
    return {"gptworks": __version__, "torch": str(torch.__version__), "Python": platform.python_version()}


def refuse(problem: GPTWorksError, timeout: float) -> None:
    """What this process was told contradicts itself: tell the ranks that wait for it, as far as that is possible."""
    place = rank_env.guess(os.environ)
    if place is None:
        return
    from torch import distributed

    def fail() -> None:
        raise problem

    with suppress(RuntimeError, GPTWorksError):
        base = distributed.PrefixStore("gptworks/1", rendezvous.open_store(place, timeout))
        rendezvous.agree(base, place, fail, lambda _: "", timeout)


def _take_device(name: str, place: rank_env.Placement) -> torch.device:
    """Before anything else of this process asks CUDA for memory or a group, which it would get on device 0."""
    device = devices.pick_device(name, place.local_rank if place.started_by else None, place.local_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


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
        _forget_meshes()
    _world = _connection = None
    atexit.unregister(close)


def _forget_meshes() -> None:
    """DTensor remembers its operations with the mesh they were first done on, and takes one of the same layout for the
    same: that of another rank, or one whose groups are gone."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()


def join(layout: Layout, rank: int, device: torch.device, *, timeout: float | None = None, **group: Any) -> World:
    """Meet the other processes of the layout. timeout: seconds; `group`: as init_process_group takes it."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    backend = backend_of(device)
    if timeout is not None:
        group["timeout"] = group_timeout(backend, timeout)
        # Groups that are made later, such as those of the mesh, take torch's defaults: up to 30 minutes of silence.
        distributed_c10d.default_pg_timeout = group_timeout("gloo", timeout)
        distributed_c10d.default_pg_nccl_timeout = group_timeout("nccl", timeout)
    if device.type == "cuda":
        group["device_id"] = device
    distributed.init_process_group(backend, rank=rank, world_size=layout.world_size, **group)
    return World(device, layout, rank, _mesh(layout, device.type))


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def group_timeout(backend: str, timeout: float) -> timedelta:
    """When torch gives up. Where that ends the process without a word, the heartbeat speaks first, at `timeout`."""
    return timedelta(seconds=2 * timeout + 60 if backend in WATCHED else timeout)


def set_up_nccl(device: torch.device, folder: str) -> None:
    """The last collectives of each rank are kept, and written down when NCCL gives up; also by the heartbeat."""
    if device.type != "cuda":
        return
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000"))
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if folder and "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in os.environ:
        os.environ.setdefault(heartbeat.TRACES, str(Path(folder).absolute() / heartbeat.TRACE))


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
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it makes the backend known

    assert not distributed.is_initialized(), "this process is of another world already"
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world_size)
    try:
        yield World(device, layout, rank, _mesh(layout, "cpu"), within)
    finally:
        distributed.destroy_process_group()
        _forget_meshes()


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
