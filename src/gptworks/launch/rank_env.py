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
    starter = _starter(environment)
    if starter is None:
        return Placement()
    placement = _read(environment, starter)
    if starter.variables == _TORCHRUN:
        _refuse_other_rank(environment, placement)
    return placement


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
            f"it. Or let torchrun read what is there: torchrun -m gptworks train. {_variables_found(environment)}"
        )
    if environment["PET_NNODES"] == "1":
        options = {}
    else:
        port = environment.get("PET_MASTER_PORT", "")
        master = environment["PET_MASTER_ADDR"] + (f":{port}" if port else "")
        rank = str(_number(environment, "PET_NODE_RANK", None, "Kubeflow"))
        if environment.get("WORLD_SIZE") == environment["PET_NNODES"] and environment.get("RANK", rank) != rank:
            raise UsageError(
                f"PET_NODE_RANK: {rank}, but RANK is {environment['RANK']} of WORLD_SIZE {environment['WORLD_SIZE']}. "
                f"Needed: the same, as a PyTorchJob sets them. {_variables_found(environment)}"
            )
        options = {"nnodes": environment["PET_NNODES"], "node_rank": rank, "master": master}
    if environment.get("PET_NPROC_PER_NODE", "").isdecimal():
        options["nproc"] = environment["PET_NPROC_PER_NODE"]  # else auto, cpu or gpu, which the layout answers
    return options


def guess(environment: Mapping[str, str]) -> Placement | None:
    """Where the other ranks are, if that much can be read from what is not right as a whole."""
    starter = _starter(environment)
    if starter is None or not starter.master:
        return None
    rank, world_size = (environment.get(name, "") for name in starter.variables[:2])
    port = environment.get("MASTER_PORT") or str(starter.port)
    if not all(text.isdecimal() for text in (rank, world_size, port)) or not int(rank) < int(world_size):
        return None
    if world_size == "1" or not 0 < int(port) < 65536:
        return None
    return Placement(int(rank), int(world_size), master=starter.master, port=int(port), started_by=starter.name)


# Rank, size, rank and size on this machine: of torchrun, of srun, of Open MPI, and of MPICH and Intel MPI.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_SRUN = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE")
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
_MPI_PORT = 29500


@dataclass(frozen=True)
class _Starter:
    """What has started this process, by the names in its environment."""

    name: str
    variables: tuple[str, str, str, str]
    master: str  # empty: not said
    port: int | None  # where MASTER_PORT is not set; None: it must be
    without_master: str  # what is wrong then


def _starter(environment: Mapping[str, str]) -> _Starter | None:
    if is_pod(environment):
        return None  # one per machine, which has yet to start its ranks
    master = environment.get("MASTER_ADDR", "")
    if "RANK" in environment or "WORLD_SIZE" in environment:
        name = "gptworks --nproc" if is_supervised(environment) else "torchrun"
        wrong = "MASTER_ADDR: not set beside RANK and WORLD_SIZE. Needed: the address of rank 0's machine."
        return _Starter(name, _TORCHRUN, master, None, wrong)
    # Only srun sets the second: a command of a batch script is one process, however many the job may have.
    if "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
        lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environment[name] for name in lists if environment.get(name)), "")
        wrong = "SLURM_JOB_NODELIST: not set beside SLURM_PROCID. Needed: the list of nodes, or MASTER_ADDR."
        # The same on all nodes without asking; jobs that share a node differ.
        port = 20000 + _number(environment, "SLURM_JOB_ID", 0, "srun") % 20000
        return _Starter("srun", _SRUN, master or first_node(nodes), port, wrong)
    variables = next((names for names in _MPI if names[0] in environment or names[1] in environment), None)
    if variables is None:
        return None
    size, here = (environment.get(name, "") for name in variables[1::2])
    wrong = (
        f"MASTER_ADDR: not set, and {variables[1]} is {size} with {here} on this machine. Needed: the address of rank "
        "0's machine, for all ranks: mpirun -x MASTER_ADDR=... (Open MPI), -genv (MPICH, Intel)."
    )
    return _Starter("mpirun", variables, master or ("127.0.0.1" if size == here else ""), _MPI_PORT, wrong)


