"""What a configuration needs of this machine: device, processes, memory, data, disk."""

import os
import shutil
from pathlib import Path

from gptworks.compilers import cxx_compilers
from gptworks.config.derive import Layout, num_steps, plan_batch, solve_layout, with_layout
from gptworks.config.schema import AXES, CheckpointConfig, ParallelConfig, RunConfig
from gptworks.doctor.finding import Finding, examine, note, ok, problem
from gptworks.errors import ConfigError, UsageError
from gptworks.plan import sizes

_GIB = 2**30


def findings(cfg: RunConfig) -> list[Finding]:
    return examine(
        [
            ("run.device", lambda: device(cfg.run.device)),
            ("precision.compute", lambda: precision(cfg.precision.compute, cfg.run.device)),
            ("parallel", lambda: layout(cfg)),
            ("memory", lambda: memory(cfg)),
            ("data.path", lambda: data(cfg.data.path)),
            ("init.checkpoint", lambda: weights(cfg.init.checkpoint)),
            ("disk", lambda: disk(cfg)),
            ("train.compile", lambda: compiler() if cfg.train.compile else []),
        ]
    )


def device(asked: str) -> list[Finding]:
    from gptworks.launch.devices import pick_device

    try:
        return ok("run.device", f"{asked}: {pick_device(asked)}")
    except ConfigError as error:
        return problem("run.device", f"{asked} is not here", " ".join(error.problems))


def precision(compute: str, device: str) -> list[Finding]:
    """Refused by an error where products of that type kill the process."""
    from gptworks import cpu
    from gptworks.launch.devices import pick_device
    from gptworks.train.precision import DTYPES

    if pick_device(device).type == "cpu":
        cpu.settle(say=False)
        cpu.require(DTYPES[compute])
    return ok("precision.compute", compute)


def _solved(parallel: ParallelConfig, device: str) -> Layout:
    """`auto` is what the devices of this machine leave."""
    import torch

    known = Layout.from_config(parallel)
    has_auto = "auto" in (getattr(parallel, axis) for axis in AXES)
    devices = torch.cuda.device_count() if device in ("auto", "cuda") else 1
    most = max(1, devices // known.world_size) if has_auto else 1
    return solve_layout(parallel, known.world_size * most)


def _is_on_cuda(device: str) -> bool:
    import torch

    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def layout(cfg: RunConfig) -> list[Finding]:
    import torch

    layout = _solved(cfg.parallel, cfg.run.device)
    batch = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, with_layout(cfg.parallel, layout))
    many = f"{layout.degrees}: {layout.world_size} processes" if layout.world_size > 1 else "1 process"
    summary = f"{many}; a step is {batch.accumulation} x {batch.micro_size} samples in each replica"
    on_cuda = _is_on_cuda(cfg.run.device)
    if on_cuda and layout.world_size > torch.cuda.device_count():
        fix = "Start it on several machines (--nnodes, --master), or make the layout smaller."
        return note("parallel", f"{summary}, but {torch.cuda.device_count()} devices here", fix)
    return ok("parallel", summary)


def memory(cfg: RunConfig) -> list[Finding]:
    """Whether the tensors fit when a step holds most; what an allocator loses comes on top."""
    import torch

    from gptworks.plan.budget import MemoryBudget
    from gptworks.plan.machine import memory_available
    from gptworks.plan.memory import rank_memories
    from gptworks.plan.workload import LayoutChoice, Workload

    choice = LayoutChoice.from_config(cfg, _solved(cfg.parallel, cfg.run.device).world_size)
    layout = choice.layout
    on_cuda = _is_on_cuda(cfg.run.device)
    memories = rank_memories(Workload.from_config(cfg, "cuda" if on_cuda else "cpu"), choice)
    if on_cuda and torch.cuda.is_available():
        budget = MemoryBudget(torch.cuda.get_device_properties(0).total_memory)
        who, where = "the fullest process", "of its device"
    else:
        budget = MemoryBudget(memory_available(layout.world_size), shared_by=layout.world_size)
        who = "1 process" if layout.world_size == 1 else f"{layout.world_size} processes"
        where = "that are free"
    needed, there = budget.needed(memories, layout), budget.capacity
    summary = f"{who} would hold {needed / _GIB:,.2f} GiB of the {there / _GIB:,.1f} GiB {where}, activations included"
    if needed <= there:
        return ok("memory", summary)
    smaller = "Take a smaller batch.micro_size, or train.recompute: full;"
    if not on_cuda:
        return problem("memory", summary, f"{smaller} a smaller preset; or more machines with parallel.fsdp, tp or pp.")
    return problem("memory", summary, f"{smaller} split it further (parallel.fsdp, tp, pp), or parallel.offload: true.")


