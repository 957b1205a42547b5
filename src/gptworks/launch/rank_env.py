"""Which of how many processes this one is: read from the environment that torchrun, srun or our launcher sets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gptworks.errors import UsageError

# What our launcher tells the processes that it starts, besides the names that torchrun uses.
LOG_DIR = "GPTWORKS_LOG_DIR"  # one log per rank
FAILURES = "GPTWORKS_FAILURES"  # a folder for the failures of this attempt, one file per rank
ATTEMPT = "GPTWORKS_ATTEMPT"  # from 0; after that the run goes on from its last checkpoint


@dataclass(frozen=True)
class Placement:
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine
    master: str = ""  # where rank 0 is
    port: int = 0
    started_by: str = ""


def read(environment: Mapping[str, str]) -> Placement:
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _torchrun(environment)
    # Only srun sets the second: a command of a batch script is one process, however many the job may have.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _srun(environment)
    return Placement()


def is_supervised(environment: Mapping[str, str]) -> bool:
    """Whether our launcher started this process: it then says what has failed."""
    return FAILURES in environment


def _torchrun(environment: Mapping[str, str]) -> Placement:
    started_by = "gptworks --nproc" if is_supervised(environment) else "torchrun"

    def number(name: str, otherwise: int | None = None) -> int:
        return _number(environment, name, otherwise, started_by)

    world_size = number("WORLD_SIZE")
    rank = number("RANK")
    if rank >= world_size:
        raise UsageError(f"RANK: {rank} of WORLD_SIZE {world_size}. Needed: a rank from 0 to {world_size - 1}.")
    local_rank, local_size = (
        number("LOCAL_RANK", 0 if world_size == 1 else None),
        number("LOCAL_WORLD_SIZE", world_size),
    )
    if local_size > world_size:
        raise UsageError(
            f"WORLD_SIZE: {world_size}, but LOCAL_WORLD_SIZE is {local_size}. Needed: the number of all processes."
        )
    if world_size == 1:
        return Placement(local_rank=local_rank, started_by=started_by)
    if local_rank >= local_size:
        raise UsageError(f"LOCAL_RANK: {local_rank} of LOCAL_WORLD_SIZE {local_size}. Needed: 0 to {local_size - 1}.")
    if not environment.get("MASTER_ADDR"):
        raise UsageError("MASTER_ADDR: not set beside RANK and WORLD_SIZE. Needed: the address of rank 0's machine.")
    return Placement(
        rank,
        world_size,
        local_rank,
        local_size,
        environment["MASTER_ADDR"],
        number("MASTER_PORT"),
        started_by,
    )


def _srun(environment: Mapping[str, str]) -> Placement:
    def number(name: str, otherwise: int | None = None) -> int:
        return _number(environment, name, otherwise, "srun")

    world_size = number("SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return Placement(started_by="srun")
    nodes = next(
        (environment[n] for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST") if environment.get(n)),
        "",
    )
    if not nodes and not environment.get("MASTER_ADDR"):
        raise UsageError("SLURM_JOB_NODELIST: not set beside SLURM_PROCID. Needed: the list of nodes, or MASTER_ADDR.")
    counts = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    return Placement(
        number("SLURM_PROCID"),
        world_size,
        number("SLURM_LOCALID"),
        _tasks_here(counts, number("SLURM_NODEID", 0)) or world_size,
        environment.get("MASTER_ADDR") or first_node(nodes),
        # The same on all nodes without asking; jobs that share a node differ.
        number("MASTER_PORT", 20000 + number("SLURM_JOB_ID", 0) % 20000),
        "srun",
    )


def first_node(nodes: str) -> str:
    """gpu[003-006,9],cpu1 -> gpu003"""
    found = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes.strip())
    assert found is not None
    return found[1] + (found[2] or "") + (found[3] or "")


def _tasks_here(counts: str, node: int) -> int:
    """4(x2),1 -> 4 on the first two nodes, 1 on the third; 0 where it is not said."""
    each = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    return each[node] if node < len(each) else 0


def _number(environment: Mapping[str, str], name: str, otherwise: int | None, started_by: str) -> int:
    text = environment.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not text.isdecimal():
        got = repr(text) if text else "not set"
        raise UsageError(f"{name}: {got} in the environment. Needed: a number, as {started_by} sets it.")
    return int(text)
