"""Signals save and end, and a second Ctrl-C ends at once. And what a terminal shows of it."""

import contextlib
import os
import pty
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_copies import Command


@contextmanager
def training(recipe: Path, out: Path, *settings: str, terminal: int | None = None) -> Iterator[Command]:
    args = ["train", "-c", str(recipe), "--out", str(out), *settings]
    environment = {"TERM": "xterm", "COLUMNS": "150"}
    process = Command(args, out.parent, env=environment, terminal=os.ttyname(terminal) if terminal else None)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: Command, condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGUSR1, 0), (signal.SIGUSR1, 143)])
def test_the_first_signal_saves_and_ends(
    number: signal.Signals,
    code: int,
    recipe: Path,
    tmp_path: Path,
    call: Callable[..., Any],
    checked: Callable[[Path], int],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    out = tmp_path / "run"
    endless = ["train.steps=1000000", "checkpoint.every=0", *(["--stopped-code", str(code)] if code == 143 else [])]
    with training(recipe, out, *endless) as process:
        wait_for(process, lambda: num_lines(out / "metrics.jsonl") >= 3)
        process.send_signal(number)
        output, errors = process.communicate()
        assert process.returncode == code, errors
    step = checked(out)
    assert f"{number.name}: stopped after step {step} of 1000000 and saved." in output
    assert f"Go on with: gptworks train -c {out}/config.yaml --resume auto" in output
    assert "Traceback" not in errors
    assert metrics(out)[-1]["step"] == step >= 3

    # `call` wants 0, which a run that is done has.
    call("train", "-c", recipe, "--out", out, "--resume", "auto", f"train.steps={step + 2}", "--stopped-code", code)
    assert [line["step"] for line in metrics(out)] == list(range(1, step + 3))


@contextmanager
def terminal() -> Iterator[tuple[int, list[bytes]]]:
    """(where a process writes, what has arrived on the screen so far)"""
    screen, side = pty.openpty()
    arrived: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # the other side is closed
            while data := os.read(screen, 4096):
                arrived.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield side, arrived
    finally:
        os.close(side)
        reader.join()
        os.close(screen)


HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"


@pytest.mark.slow
def test_the_second_ctrl_c_ends_at_once(recipe: Path, tmp_path: Path) -> None:
    """In a step that would take hours, so that only the second signal can be what ends it."""
    out = tmp_path / "run"
    settings = ["batch.global_size=20000000", "train.steps=2"]
    with terminal() as (side, arrived), training(recipe, out, *settings, terminal=side) as process:
        wait_for(process, lambda: (out / "metrics.jsonl").exists())
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first signal lets the step come to its end"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT
    shown = b"".join(arrived)
    assert b"stopped at once; what is not in a checkpoint is lost." in shown
    assert b"Traceback" not in shown
    assert shown.rindex(SHOW_CURSOR) > shown.rindex(HIDE_CURSOR), "the terminal is left as it was"
    assert not (out / "checkpoints").exists()


def test_a_terminal_that_is_closed_saves_and_ends(recipe: Path, tmp_path: Path, checked: Callable[[Path], int]) -> None:
    """The live bar and the last words have nowhere to go, which must not matter."""
    out = tmp_path / "run"
    settings = ["train", "-c", str(recipe), "--out", str(out), "train.steps=1000000", "checkpoint.every=0"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: it becomes another program at once
        number, screen = pty.fork()
    if number == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
        os.execv(sys.executable, [sys.executable, "-m", "gptworks", *settings])
    try:
        while num_lines(out / "metrics.jsonl") < 3:
            os.read(screen, 4096)
            assert os.waitpid(number, os.WNOHANG) == (0, 0)
        os.close(screen)
        ended = os.waitpid(number, 0)
    except BaseException:
        os.kill(number, signal.SIGKILL)
        os.waitpid(number, 0)
        raise
    assert os.waitstatus_to_exitcode(ended[1]) == 0
    assert checked(out) >= 3


def test_a_live_bar_on_a_terminal(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    with terminal() as (side, arrived), training(recipe, out, terminal=side) as process:
        assert process.wait() == 0
    shown = b"".join(arrived).decode()
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert re.search(r"step 6/6 \S+ +elapsed \d+:\d\d:\d\d left \d+:\d\d:\d\d", plain), plain
    for step in range(1, 7):
        line = rf"step {step}/6  loss \d\.\d{{4}}  lr \d\.\d\de[-+]\d\d  grad \S+  [\d,]+ tok/s  MFU (?:\d+%|-)  ETA"
        assert re.search(line, plain), plain
    assert "saved " in plain
    assert shown.rindex(SHOW_CURSOR.decode()) > shown.rindex(HIDE_CURSOR.decode())
