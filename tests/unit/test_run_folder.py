"""One writer at a time, nobody else's files, a record of what was run, and signals."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from gptworks.errors import UsageError
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_noted_and_the_old_handlers_come_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with Interrupts() as interrupts:
        assert interrupts.received is None
        signal.raise_signal(number)
        assert interrupts.received == number.name
    assert signal.getsignal(number) is before


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
