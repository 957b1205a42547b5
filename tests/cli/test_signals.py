"""Ctrl-C and SIGTERM: save and end; once more: end."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def training(recipe: Path, out: Path, *settings: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "gptworks", "train", "-c", str(recipe), "--out", str(out), *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_and_ends(
    number: signal.Signals,
    recipe: Path,
    tmp_path: Path,
    call: Callable[..., Any],
    checked: Callable[[Path], int],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    out = tmp_path / "run"
    endless = ["train.steps=1000000", "checkpoint.every=0"]
    with training(recipe, out, *endless) as process:
        wait_for(process, lambda: num_lines(out / "metrics.jsonl") >= 3)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    step = checked(out)
    assert f"{number.name}: stopped after step {step} of 1000000 and saved." in output
    assert f"Go on with: --out {out} --resume auto" in output
    assert "Traceback" not in errors
    assert metrics(out)[-1]["step"] == step >= 3

    call("train", "-c", recipe, "--out", out, "--resume", "auto", f"train.steps={step + 2}")
    assert [line["step"] for line in metrics(out)] == list(range(1, step + 3))


def test_the_second_ctrl_c_ends_at_once(recipe: Path, tmp_path: Path) -> None:
    """In a step that would take hours, so that only the second signal can be what ends it."""
    out = tmp_path / "run"
    with training(recipe, out, "batch.global_size=20000000", "train.steps=2") as process:
        wait_for(process, lambda: (out / "metrics.jsonl").exists())
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first signal lets the step come to its end"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped at once" in errors
    assert "Traceback" not in errors
    assert not (out / "checkpoints").exists()
