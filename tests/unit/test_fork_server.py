"""Ranks that are copies of one process: what it has imported is theirs, and they end with it."""

import errno
import io
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from gptworks.launch import fork_server, rank_env, rank_process
from gptworks.launch.fork_server import ForkServer

pytestmark = pytest.mark.skipif(not fork_server.POSSIBLE, reason="processes are copied on Linux only")

SLOW = "import os, pathlib, time\nPID = os.getpid()\npathlib.Path(os.environ['BEGUN']).touch()\ntime.sleep({seconds})\n"
SCRIPT = """\
import os, pathlib, sys, time
import slow
where = pathlib.Path(os.environ["WHERE"]) / os.environ["RANK"]
where.with_suffix(".writing").write_text(f"{slow.PID} {os.getpid()} {sys.argv[1:]} {sys.stdin.read()!r}")
where.with_suffix(".writing").rename(where)
time.sleep(float(os.environ["PAUSE"]))
sys.exit(int(os.environ["RANK"]) * 7)
"""


def start(
    folder: Path, *, preload_seconds: float = 0, pause: float = 0, script: str = SCRIPT, preloaded: str = ""
) -> ForkServer:
    (folder / "slow.py").write_text(SLOW.format(seconds=preload_seconds) + preloaded)
    (folder / "script.py").write_text(script)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *sys.path]),
        "WHERE": str(folder),
        "BEGUN": str(folder / "begun"),
        "PAUSE": str(pause),
        rank_env.LOG_DIR: str(folder),
    }
    command = [str(folder / "script.py"), "one", "two"]
    return ForkServer(command, ["slow", "no.such.module"], {n: {"RANK": str(n)} for n in range(2)}, environment)


def wait_for(*paths: Path) -> None:
    while not all(path.exists() for path in paths):
        time.sleep(0.01)


def is_there(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_is_imported_once_is_there_in_every_rank(tmp_path: Path) -> None:
    copies = start(tmp_path)
    assert [copy.wait() for copy in copies.ranks.values()] == [0, 7]
    said = [(tmp_path / str(rank)).read_text().split(maxsplit=2) for rank in range(2)]
    assert [imported for imported, _, _ in said] == [str(copies.pid)] * 2
    assert [int(pid) for _, pid, _ in said] == [copy.pid for copy in copies.ranks.values()]
    assert len({pid for _, pid, _ in said} | {str(copies.pid)}) == 3
    assert [rest for _, _, rest in said] == ["['one', 'two'] ''"] * 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGKILL])
def test_a_signal_before_there_are_ranks_ends_all(tmp_path: Path, number: int) -> None:
    copies = start(tmp_path, preload_seconds=60)
    wait_for(tmp_path / "begun")
    copies.ranks[0].send_signal(number)
    ended_by = signal.SIGTERM if number == signal.SIGINT else number
    assert [copy.wait() for copy in copies.ranks.values()] == [-ended_by, -ended_by]
    assert not (tmp_path / "0").exists()


LATE = "import os, time\nos.register_at_fork(after_in_child=lambda: time.sleep(0.5))\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_a_rank_that_has_just_begun_is_not_lost(tmp_path: Path, number: int) -> None:
    """The copied process ignores it, and so does a copy until it has handlers of its own."""
    copies = start(tmp_path, pause=60, preloaded=LATE)
    while any(copy.pid is None for copy in copies.ranks.values()):
        copies.listen(0.01)
    for copy in copies.ranks.values():
        copy.send_signal(number)
    assert [copy.wait() for copy in copies.ranks.values()] == [-number, -number]


WAITING = """\
import os, pathlib, sys, time
where = pathlib.Path(os.environ["WHERE"])
(where / os.environ["RANK"]).touch()
while not (where / "go").exists():
    time.sleep(0.01)
sys.exit(int(os.environ["RANK"]) * 7)
"""


def test_a_rank_is_signalled_alone(tmp_path: Path) -> None:
    copies = start(tmp_path, script=WAITING)
    wait_for(tmp_path / "0", tmp_path / "1")
    copies.ranks[0].send_signal(signal.SIGKILL)
    assert copies.ranks[0].wait() == -signal.SIGKILL
    (tmp_path / "go").touch()
    assert copies.ranks[1].wait() == 7
    copies.ranks[0].send_signal(signal.SIGKILL)  # of one that has ended: nothing happens


SAVING = """\
import os, pathlib, signal, time
where = pathlib.Path(os.environ["WHERE"]) / os.environ["RANK"]
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda *_: asked.append(1))
where.touch()
while not asked:
    time.sleep(0.01)
time.sleep(0.5)
where.with_suffix(".saved").touch()
"""


def test_a_signal_to_all_processes_lets_the_ranks_save(tmp_path: Path) -> None:
    """As batch systems send it: the copied process must not take the ranks with it."""
    copies = start(tmp_path, script=SAVING)
    wait_for(tmp_path / "0", tmp_path / "1")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        os.kill(copies.pid, number)
        for copy in copies.ranks.values():
            copy.send_signal(number)
    assert [copy.wait() for copy in copies.ranks.values()] == [0, 0]
    assert (tmp_path / "0.saved").exists() and (tmp_path / "1.saved").exists()


def test_no_rank_outlives_the_process_it_was_copied_from(tmp_path: Path) -> None:
    copies = start(tmp_path, pause=60)
    wait_for(tmp_path / "0", tmp_path / "1")
    numbers = [copy.pid for copy in copies.ranks.values() if copy.poll() is None and copy.pid]
    assert len(numbers) == 2
    os.kill(copies.pid, signal.SIGKILL)
    assert [copy.wait() for copy in copies.ranks.values()] == [-signal.SIGKILL] * 2
    while any(is_there(number) for number in numbers):  # their new parent takes a moment to bury them
        time.sleep(0.01)


HANGUP = """\
import os, pathlib, signal
(pathlib.Path(os.environ["WHERE"]) / os.environ["RANK"]).write_text(signal.getsignal(signal.SIGHUP).name)
"""


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_under_nohup_ranks_ignore_a_closed_terminal_too(tmp_path: Path, handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGHUP, handler)
    try:
        copies = start(tmp_path, script=HANGUP)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [copy.wait() for copy in copies.ranks.values()] == [0, 0]
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [handler.name] * 2


class ClosedTerminal(io.StringIO):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def flush(self) -> None:
        raise OSError(self.number, os.strerror(self.number))


def test_a_terminal_that_is_gone_does_not_end_a_rank_that_has_something_to_save() -> None:
    log = io.StringIO()
    stream = rank_process.Copied(ClosedTerminal(errno.EIO), log)
    print("step 7", file=stream, flush=True)
    assert log.getvalue() == "step 7\n"
    with pytest.raises(BrokenPipeError):
        print("step 8", file=rank_process.Copied(ClosedTerminal(errno.EPIPE), log))
