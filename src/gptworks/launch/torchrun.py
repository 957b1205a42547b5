"""The torchrun command of one machine: torch's own elastic agent, started with its public options alone."""

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from gptworks.launch import nodes, signals
from gptworks.launch.job import SAVE_TIMEOUT_S, Job

RDZV_ID = "gptworks"  # an endpoint serves one run at a time
JOIN_TIMEOUT_S = 900  # for which a machine waits until enough of the others have come
LAST_CALL_S = 10  # for which a run that could begin waits for the rest of MIN:MAX
# A machine that has not been heard of for their product is taken for lost, by clocks that `membership` has compared.
KEEP_ALIVE_S, KEEP_ALIVE_TRIES = 2, 5
READ_TIMEOUT_S = 30  # in which the machine that keeps the rendezvous must answer


def command(job: Job) -> list[str]:
    """As it is started on this machine. Each rank runs `rank_process`, which keeps its log."""
    machines, size = job.nodes, f"{job.nodes.at_least}:{job.nodes.count}"
    settings = {
        "is_host": int(machines.rank == 0),
        "join_timeout": JOIN_TIMEOUT_S,
        "last_call_timeout": LAST_CALL_S,
        "keep_alive_interval": KEEP_ALIVE_S,
        "keep_alive_max_attempt": KEEP_ALIVE_TRIES,
        "read_timeout": READ_TIMEOUT_S,
    }
    options = {
        "--nnodes": size if machines.at_least < machines.count else str(machines.count),
        "--nproc-per-node": str(job.nproc),
        "--max-restarts": str(job.max_restarts),
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": f"{nodes.bracketed(machines.master)}:{machines.port}",
        "--rdzv-id": RDZV_ID,
        "--rdzv-conf": ",".join(f"{name}={value}" for name, value in settings.items()),
        "--local-addr": _name_for_order(machines),
        "--shutdown-timeout": str(SAVE_TIMEOUT_S),
        "--signals-to-handle": ",".join(("SIGQUIT", *(number.name for number in signals.SAVE_AND_END))),
    }
    words = [word for option in options.items() for word in option]
    # After -- torchrun does not look for its own options, such as the beginning of --master-addr in our --master.
    ranks = ["-m", "gptworks.launch.rank_process", "--", *job.command]
    return [sys.executable, "-m", "torch.distributed.run", *words, *ranks]


def _name_for_order(machines: nodes.Nodes) -> str:
    """torch numbers the machines in the order of these texts, and only the first one's is an address that others use:
    so ranks follow the numbers that the user gave, and rank 0 is where the rendezvous is."""
    return machines.master if machines.rank == 0 else f"{machines.master}~{machines.rank:06d}"


def environment(job: Job) -> dict[str, str]:
    """What the agent and its ranks are told beside what they inherit."""
    env = job.environment() | {
        # Without it torch 2.13 lets the ranks of a new start read addresses of the one before (pytorch issue 135712).
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # torchrun would say 1, and a page about it.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, nodes.num_cores() // job.nproc))),
    }
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = nodes.interface_towards(job.nodes.master, job.nodes.port)
        if interface:
            env["GLOO_SOCKET_IFNAME"] = interface  # else gloo asks what this machine's name means, often 127.0.1.1
    return env


def inherited() -> dict[str, str]:
    """Without what is meant for an agent that somebody else starts: torchrun takes its defaults from PET_..."""
    foreign = ("TORCHELASTIC_", "PET_")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign)}


def by_hand(job: Job) -> str:
    """The command for a user who starts torchrun instead of us, and who was shown it by --dry-run: torchrun does not
    tell its ranks to go on where they were."""
    words = [word for word in job.command if word != "--dry-run"]
    is_given = any(word.partition("=")[0] == "--resume" for word in words)
    if job.max_restarts and not is_given:
        words += ["--resume", "auto"]
    return described(replace(job, command=tuple(words)))


def described(job: Job) -> str:
    """One line for a shell, as it is started here."""
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment(job).items()]
    return " ".join([*settings, shlex.join(command(job))])


def log_file(job: Job) -> Path:
    return job.log_dir / f"torchrun-node-{job.nodes.rank}.log"
