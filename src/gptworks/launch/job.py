"""What is to be started: the command of each rank, how many of them, on which machines."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from gptworks import durable
from gptworks.errors import UsageError
from gptworks.launch import rank_env
from gptworks.launch.nodes import Nodes

SAVE_TIMEOUT_S = 7200  # in which a checkpoint must be written; ranks that save after a signal have so long


@dataclass(frozen=True)
class Job:
    command: tuple[str, ...]  # of each rank: -m MODULE ... or SCRIPT ...
    nproc: int
    log_dir: Path
    nodes: Nodes = field(default_factory=Nodes)
    max_restarts: int = 0
    quiet: bool = False  # say nothing of the start
    preload: tuple[str, ...] = ()  # modules that every rank will import; not the one that is run
    # Exit code of a run that a signal has stopped before its end, and that was saved; None: see signals.stopped_code.
    stopped_code: int | None = None

    def environment(self) -> dict[str, str]:
        """What the processes of the job are told, whoever starts them."""
        environment = {
            # A rank that goes before another makes torch write pages about a broken pipe.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
            rank_env.LOG_DIR: str(self.log_dir.absolute()),
        }
        if self.nodes.devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in self.nodes.devices)
        return environment


def make_log_dir(log_dir: Path) -> None:
    try:
        durable.make_folder(log_dir)  # often with the run folder
    except OSError as error:
        raise UsageError(
            f"{log_dir}: logs cannot be written there ({error.strerror}). Choose another --out, or a "
            "--log-dir for the logs alone."
        ) from None
