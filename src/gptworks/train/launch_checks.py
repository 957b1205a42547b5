"""Which machines and processes a run is to have, by the options that start it. All that can be known to be wrong before
a process starts is refused. Imports no torch before that: what is wrong is said at once."""

import os
from dataclasses import dataclass
from pathlib import Path

from gptworks.config.checks import fit_layout
from gptworks.config.derive import Layout, plan_batch, solve_layout
from gptworks.config.schema import AXES, ParallelConfig, RunConfig
from gptworks.errors import UsageError
from gptworks.launch import nodes, rank_env
from gptworks.launch.nodes import Nodes


@dataclass(frozen=True)
class LaunchOptions:
    """As they are given; empty or None where they are not."""

    nproc: int | None = None
    nnodes: str = ""
    node_rank: int | None = None
    master: str = ""
    node_ips: str = ""
    rank_table: str = ""
    rank_range: str = ""
    max_restarts: int = 0
    resume: str = "never"


def processes_of_layout(parallel: ParallelConfig) -> int:
    """As many as the numbers of the layout say; 0 where one of them is left open."""
    is_open = any(getattr(parallel, axis) == "auto" for axis in AXES)
    return 0 if is_open else Layout.from_config(parallel).world_size


def checked_launch(options: LaunchOptions, config: RunConfig) -> tuple[Nodes, int]:
    """The machines, and the processes of this one."""
    place = rank_env.read(os.environ)
    if place.started_by in ("torchrun", "mpirun"):
        raise UsageError(
            f"--nproc: {place.started_by} has started the processes already. Leave out the options that start more."
        )
    pod = _pod_options(options)
    # srun with one task per machine: it has said which machine this is.
    by_srun = place.started_by == "srun" and bool(options.nnodes) and options.node_rank is None
    machines = nodes.solve(
        nnodes=options.nnodes or pod.get("nnodes", ""),
        node_rank=int(pod["node_rank"]) if "node_rank" in pod else place.rank if by_srun else options.node_rank,
        master=options.master
        or pod.get("master", "")
        or (f"{nodes.bracketed(place.master)}:{place.port}" if by_srun else ""),
        node_ips=options.node_ips,
        table=options.rank_table,
        ranks=options.rank_range,
    )
    if options.rank_range and options.node_rank is None:
        nodes.require_local_ranks(Path(options.rank_table), options.rank_range)
    if options.max_restarts < 0:
        raise UsageError(f"--max-restarts: {options.max_restarts}. Needed: 0 or more.")
    nproc = _num_processes(int(pod["nproc"]) if "nproc" in pod else options.nproc, machines, config.parallel)
    _refuse_unfit(config, machines, nproc)
    if config.run.device == "cuda":
        from gptworks.launch import devices

        devices.require(nproc, machines.devices)
    if machines.rank == 0:  # on the others the run may have begun it by now
        from gptworks.train import run_folder

        run_folder.refuse_foreign(Path(config.run.out), options.resume)
    return machines, nproc


def _pod_options(options: LaunchOptions) -> dict[str, str]:
    """What Kubeflow says of this machine, where no option does. Both, and different, is refused."""
    if options.node_ips or options.rank_table:
        return {}
    pod = rank_env.pod_options(os.environ)
    for name, variable in (("nnodes", "PET_NNODES"), ("node_rank", "PET_NODE_RANK"), ("nproc", "PET_NPROC_PER_NODE")):
        value = getattr(options, name)
        if name in pod and value not in (None, "") and str(value) != pod[name]:
            option = "--" + name.replace("_", "-")
            raise UsageError(f"{option}: {value}, but {variable} is {pod[name]}. Needed: the same. Leave {option} out.")
    return pod


def _refuse_unfit(config: RunConfig, machines: Nodes, nproc: int) -> None:
    """What the run would refuse with any number of machines that it may have."""
    if machines.at_least < machines.count and processes_of_layout(config.parallel):
        raise UsageError(
            f"--nnodes {machines.at_least}:{machines.count}: the number of processes may change, but parallel has room "
            f"for {processes_of_layout(config.parallel)} only. Set one of its degrees to auto, such as "
            "parallel.dp=auto."
        )
    batches = set()
    for count in range(machines.at_least, machines.count + 1):
        layout = solve_layout(config.parallel, sum(machines.nproc) or nproc * count)
        parallel = fit_layout(config, layout)
        batches.add(plan_batch(config.batch, config.model, config.data.seq_len, parallel).global_size)
    if len(batches) > 1:
        fewest, *_, most = sorted(batches)
        raise UsageError(
            f"--nnodes {machines.at_least}:{machines.count}: the batch would be {fewest} or {most} samples, as the "
            "number of machines changes. Set batch.global_size."
        )


def _num_processes(asked: int | None, machines: Nodes, parallel: ParallelConfig) -> int:
    """On this machine."""
    if asked is not None and asked < 1:
        raise UsageError(f"--nproc: {asked}. Needed: 1 or more.")
    if machines.nproc:
        here: int = machines.nproc[machines.rank]
        if asked not in (None, here):
            raise UsageError(f"--nproc: {asked}, but the rank table has {here} devices for this machine. Leave it out.")
        return here
    if asked is not None:
        return asked
    processes = processes_of_layout(parallel)
    if processes and processes % machines.count == 0:
        return processes // machines.count
    raise UsageError(f"--nproc: not given, and parallel does not tell for {machines.count} machines. Say how many.")