def _read(environment: Mapping[str, str], starter: _Starter) -> Placement:
    rank_name, size_name, local_name, here_name = starter.variables

    def number(name: str, otherwise: int | None = None) -> int:
        return _number(environment, name, otherwise, starter.name)

    world_size, rank = number(size_name), number(rank_name)
    local_rank = number(local_name, 0 if world_size == 1 else None)
    here = _tasks_here(environment, world_size) if starter.variables == _SRUN else None
    if starter.variables != _SRUN and (here_name in environment or (starter.variables in _MPI and world_size > 1)):
        here = number(here_name)
    wrong = ""
    if rank >= world_size:
        wrong = f"{rank_name}: {rank} of {size_name} {world_size}. Needed: a rank from 0 to {world_size - 1}."
    elif here is not None and here > world_size:
        wrong = f"{size_name}: {world_size}, but {here_name} is {here}. Needed: the number of all processes."
    elif world_size == 1:
        return Placement(local_rank=local_rank, started_by=starter.name)
    elif local_rank >= (here or world_size):
        most = here or world_size
        wrong = f"{local_name}: {local_rank} of {here_name} {most}. Needed: 0 to {most - 1}."
    elif local_rank > rank:
        wrong = f"{local_name}: {local_rank}, above {rank_name} {rank}. Needed: the number among those of this machine."
    elif here is not None and world_size - rank < here - local_rank:
        wrong = (
            f"{rank_name}: {rank} of {size_name} {world_size}, but this machine has {here - local_rank - 1} processes "
            "after it. Needed: ranks that count up through the processes of a machine."
        )
    elif not starter.master:
        wrong = starter.without_master
    if wrong:
        raise UsageError(f"{wrong} {_variables_found(environment)}")
    port = number("MASTER_PORT", starter.port)
    if not 0 < port < 65536:
        raise UsageError(f"MASTER_PORT: {port}. Needed: a port from 1 to 65535. {_variables_found(environment)}")
    return Placement(rank, world_size, local_rank, here or world_size, starter.master, port, starter.name)


_RANK_VARIABLES = re.compile(
    r"(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|PET_\w+|SLURM_(PROCID|LOCALID|NODEID|STEP_\w+)"
)


def _variables_found(environment: Mapping[str, str]) -> str:
    """All that was said to this process about its place."""
    mpi = {name for names in _MPI for name in names}
    names = sorted(name for name in environment if _RANK_VARIABLES.fullmatch(name) or name in mpi)
    return f"Found: {', '.join(f'{name}={environment[name]}' for name in names)}."


def _refuse_other_rank(environment: Mapping[str, str], placement: Placement) -> None:
    """RANK as a script has set it, beside what the program says that has started the script once for each rank."""
    if "TORCHELASTIC_RUN_ID" in environment or is_supervised(environment):
        return  # torchrun has started this one, whatever started torchrun
    for rank, size in (*(names[:2] for names in _MPI), ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS")):
        if environment.get(size) == str(placement.world_size) != "1" and environment.get(rank, "") not in (
            "",
            str(placement.rank),
        ):
            raise UsageError(
                f"RANK: {placement.rank}, but {rank} is {environment[rank]}. Needed: the same. Leave RANK and "
                f"WORLD_SIZE out: what {rank} says is understood. {_variables_found(environment)}"
            )


def first_node(nodes: str) -> str:
    """gpu[003-006,9],cpu1 -> gpu003"""
    name = re.match(r"([^\[,]*)(?:\[(\w+)[^\]]*\]([^,]*))?", nodes.strip())
    assert name is not None
    return name[1] + (name[2] or "") + (name[3] or "")


def _tasks_here(environment: Mapping[str, str], world_size: int) -> int | None:
    """By 4(x2),1 there are 4 on the first two nodes, 1 on the third; None where it is not said."""
    of_step = environment.get(_SRUN[3], "")
    counts = of_step or environment.get("SLURM_TASKS_PER_NODE", "")
    each = [int(n) for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts) for _ in range(int(times or 1))]
    node = _number(environment, "SLURM_NODEID", 0, "srun")
    if of_step and (sum(each) != world_size or node >= len(each)):
        raise UsageError(
            f"{_SRUN[3]}: {of_step}, which is {sum(each)} tasks on {len(each)} nodes, but {_SRUN[1]} is {world_size} "
            f"and SLURM_NODEID is {node}. Needed: as srun sets them. {_variables_found(environment)}"
        )
    return each[node] if node < len(each) else None


def _number(environment: Mapping[str, str], name: str, otherwise: int | None, started_by: str) -> int:
    text = environment.get(name, "")
    if not text and otherwise is not None:
        return otherwise
    if not text.isdecimal():
        got = repr(text) if text else "not set"
        variables = _variables_found(environment)
        raise UsageError(f"{name}: {got} in the environment. Needed: a number, as {started_by} sets it. {variables}")
    return int(text)
