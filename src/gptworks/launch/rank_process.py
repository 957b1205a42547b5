"""How a rank starts: python -m gptworks.launch.rank_process -m MODULE ... (or SCRIPT ...).

Its output goes to its log. Rank 0 keeps the terminal, with a copy in its log. It ends when the launcher does.
"""

import ctypes
import errno
import json
import os
import re
import runpy
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from gptworks.errors import GPTWorksError
from gptworks.launch import failures, rank_env
from gptworks.launch.failures import Failure

_PR_SET_PDEATHSIG = 1  # prctl.h
BEGUN, ENDED_WELL = "begun-", "ended-"  # and the rank: files by which a rank tells that it has begun, and ended well
SAVES = "saves-"  # the same, of a rank that saves at a signal from now on
STOPPED = "stopped"  # a file beside them: a signal has stopped the run before its end
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def last_lines(log: Path) -> list[str]:
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-10:] if log.exists() else []


class Copied:
    """A stream whose finished lines are copied to a log, without what moves the cursor of a live bar."""

    def __init__(self, stream: TextIO, log: TextIO) -> None:
        self.stream, self.log = stream, log
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self.log.write(_CONTROL.sub("", line.rpartition("\r")[2]) + "\n")
        with _closed_terminal_ignored():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _closed_terminal_ignored():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def _closed_terminal_ignored() -> Iterator[None]:
    """What is left to do, such as saving, is done all the same."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def main(command: list[str]) -> None:
    end_with_parent()
    rank = int(os.environ["RANK"])
    round_folder = _enter_round(rank)
    _redirect(rank)
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            if not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
            _leave(rank, end.code if isinstance(end.code, int) else 1)
    except BaseException:
        traceback.print_exc()
        _leave(rank, 1)
    if round_folder is not None:
        (round_folder / f"{ENDED_WELL}{rank}").touch()


def _enter_round(rank: int) -> Path | None:
    """Under torchrun: tell what started it which rank this is. Each start of all ranks has a port of its own."""
    if rank_env.ROUNDS not in os.environ:
        return None
    rounds, environment = Path(os.environ[rank_env.ROUNDS]), os.environ
    folder = rounds / f"{environment['MASTER_PORT']}-{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    folder.mkdir(exist_ok=True)
    earlier = [path for path in rounds.iterdir() if path.is_dir() and path != folder]
    environment[rank_env.FAILURES], environment[rank_env.ATTEMPT] = str(folder), str(len(earlier))
    begun = {
        "rank": rank,
        "world_size": int(environment["WORLD_SIZE"]),
        "node": int(environment["GROUP_RANK"]),
        "num_nodes": int(environment["GROUP_WORLD_SIZE"]),
        "restarts": int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        "pid": os.getpid(),
    }
    new = folder / f".{rank}.new"
    new.write_text(json.dumps(begun), encoding="utf-8")
    new.replace(folder / f"{BEGUN}{rank}")
    return folder


def _redirect(rank: int) -> None:
    if rank_env.LOG_DIR not in os.environ:
        return
    folder = Path(os.environ[rank_env.LOG_DIR])
    folder.mkdir(parents=True, exist_ok=True)  # torchrun may have been started by hand
    log = log_file(folder, rank).open("a", encoding="utf-8", buffering=1)
    attempt = int(os.environ.get(rank_env.ATTEMPT, "0"))
    if attempt:
        log.write(f"--- start {attempt + 1}\n")
    if rank:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(log.fileno(), stream.fileno())
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return
    if rank_env.TERMINAL in os.environ:
        pipe = os.open(os.environ[rank_env.TERMINAL], os.O_WRONLY)
        os.dup2(pipe, sys.stderr.fileno())
        os.close(pipe)
    sys.stdout, sys.stderr = Copied(sys.stdout, log), Copied(sys.stderr, log)  # type: ignore[assignment]


def _leave(rank: int, code: int) -> None:
    """At once: threads and groups that wait for ranks that are gone are not waited for."""
    sys.stdout.flush()
    sys.stderr.flush()
    folder, logs = os.environ.get(rank_env.FAILURES), os.environ.get(rank_env.LOG_DIR)
    if folder and logs and rank not in failures.read_all(Path(folder)):
        unspoken_failure(rank, code, log_file(Path(logs), rank)).write(Path(folder))
    os._exit(code)


def unspoken_failure(rank: int, code: int, log: Path) -> Failure:
    """What is said of a rank that said nothing itself. code: as a subprocess.Popen has it."""
    if code < 0:
        memory = " If nobody did that, memory ran out (dmesg tells)." if -code == signal.SIGKILL else ""
        return Failure(rank, f"killed by {signal.Signals(-code).name}.{memory} Its log: {log}")
    text = "\n".join([f"ended with exit code {code}. Its log, {log}, ends with:", *last_lines(log)])
    return Failure(rank, text, is_fault=code == 1, can_restart=code != GPTWorksError.exit_code)


def note_saves() -> None:
    """To what started this rank, if anything did."""
    if rank_env.FAILURES in os.environ:
        (Path(os.environ[rank_env.FAILURES]) / f"{SAVES}{os.environ['RANK']}").touch()


def note_stopped() -> None:
    """To what started this rank."""
    (Path(os.environ[rank_env.FAILURES]) / STOPPED).touch()


def end_with_parent() -> None:
    """A launcher that is killed leaves no ranks behind, which would hold devices, memory and the run folder."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it went just now
            os._exit(1)


if __name__ == "__main__":
    main([word for number, word in enumerate(sys.argv[1:]) if number or word != "--"])