def data(paths: tuple[str, ...]) -> list[Finding]:
    from gptworks.data.store import Store, locate_stores

    if not paths:
        return note("data.path", "empty", "Training needs data: `gptworks prepare` makes it.")
    stores = [Store(each) for path in paths for each in locate_stores(path)]
    kinds = sorted({store.located.format.NAME for store in stores})
    return ok("data.path", f"{len(stores)} of {', '.join(kinds)}: {', '.join(paths)}")


def weights(checkpoint: str) -> list[Finding]:
    if not checkpoint:
        return []
    from gptworks.checkpoint.pretrained import Pretrained

    weights = Pretrained.open(checkpoint)
    return ok("init.checkpoint", f"{checkpoint}: {sizes.num_parameters(weights.model):,} parameters")


def disk(cfg: RunConfig) -> list[Finding]:
    """Room for all checkpoints that will lie there at the same time."""
    folder = _existing(Path(cfg.run.out or "runs"))
    if not os.access(folder, os.W_OK):
        return problem("disk", f"{folder} cannot be written to", "Choose another --out.")
    free, one = shutil.disk_usage(folder).free, sizes.checkpoint_bytes(cfg.model, cfg.checkpoint.portable)
    count = most_checkpoints(cfg.checkpoint, _last_step(cfg))
    summary = f"{count} checkpoints of {one / 1e9:,.2f} GB = {count * one / 1e9:,.2f} GB; {free / 1e9:,.2f} GB free"
    summary = f"{summary} at {folder}"
    if free >= count * one:
        return ok("disk", summary)
    fix = (
        "Free some, choose another --out, keep fewer (checkpoint.keep_last, keep_every), or checkpoint.portable: false."
    )
    return problem("disk", summary, fix)


def most_checkpoints(cfg: CheckpointConfig, last_step: int | None) -> int:
    """At the same time: those kept, the best, and the new one, which is whole before an old one goes. `last_step` None:
    not known, so what is kept for good is not counted."""
    if last_step is None:
        return cfg.keep_last + int(cfg.keep_best) + 1
    saved = list(range(cfg.every, last_step + 1, cfg.every)) if cfg.every else []
    saved = saved if saved and saved[-1] == last_step else [*saved, last_step]
    for_good = sum(1 for step in saved if cfg.keep_every and step % cfg.keep_every == 0)
    return min(len(saved), cfg.keep_last + for_good + int(cfg.keep_best) + 1)


def _last_step(cfg: RunConfig) -> int | None:
    if cfg.train.epochs or not (cfg.train.steps or cfg.train.tokens):
        return None
    parallel = with_layout(cfg.parallel, _solved(cfg.parallel, cfg.run.device))
    batch = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel)
    return num_steps(cfg.train, 0, batch.global_size, cfg.data.seq_len)


def _existing(folder: Path) -> Path:
    """The nearest folder above that is there."""
    folder = folder.expanduser().absolute()
    while not folder.is_dir():
        if folder == folder.parent:
            raise UsageError(f"{folder}: no such folder.")
        folder = folder.parent
    return folder


def compiler() -> list[Finding]:
    compiler = next(iter(cxx_compilers()), None)
    if compiler is None:
        return problem("train.compile", "no C++ compiler", "Install g++, or set train.compile: false.")
    return ok("train.compile", f"compiles with {compiler}")
