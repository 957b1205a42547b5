"""Which of how many processes this one is, read from the environment that torchrun, srun, mpirun, Kubeflow or our
launcher sets, and checked as a whole."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gptworks.errors import UsageError

# What our launcher tells the processes that it starts, besides the names that torchrun uses.
LOG_DIR = "GPTWORKS_LOG_DIR"  # one log per rank
FAILURES = "GPTWORKS_FAILURES"  # a folder for the failures of this attempt, one file per rank
ATTEMPT = "GPTWORKS_ATTEMPT"  # from 0; after that the run goes on from its last checkpoint
ROUNDS = "GPTWORKS_ROUNDS"  # where torchrun starts the ranks: a folder with one of the above for each of its starts
TERMINAL = "GPTWORKS_TERMINAL"  # a pipe by that name takes what rank 0 writes to stderr; the agent's own is a file


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
    """From whichever of torchrun, srun and mpirun started this process. What contradicts itself is refused."""
    if is_pod(environment):
        return Placement()  # one per machine, which has yet to start its ranks
    if "RANK" in environment or "WORLD_SIZE" in environment:
        found = _torchrun(environment)
        _refuse_other_rank(environment, found)
        return found
    # Only srun sets the second: a command of a batch script is one process, however many the job may have.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        return _srun(environment)
    names = next((names for names in _MPI if names[0] in environment or names[1] in environment), None)
    return _mpirun(environment, names) if names else Placement()


def is_supervised(environment: Mapping[str, str]) -> bool:
    """Whether our launcher started this process: it then says what has failed."""
    return FAILURES in environment


def is_pod(environment: Mapping[str, str]) -> bool:
    """Whether Kubeflow tells this process which machine it is (PET_...), as it tells torchrun, which is not there."""
    return "PET_NNODES" in environment and "LOCAL_RANK" not in environment and not is_supervised(environment)


def pod_options(environment: Mapping[str, str]) -> dict[str, str]:
    """What Kubeflow says, by the names of our options."""
    if not is_pod(environment):
        return {}
    missing = [name for name in ("PET_NODE_RANK", "PET_MASTER_ADDR") if not environment.get(name)]
    if environment["PET_NNODES"] != "1" and missing:
        raise UsageError(
            f"{missing[0]}: not set beside PET_NNODES={environment['PET_NNODES']}. Needed: as a Kubeflow TrainJob sets "
            f"it. Or let torchrun read what is there: torchrun -m gptworks train. {_told(environment)}"
        )
    if environment["PET_NNODES"] == "1":
        found = {}
    else:
        port = environment.get("PET_MASTER_PORT", "")
        master = environment["PET_MASTER_ADDR"] + (f":{port}" if port else "")
        rank = str(_number(environment, "PET_NODE_RANK", None, "Kubeflow"))
        found = {"nnodes": environment["PET_NNODES"], "node_rank": rank, "master": master}
    if environment.get("PET_NPROC_PER_NODE", "").isdecimal():
        found["nproc"] = environment["PET_NPROC_PER_NODE"]  # else auto, cpu or gpu, which the layout answers
    return found


def guess(environment: Mapping[str, str]) -> Placement | None:
    """Where the other ranks are, if that much can be read from what is not right as a whole."""
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    if not all(environment.get(name, "").isdecimal() for name in names) or not environment.get("MASTER_ADDR"):
        return None
    rank, world_size, port = (int(environment[name]) for name in names)
    if not rank < world_size or world_size == 1 or not 0 < port < 65536:
        return None
    return Placement(rank, world_size, master=environment["MASTER_ADDR"], port=port, started_by="torchrun")


_SHOWN = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PET_\w+|SLURM_(PROCID|LOCALID|NODEID|STEP_\w+)|"
)


def _told(environment: Mapping[str, str]) -> str:
    """All that was said to this process about its place."""
    mpi = {name for names in _MPI for name in names}
    found = [f"{name}={environment[name]}" for name in sorted(environment) if _SHOWN.fullmatch(name) or name in mpi]
    return f"Found: {', '.join(found)}."


def _torchrun(environment: Mapping[str, str]) -> Placement:
    started_by = "gptworks --nproc" if is_supervised(environment) else "torchrun"

    def number(name: str, otherwise: int | None = None) -> int:
        return _number(environment, name, otherwise, started_by)

    world_size, rank = number("WORLD_SIZE"), number("RANK")
    local_rank = number("LOCAL_RANK", 0 if world_size == 1 else None)
    local_size = number("LOCAL_WORLD_SIZE", world_size)
    wrong = ""
    if rank >= world_size:
        wrong = f"RANK: {rank} of WORLD_SIZE {world_size}. Needed: a rank from 0 to {world_size - 1}."
    elif local_size > world_size:
        wrong = f"WORLD_SIZE: {world_size}, but LOCAL_WORLD_SIZE is {local_size}. Needed: the number of all processes."
    elif world_size > 1 and local_rank >= local_size:
        wrong = f"LOCAL_RANK: {local_rank} of LOCAL_WORLD_SIZE {local_size}. Needed: 0 to {local_size - 1}."
    elif local_rank > rank and world_size > 1:
        wrong = f"LOCAL_RANK: {local_rank}, above RANK {rank}. Needed: the number among those of this machine."
    elif world_size > 1 and "LOCAL_WORLD_SIZE" in environment and world_size - rank < local_size - local_rank:
        wrong = (
            f"RANK: {rank} of WORLD_SIZE {world_size}, but this machine has {local_size - local_rank - 1} processes "
            "after it. Needed: ranks that count up through the processes of a machine."
        )
    elif world_size > 1 and not environment.get("MASTER_ADDR"):
        wrong = "MASTER_ADDR: not set beside RANK and WORLD_SIZE. Needed: the address of rank 0's machine."
    if wrong:
        raise UsageError(f"{wrong} {_told(environment)}")
    if world_size == 1:
        return Placement(local_rank=local_rank, started_by=started_by)
    return Placement(
        rank,
        world_size,
        local_rank,
        local_size,
        environment["MASTER_ADDR"],
        _port(environment, None, started_by),
        started_by,
    )


def _refuse_other_rank(environment: Mapping[str, str], found: Placement) -> None:
    """RANK as a script has set it, beside what the program says that has started the script once for each rank."""
    if "TORCHELASTIC_RUN_ID" in environment or is_supervised(environment):
        return  # torchrun has started this one, whatever started torchrun
    for rank, size in (*(names[:2] for names in _MPI), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if environment.get(size) == str(found.world_size) != "1" and environment.get(rank, "") not in (
            "",
            str(found.rank),
        ):
            raise UsageError(
                f"RANK: {found.rank}, but {rank} is {environment[rank]}. Needed: the same. Leave RANK and WORLD_SIZE "
                f"out: what {rank} says is understood. {_told(environment)}"
            )


# Of Open MPI, and of MPICH and Intel MPI: rank, size, rank and size on this machine.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_MPI_PORT = 29500


def _mpirun(environment: Mapping[str, str], names: tuple[str, str, str, str]) -> Placement:
    rank, world_size = (_number(environment, name, None, "mpirun") for name in names[:2])
    if world_size == 1:
        return Placement(started_by="mpirun")
    local_rank, local_size = (_number(environment, name, None, "mpirun") for name in names[2:])
    wrong = ""
    if rank >= world_size:
        wrong = f"{names[0]}: {rank} of {names[1]} {world_size}. Needed: a rank from 0 to {world_size - 1}."
    elif local_rank >= local_size or local_size > world_size:
        wrong = (
            f"{names[2]}: {local_rank} of {names[3]} {local_size}, of {world_size} in all. Needed: as mpirun says it."
        )
    elif local_size < world_size and not environment.get("MASTER_ADDR"):
        wrong = (
            f"MASTER_ADDR: not set, and {names[1]} is {world_size} with {local_size} on this machine. Needed: the "
            "address of rank 0's machine, for all ranks: mpirun -x MASTER_ADDR=... (Open MPI), -genv (MPICH, Intel)."
        )
    if wrong:
        raise UsageError(f"{wrong} {_told(environment)}")
    master = environment.get("MASTER_ADDR") or "127.0.0.1"
    return Placement(
        rank, world_size, local_rank, local_size, master, _port(environment, _MPI_PORT, "mpirun"), "mpirun"
    )


def _port(environment: Mapping[str, str], otherwise: int | None, started_by: str) -> int:
    port = _number(environment, "MASTER_PORT", otherwise, started_by)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT: {port}. Needed: a port from 1 to 65535. {_told(environment)}")
    return port


def _srun(environment: Mapping[str, str]) -> Placement:
    def number(name: str, otherwise: int | None = None) -> int:
        return _number(environment, name, otherwise, "srun")

    world_size, rank = number("SLURM_STEP_NUM_TASKS"), number("SLURM_PROCID")
    if rank >= world_size:
        raise UsageError(
            f"SLURM_PROCID: {rank} of SLURM_STEP_NUM_TASKS {world_size}. Needed: 0 to {world_size - 1}. "
            f"{_told(environment)}"
        )
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
        rank,
        world_size,
        number("SLURM_LOCALID"),
        _tasks_here(counts, number("SLURM_NODEID", 0)) or world_size,
        environment.get("MASTER_ADDR") or first_node(nodes),
        # The same on all nodes without asking; jobs that share a node differ.
        _port(environment, 20000 + number("SLURM_JOB_ID", 0) % 20000, "srun"),
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
        found = _told(environment)
        raise UsageError(f"{name}: {got} in the environment. Needed: a number, as {started_by} sets it. {found}")
    return int(text)
