"""Starts the ranks of this machine, watches them, and starts them again after a failure.

Our own rather than torch's elastic agent: that one waits 30 s for stopped processes, answers Ctrl-C by ending the
ranks in the middle of a step, and gives nodes other ranks than the user did. This one needs no torch on one machine.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from gptworks.errors import GPTWorksError, UsageError
from gptworks.launch import failures, fork_server, open_files, rank_env, signals
from gptworks.launch.failures import Failure
from gptworks.launch.fork_server import ForkedRank, ForkServer
from gptworks.launch.meeting import Alone, JobOver, Meeting, Round
from gptworks.launch.nodes import Nodes
from gptworks.launch.rank_process import log_file

GRACE = 6.0  # seconds in which the other ranks of a failed run may say why they stop; more than failures.PATIENCE
_POLL, _POLL_NODES = 0.05, 0.5


@dataclass(frozen=True)
class Job:
    command: tuple[str, ...]  # of each rank: -m MODULE ... or SCRIPT ...
    nproc: int
    log_dir: Path
    nodes: Nodes = field(default_factory=Nodes)
    max_restarts: int = 0
    quiet: bool = False  # say nothing of the start
    preload: tuple[str, ...] = ()  # modules that every rank will import; not the one that is run


class _Interrupted(Exception):
    """A signal arrived while there were no processes to pass it on to."""


class _Signals:
    """They are for the ranks, which save and end: each kind is passed on once, and a second Ctrl-C too."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self.passed_on = 0

    def __enter__(self) -> "_Signals":
        self._before = {number: signal.signal(number, self._receive) for number in signals.to_handle()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if not self.received or handler != signal.SIG_DFL:  # the same signal once more finds a process that ends
                signal.signal(number, handler)

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.received.count(number) < (2 if number == signal.SIGINT else 1):
            self.received.append(number)
        if signal.Signals(number).name == "SIGHUP":
            signals.leave_closed_terminal()

    @property
    def ends_at_once(self) -> bool:
        return self.received.count(signal.SIGINT) > 1

    def leave_if_received(self) -> None:
        if self.received:
            raise _Interrupted


class _Ranks:
    """The processes of one attempt."""

    def __init__(self, job: Job, round: Round, folder: Path) -> None:
        self.job, self.round, self.folder = job, round, folder
        self.processes: dict[int, subprocess.Popen[bytes] | ForkedRank] = {}
        shared = {
            "WORLD_SIZE": str(round.world_size),
            "LOCAL_WORLD_SIZE": str(job.nproc),
            "GROUP_RANK": str(round.node),
            "MASTER_ADDR": round.master,
            "MASTER_PORT": str(round.port),
            rank_env.LOG_DIR: str(job.log_dir.absolute()),
            rank_env.FAILURES: str(folder),
            rank_env.ATTEMPT: str(round.number - 1),
        }
        # A rank that goes before another makes torch write pages about a broken pipe.
        shared["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
        if job.nodes.devices:
            shared["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in job.nodes.devices)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        own = {
            round.first_rank + local: {"RANK": str(round.first_rank + local), "LOCAL_RANK": str(local)}
            for local in range(job.nproc)
        }
        if round.number > 1:
            for rank in own:
                self._write_log(rank, f"--- start {round.number}")
        if job.nproc > 1 and fork_server.POSSIBLE:
            self.processes |= ForkServer(job.command, job.preload, own, inherited | shared).ranks
            return
        try:
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
        """Those that had not ended by themselves."""
        left = [rank for rank, process in self.processes.items() if process.poll() is None]
        self.send(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()
        return left

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes.values()):
            self._note_deaths()
            time.sleep(_POLL)

    def failure(self) -> Failure | None:
        """Once a rank has ended badly: let the others speak, end them, and name the one that was first."""
        if not any(process.poll() for process in self.processes.values()):
            return None
        self._note_deaths()
        self.wait(GRACE)
        self._note_deaths()
        killed = self.kill()
        found = failures.read_all(self.folder)
        first = failures.first(found)
        assert first is not None
        for rank in killed:
            self._write_log(rank, f"stopped by the launcher because rank {first.rank} failed: {first.message}")
        # All ranks can find the same mistake, such as missing data: then it is not one rank's.
        same = len(found) == self.round.world_size > 1 and len({failure.message for failure in found.values()}) == 1
        speaks_of_ranks = first.because_of is not None or first.message.startswith("rank ")
        where = "" if same or speaks_of_ranks else f"rank {first.rank} of {self.round.world_size}: "
        return Failure(first.rank, where + first.message, first.is_fault, first.can_restart, first.because_of)

    def _note_deaths(self) -> None:
        """A rank that ended without a word of its own gets one, which the others may be waiting for."""
        known = failures.read_all(self.folder)
        for rank, process in self.processes.items():
            code = process.poll()
            if code and rank not in known:
                Failure(rank, self._last_words(rank, code), is_fault=code == 1).write(self.folder)

    def _last_words(self, rank: int, code: int) -> str:
        log = log_file(self.job.log_dir, rank)
        if code < 0:
            name = signal.Signals(-code).name
            memory = " If nobody did that, memory ran out (dmesg tells)." if -code == signal.SIGKILL else ""
            return f"killed by {name}.{memory} Its log: {log}"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        return "\n".join([f"ended with exit code {code}. Its log, {log}, ends with:", *lines[-10:]])

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
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{job.log_dir}: logs cannot be written there ({error.strerror}). Choose another --out, or a "
            "--log-dir for the logs alone."
        ) from None
    open_files.raise_limit()  # the ranks inherit it
    meeting: Alone | Meeting | None = None
    with _Signals() as received:
        try:
            meeting = Alone(job.nproc) if job.nodes.count == 1 else _meeting(job, received)
            return _attempts(job, meeting, received)
        except _Interrupted:
            return 128 + received.received[0]
        except JobOver as over:
            _say(f"error: {over}")
            return over.exit_code
        except GPTWorksError as error:
            if meeting is not None:
                meeting.end(str(error), 2)
            raise
        except RuntimeError as error:
            if not isinstance(meeting, Meeting) or not failures.is_communication(error):
                raise
            _say(f"error: node 0 at {job.nodes.master}:{job.nodes.port} does not answer any more; stopped here too.")
            return 2


def _meeting(job: Job, received: _Signals) -> Meeting:
    return Meeting(job.nodes, job.nproc, _say, idle=received.leave_if_received)


def _attempts(job: Job, meeting: Alone | Meeting, received: _Signals) -> int:
    while True:
        round = meeting.next(received.leave_if_received)
        last = round.first_rank + job.nproc - 1
        node = f"node {round.node} of {round.num_nodes}: " if round.num_nodes > 1 else ""
        processes = f"{job.nproc} process{'es' if job.nproc > 1 else ''}"
        start = f"{node}{processes}, ranks {round.first_rank} to {last} of {round.world_size}"
        if not job.quiet:
            print(f"{start}; logs in {job.log_dir}", flush=True)
        with tempfile.TemporaryDirectory(prefix="gptworks-") as folder:
            ranks = _Ranks(job, round, Path(folder))
            try:
                failure, has_joined = _watch(ranks, meeting, received)
            finally:
                ranks.kill()
                if sys.stdout.isatty() and any(process.returncode for process in ranks.processes.values()):
                    print("\x1b[?25h", end="", flush=True)  # the live bar of rank 0 may have hidden the cursor
        if received.ends_at_once:
            return 128 + signal.SIGINT
        if received.received and not ranks.have_begun:
            return 128 + received.received[0]
        if failure is None and not has_joined and meeting.all_done(lambda: None):
            return 0
        if failure is None or (has_joined and failure.can_restart):
            _say(f"another node {'joins' if has_joined else 'starts again'}; so all start again.")
            continue
        number = meeting.count_failure()
        if failure.can_restart and number <= job.max_restarts and not received.received:
            _say(f"{failure.message}\nstarting again from the last checkpoint ({number} of {job.max_restarts})")
        else:
            meeting.end(failure.message, failure.exit_code)
            _say(f"error: {failure.message}")
            if failure.is_fault:
                _say("\nThis is a fault of gptworks, not of your input. Please report it with the lines above.")
            return failure.exit_code


def _watch(ranks: _Ranks, meeting: Alone | Meeting, received: _Signals) -> tuple[Failure | None, bool]:
    """Until all have ended well (None) or not; and whether it was because another node joins."""
    asked, has_joined = time.monotonic(), False
    while any(process.poll() is None for process in ranks.processes.values()):
        failure = ranks.failure()
        if failure is not None:
            return failure, has_joined
        while received.passed_on < len(received.received):
            ranks.send(received.received[received.passed_on])
            received.passed_on += 1
        if received.ends_at_once:
            ranks.wait(2.0)
            return None, has_joined
        if time.monotonic() - asked > _POLL_NODES:
            asked = time.monotonic()
            is_called = meeting.is_called()
            if is_called and meeting.has_failed():  # elsewhere: ranks here may be waiting for one that is gone
                ranks.wait(GRACE)
                return ranks.failure(), False
            if is_called and not has_joined:
                has_joined = True
                ranks.send(signal.SIGTERM)  # they finish the step, save and end
        time.sleep(_POLL)
    return ranks.failure(), has_joined


def _say(text: str) -> None:
    with suppress(OSError):  # a pipe or a terminal that is gone
        print(text, file=sys.stderr, flush=True)
