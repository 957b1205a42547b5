"""One writer at a time, nobody else's files, a record of what was run, and signals."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptworks import folder_lock
from gptworks.errors import UsageError
from gptworks.launch import signals
from gptworks.train import run_folder
from gptworks.train.run_folder import Interrupts, locked

# The lock


def test_a_locked_folder_names_its_owner(tmp_path: Path) -> None:
    run = tmp_path / "new" / "run"
    with locked(run):
        with pytest.raises(UsageError, match=rf"another process \(process {os.getpid()} on ") as caught, locked(run):
            pass
        assert str(run) in str(caught.value)
    with locked(run):
        pass


def test_a_folder_that_is_written_to_is_not_to_be_resumed(tmp_path: Path) -> None:
    """The launcher asks before it opens logs there; and --resume auto would be the wrong advice."""
    with locked(tmp_path):
        (tmp_path / "config.yaml").touch()
        for resume in ("never", "auto"):
            with pytest.raises(UsageError, match=rf"another process \(process {os.getpid()} on .*is writing here"):
                run_folder.refuse_foreign(tmp_path, resume)
    with pytest.raises(UsageError, match="not empty"):
        run_folder.refuse_foreign(tmp_path, "never")


def test_the_lock_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path):
        pass


HOLD = """
import sys
from pathlib import Path
from gptworks.train.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match=f"process {holder.pid} on"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
    with locked(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / run_folder.LOCK).read_text()
        assert str(holder.pid) not in (tmp_path / run_folder.LOCK).read_text().split()


def test_the_owner_is_on_the_disk_before_others_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem may keep what was written on this machine until the file is closed."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.pread(file, 100, 0).decode()))
    with locked(tmp_path):
        assert synced == [f"{folder_lock.me()}\n"]


# Filesystems without locks


