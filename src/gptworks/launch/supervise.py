"""Starts the ranks of one machine, watches them, and starts them again after a failure.

Several machines run on torch's own agent (`machines`). For one this is quicker: ranks are forked from a process that
has imported torch already, the signal of a dead rank is known at once, and no port or rendezvous is needed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from gptworks.errors import UsageError
from gptworks.launch import failures, fork_server, open_files, rank_env
from gptworks.launch.failures import Failure
from gptworks.launch.fork_server import ForkedRank, ForkServer
from gptworks.launch.job import Job as Job
from gptworks.launch.job import make_log_dir
from gptworks.launch.nodes import HeldPort
from gptworks.launch.rank_process import STOPPED, log_file, unspoken_failure
from gptworks.launch.signals import Received, stopped_code

_POLL_S = 0.05


class _Ranks:
    """The processes of one attempt."""

    def __init__(self, job: Job, attempt: int, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        self.port = HeldPort()  # some seconds pass until rank 0 listens there
        shared = job.environment() | {
            "WORLD_SIZE": str(job.nproc),
            "LOCAL_WORLD_SIZE": str(job.nproc),
            "GROUP_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port.number),
            rank_env.FAILURES: str(folder),
            rank_env.ATTEMPT: str(attempt),
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        own = {rank: {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(job.nproc)}
        try:
            if job.nproc > 1 and fork_server.POSSIBLE:
                self.processes |= ForkServer(job.command, job.preload, own, inherited | shared).ranks
                return
            for rank, environment in own.items():
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "gptworks.launch.rank_process", *job.command],
                    env=inherited | shared | environment,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,  # a terminal's Ctrl-C comes here only, and is passed on once
                )
        except BaseException:
            self.kill()
            raise

    @property
    def have_begun(self) -> bool:
        return any(process.pid is not None for process in self.processes.values())

    def send(self, number: int) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> list[int]:
        """Kills the ranks, and gives those that had not ended by themselves."""
        left = [rank for rank, process in self.processes.items() if process.poll() is None]
        self.send(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        self.port.close()
        return left

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes.values()):
            self._note_deaths()
            time.sleep(_POLL_S)

    def failure(self) -> Failure | None:
        """Once a rank has ended badly: let the others speak, end them, and name the one that was first."""
        if not any(process.poll() for process in self.processes.values()):
            return None
        self._note_deaths()
        self.wait(failures.GRACE_S)
        self._note_deaths()
        killed = self.kill()
        known = failures.read_all(self.folder)
        first = failures.first(known)
        assert first is not None
        for rank in killed:
            self._write_log(rank, f"stopped by the launcher because rank {first.rank} failed: {first.message}")
        return failures.named(known, self.job.nproc)

    def _note_deaths(self) -> None:
        """A rank that ended without a word of its own gets one, which the others may be waiting for."""
        known = failures.read_all(self.folder)
        for rank, process in self.processes.items():
            code = process.poll()
            if code and rank not in known:
                unspoken_failure(rank, code, log_file(self.job.log_dir, rank)).write(self.folder)

    def _write_log(self, rank: int, text: str) -> None:
        with log_file(self.job.log_dir, rank).open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def run(job: Job) -> int:
    """All attempts; the exit code of the whole."""
    if not hasattr(signal, "SIGKILL"):
        raise UsageError(
            f"{job.nproc} processes: {sys.platform} lacks the signals by which a launcher ends its ranks. Train in one "
            "process, or on Linux (on Windows: in WSL)."
        )
    if job.nodes.count > 1:
        from gptworks.launch import machines

        return machines.run(job)
    make_log_dir(job.log_dir)
    open_files.raise_limit()  # the ranks inherit it
    with Received() as received:
        return _attempts(job, received)


def _attempts(job: Job, received: Received) -> int:
    for attempt in range(job.max_restarts + 1):
        processes = f"{job.nproc} process{'es' if job.nproc > 1 else ''}"
        if not job.quiet:
            print(f"{processes}, ranks 0 to {job.nproc - 1} of {job.nproc}; logs in {job.log_dir}", flush=True)
        with tempfile.TemporaryDirectory(prefix="gptworks-") as folder:
            ranks = _Ranks(job, attempt, Path(folder))
            try:
                failure = _watch(ranks, received)
                was_stopped = (Path(folder) / STOPPED).exists()
            finally:
                ranks.kill()
                if sys.stdout.isatty() and any(process.returncode for process in ranks.processes.values()):
                    print("\x1b[?25h", end="", flush=True)  # the live bar of rank 0 may have hidden the cursor
        if received.ends_at_once:
            return 128 + signal.SIGINT
        if received.received and not ranks.have_begun:
            return 128 + received.received[0]
        if failure is None:
            by = signal.Signals(received.received[0]).name if received.received else ""
            return stopped_code(job.stopped_code, by) if was_stopped else 0
        if not failure.can_restart or attempt == job.max_restarts or received.received:
            break
        again = f"({attempt + 1} of {job.max_restarts})"
        failures.say(f"{failure.message}\nstarting again from the last checkpoint {again}")
    assert failure is not None
    return failures.say_failure(failure)


def _watch(ranks: _Ranks, received: Received) -> Failure | None:
    """Until all have ended: well (None) or not."""
    while any(process.poll() is None for process in ranks.processes.values()):
        failure = ranks.failure()
        if failure is not None:
            return failure
        for number in received.not_passed_on():
            ranks.send(number)
        if received.ends_at_once:
            ranks.wait(2.0)
            return None
        time.sleep(_POLL_S)
    return ranks.failure()
