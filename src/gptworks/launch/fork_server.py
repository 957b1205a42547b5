"""Ranks as copies of one process that has imported what all of them need.

Eight processes that import torch beside each other take seconds of a core each before they begin, and memory for eight
copies of its code and tables. A copied process has both already. The one that is copied imports and waits, nothing
else: it has opened no device, no group and no file.

    python -m gptworks.launch.fork_server FD      the process that is copied; FD is where it tells of its copies
"""

import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress

from gptworks import cpu
from gptworks.launch import rank_process, signals

_POLL = 0.05  # seconds

# Elsewhere libraries are not safe to copy once they are loaded.
POSSIBLE = sys.platform == "linux"


class ForkedRank:
    """A rank, spoken to as to a subprocess.Popen."""

    def __init__(self, source: "ForkServer") -> None:
        self._source = source
        self.pid: int | None = None  # not copied yet
        self.returncode: int | None = None
        self._waiting: list[int] = []  # signals that came before there was a process

    def poll(self) -> int | None:
        self._source.listen(0)
        return self.returncode

    def wait(self) -> int:
        while self.returncode is None:
            self._source.listen(_POLL)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is not None:
            return
        if self.pid is None:
            self._waiting.append(number)
            # Ends it, and all with it, as long as it imports. (A Python that begins makes a traceback of Ctrl-C.)
            os.kill(self._source.pid, signal.SIGTERM if number == signal.SIGINT else number)
        else:
            # An ended rank keeps its number for as long as the process it was copied from: it is nobody else's.
            os.kill(self.pid, number)

    def begins(self, pid: int) -> None:
        self.pid = pid
        for number in self._waiting:
            os.kill(pid, number)


class ForkServer:
    """Starts the process that is copied, and through it one rank for each of `ranks`, with its environment."""

    def __init__(
        self,
        command: Sequence[str],
        preload: Sequence[str],
        ranks: Mapping[int, Mapping[str, str]],
        environment: Mapping[str, str],
    ) -> None:
        self.ranks = {rank: ForkedRank(self) for rank in ranks}
        self._heard = b""
        self._news, writer = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gptworks.launch.fork_server", str(writer)],
                env=environment,
                stdin=subprocess.PIPE,
                pass_fds=[writer],
                start_new_session=True,  # a terminal's Ctrl-C goes to the launcher only, and is passed on once
            )
        except BaseException:
            os.close(self._news)
            raise
        finally:
            os.close(writer)
        self.pid = self._process.pid
        assert self._process.stdin is not None
        asked = {"command": list(command), "preload": list(preload), "ranks": {n: dict(e) for n, e in ranks.items()}}
        with suppress(BrokenPipeError), self._process.stdin as pipe:  # it is gone: `listen` will know
            pipe.write(json.dumps(asked).encode())

    def listen(self, seconds: float) -> None:
        """Learn which ranks have begun or ended; wait so long for the first news."""
        while self._news >= 0 and select.select([self._news], [], [], seconds)[0]:
            seconds = 0
            received = os.read(self._news, 65536)
            *lines, self._heard = (self._heard + received).split(b"\n")
            for line in lines:
                rank, what, number = json.loads(line)
                if what == "begins":
                    self.ranks[rank].begins(number)
                else:
                    self.ranks[rank].returncode = number
            if not received or all(copy.returncode is not None for copy in self.ranks.values()):
                self._end()

    def _end(self) -> None:
        """Note that the server itself has ended or has nothing left to tell; no rank outlives it."""
        os.close(self._news)
        self._news = -1
        code = self._process.wait() or -signal.SIGKILL
        for copy in self.ranks.values():
            if copy.returncode is None:
                copy.returncode = code


def main() -> None:
    rank_process.end_with_parent()
    pipe = int(sys.argv[1])
    os.set_inheritable(pipe, False)
    asked = json.load(sys.stdin)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)
    for name in asked["preload"]:
        with suppress(Exception):  # the ranks will run into the same, and say so
            importlib.import_module(name)
    if "torch" in sys.modules:
        cpu.settle()  # once for all ranks
    # From here on a signal is for the ranks, which save and end. A batch system sends it to all processes at once.
    for_ranks = signals.to_handle()
    for number in for_ranks:
        signal.signal(number, signal.SIG_IGN)
    left: dict[int, int] = {}
    for rank, environment in asked["ranks"].items():
        sys.stdout.flush()
        sys.stderr.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of a BLAS, which is prepared to be copied
            # Held back: what a copy is sent before it has handlers of its own would be ignored, as by this process.
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, for_ranks)
            pid = os.fork()
        if pid == 0:
            os.close(pipe)
            os.setsid()
            for number in for_ranks:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            os.environ.update(environment)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            rank_process.main(asked["command"])
            return
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        left[int(rank)] = pid
        _tell(pipe, int(rank), "begins", pid)
    while left:
        for rank, pid in list(left.items()):
            # It is looked at and left where it is, so that its number is not given to another process.
            state = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if state is not None:
                code = state.si_status if state.si_code == os.CLD_EXITED else -state.si_status
                _tell(pipe, rank, "ends", code)
                del left[rank]
        time.sleep(_POLL)


def _tell(pipe: int, rank: int, event: str, number: int) -> None:
    os.write(pipe, json.dumps([rank, event, number]).encode() + b"\n")


if __name__ == "__main__":
    main()