@pytest.fixture
def flock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """flock(errno.ENOSYS): what it fails with from now on."""
    import fcntl

    def fail(number: int) -> None:
        def failing(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", failing)

    return fail


NO_LOCKS = [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK]


@pytest.mark.parametrize("number", NO_LOCKS)
def test_without_locks_a_file_names_the_owner(number: int, tmp_path: Path, flock: Callable[[int], None]) -> None:
    flock(number)
    owner = tmp_path / folder_lock.OWNER
    with locked(tmp_path):
        with pytest.raises(UsageError) as caught, locked(tmp_path):
            pass
        assert f"another process (process {os.getpid()} on " in str(caught.value)
        assert f"has no locks ({os.strerror(number)}): if that process is gone, remove {owner}." in str(caught.value)
        assert owner.exists()
    assert not owner.exists()
    run_folder.refuse_foreign(tmp_path, "never")


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_a_lock_that_another_has_is_not_taken_for_none(
    number: int, tmp_path: Path, flock: Callable[[int], None]
) -> None:
    (tmp_path / run_folder.LOCK).write_text("process 7 on node8")
    flock(number)
    with pytest.raises(UsageError, match=r"another process \(process 7 on node8\) is writing here"), locked(tmp_path):
        pass
    assert not (tmp_path / folder_lock.OWNER).exists()


def test_any_other_failure_of_a_lock_is_said(tmp_path: Path, flock: Callable[[int], None]) -> None:
    flock(errno.EIO)
    with pytest.raises(UsageError, match=rf"cannot be locked \({os.strerror(errno.EIO)}\)"), locked(tmp_path):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_an_owner_that_is_gone_is_replaced_on_its_machine_only(tmp_path: Path, flock: Callable[[int], None]) -> None:
    flock(errno.ENOSYS)
    owner = tmp_path / folder_lock.OWNER
    with locked(tmp_path):
        mine = json.loads(owner.read_text())
    gone = mine | {"started": "1"}  # its number has been given to another process since
    owner.write_text(json.dumps(gone | {"machine": "another", "owner": "process 3 on far"}))
    with pytest.raises(UsageError, match=r"process 3 on far.*remove"), locked(tmp_path):
        pass
    owner.write_text("")  # half-written
    with pytest.raises(UsageError, match="unknown"), locked(tmp_path):
        pass
    owner.write_text(json.dumps(gone))
    with locked(tmp_path):
        assert json.loads(owner.read_text()) == mine
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.LOCK]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_an_owner_that_proc_hides_is_not_gone(
    tmp_path: Path, flock: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mounted with hidepid, /proc shows no processes of other users; the first one of a machine always lives."""
    flock(errno.ENOSYS)
    hidden = {"owner": "process 1 on here", "pid": 1, "machine": folder_lock._machine(), "started": "2"}
    (tmp_path / folder_lock.OWNER).write_text(json.dumps(hidden))
    read_text = Path.read_text

    def hide(path: Path, *args: Any, **keywords: Any) -> str:
        if path == Path("/proc/1/stat"):
            raise FileNotFoundError(path)
        return read_text(path, *args, **keywords)

    monkeypatch.setattr(Path, "read_text", hide)
    with pytest.raises(UsageError, match="process 1 on here"), locked(tmp_path):
        pass


@pytest.mark.parametrize("has_links", [True, False])
def test_what_another_has_made_since_is_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    """Two processes find the same stale file; the slower one takes away what the faster one has made of it."""
    if not has_links:

        def refuse(*_: object) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
    owner = tmp_path / folder_lock.OWNER
    owner.write_text("of the faster one")
    folder_lock._put_aside(owner, "stale")
    assert owner.read_text() == "of the faster one"
    assert list(tmp_path.iterdir()) == [owner]


def test_only_its_own_file_is_taken_away_at_the_end(tmp_path: Path, flock: Callable[[int], None]) -> None:
    flock(errno.ENOSYS)
    owner = tmp_path / folder_lock.OWNER
    with locked(tmp_path):
        owner.write_text("of another process, after a user removed ours")
    assert owner.exists()


def test_a_system_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with locked(tmp_path), pytest.raises(UsageError, match="this system has no flock"), locked(tmp_path):
        pass


def test_a_path_that_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for run in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match="cannot be written to") as caught, locked(run):
            pass
        assert str(run) in str(caught.value)


# What is there already


def test_only_an_empty_folder_is_taken_without_asking(tmp_path: Path) -> None:
    run_folder.refuse_foreign(tmp_path / "absent", "never")
    run_folder.refuse_foreign(tmp_path, "never")
    (tmp_path / run_folder.LOCK).write_text("")
    run_folder.refuse_foreign(tmp_path, "never")
    for name in "fedcba":
        (tmp_path / name).write_text("")
    with pytest.raises(UsageError, match=r"not empty \(a, b, c, d, \.\.\.\)"):
        run_folder.refuse_foreign(tmp_path, "never")
    with pytest.raises(UsageError, match=r"not empty \(a, b, c, d, \.\.\.\)"):  # somebody else's
        run_folder.refuse_foreign(tmp_path, "auto")
    with pytest.raises(UsageError, match=r"No run began it: choose another --out\."):
        run_folder.refuse_foreign(tmp_path, "auto")
    (tmp_path / "environment.json").write_text("{}")
    run_folder.refuse_foreign(tmp_path, "auto")
    run_folder.refuse_foreign(tmp_path, str(tmp_path / "step"))
    with pytest.raises(UsageError, match="not empty"):
        run_folder.refuse_foreign(tmp_path, "never")


# The record


def test_the_environment_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("HOME_SWEET_HOME", "private")
    run_folder.write_environment(tmp_path, ["gptworks", "train", "-c", "x.yaml"])
    text = (tmp_path / "environment.json").read_text()
    record = json.loads(text)
    assert record["command"] == ["gptworks", "train", "-c", "x.yaml"]
    assert record["environment"]["OMP_NUM_THREADS"] == "3"
    assert "private" not in text, "only variables that change the computation"
    assert record["packages"].keys() == {"gptworks", "torch", "numpy", "tokenizers", "safetensors", "pydantic"}
    assert record["cpu_count"] == os.cpu_count()


def test_the_commit_is_that_of_the_folder_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    run_folder.write_environment(tmp_path, [])
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] is None
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    subprocess.run(["git", "init", "-q", "."], check=True)
    subprocess.run(["git", *identity, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    run_folder.write_environment(tmp_path, [])
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] == head


# Signals


@pytest.fixture(autouse=True)
def _hangup() -> Iterator[None]:
    """The tests themselves may run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", signals.SAVE_AND_END)
def test_the_first_signal_is_noted_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.received is None
        signal.raise_signal(number)
        assert interrupts.received == number.name
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_repeated_signals_ask_for_the_same(number: signal.Signals) -> None:
    """Another answer would end this very process."""
    with Interrupts() as interrupts:
        for each in (number, number, signal.SIGTERM, signal.SIGINT, number):
            signal.raise_signal(each)
        assert interrupts.received == number.name


def test_the_last_of_many_signals_does_not_make_a_failure_of_a_rank_that_has_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher passes on what the batch system has sent already. Without a launcher the handlers come back."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with Interrupts():
            pass
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        with Interrupts():
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # would end this process
        monkeypatch.delenv("RANK")
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with Interrupts():
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_closed_terminal_is_ignored_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGHUP)
            assert interrupts.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen: list[object] = []

    def train() -> None:
        with Interrupts() as interrupts:
            seen.append(signal.getsignal(signal.SIGINT))
            seen.append(interrupts.received)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [before, None]
    assert signal.getsignal(signal.SIGINT) is before
