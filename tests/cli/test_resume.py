"""Bitwise resume: a run that is killed again and again gives the numbers of a run that is left alone."""

import json
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from command_copies import Command

STEPS = 70
KILLS = 5  # of each of two runs
# Dropout, accumulation, several checkpoints, evaluation: whatever has a state takes part.
SETTINGS = [
    f"train.steps={STEPS}",
    "model.dropout_embed=0.1",
    "model.dropout_hidden=0.1",
    "model.dropout_attention=0.1",
    "data.mask_eod=true",
    "optim.warmup_steps=5",
    "checkpoint.every=3",
    "checkpoint.keep_last=2",
    "checkpoint.keep_best=true",
    "evaluate.every=20",
    "evaluate.batches=2",
]


def start(recipe: Path, out: Path, *settings: str) -> Command:
    args = ["train", "-c", str(recipe), "--out", str(out), "--resume", "auto", *(settings or SETTINGS)]
    return Command(args, out.parent)


def finish(process: Command) -> str:
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    return output


def last_logged(run: Path) -> int:
    try:
        lines = (run / "metrics.jsonl").read_bytes().splitlines()
    except FileNotFoundError:
        return 0
    whole = [line for line in lines if line.endswith(b"}")]
    return json.loads(whole[-1])["step"] if whole else 0


def wait_and_kill(process: Command, arrived: Callable[[], bool], delay: float) -> None:
    while not arrived():
        assert process.poll() is None, process.communicate()
        time.sleep(0.0005)
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def killed_run(recipe: Path, run: Path, seed: int, checked: Callable[[Path], int]) -> int:
    """A run killed KILLS times at random moments and then left alone to its end; how often while it was saving."""
    rng = random.Random(seed)
    partly_written = (run / "checkpoints").glob
    killed_while_writing = 0
    for kill in range(KILLS):
        before = checked(run) if (run / "latest").exists() else 0
        # Lines of steps that are done again stand there until the process has really started.
        environment = run / "environment.json"
        began = environment.stat().st_mtime_ns if environment.exists() else None
        target = before + rng.randint(1, 9)

        def arrived(target: int = target, began: int | None = began, environment: Path = environment) -> bool:
            started = environment.exists() and environment.stat().st_mtime_ns != began
            return started and last_logged(run) >= target

        process = start(recipe, run)
        if kill % 2:
            wait_and_kill(process, lambda: any(partly_written(".writing-*")), rng.choice([0.0, 0.002, 0.005]))
        else:
            wait_and_kill(process, arrived, rng.random() * 0.03)
        killed_while_writing += any(partly_written(".writing-*"))
        if (run / "latest").exists():
            assert checked(run) >= before
    assert last_logged(run) < STEPS, "the last kill came too late to matter"
    assert "resuming from" in finish(start(recipe, run))
    return killed_while_writing


def test_a_kill_while_saving_changes_nothing(
    recipe: Path,
    tmp_path: Path,
    call: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
    checked: Callable[[Path], int],
) -> None:
    unknown_classes, killed = tmp_path / "left-alone", tmp_path / "killed"
    shorter = [*SETTINGS, "train.steps=12", "evaluate.every=4"]
    call("train", "-c", recipe, *shorter, "--out", unknown_classes)
    saving = lambda: any((killed / "checkpoints").glob(".writing-*")) and last_logged(killed) >= 4  # noqa: E731
    wait_and_kill(start(recipe, killed, *shorter), saving, 0)
    assert 3 <= checked(killed) <= last_logged(killed) < 12, "the kill came too early or too late to matter"
    assert "resuming from" in call("train", "-c", recipe, *shorter, "--out", killed, "--resume", "auto").out
    assert metrics(killed) == metrics(unknown_classes)
    assert not list((killed / "checkpoints").glob(".*")), "leftovers of the kill are still there"
    weights = Path("checkpoints") / "step-00000012" / "portable" / "model.safetensors"
    assert (killed / weights).read_bytes() == (unknown_classes / weights).read_bytes()


@pytest.mark.slow
def test_ten_kills_change_nothing(
    recipe: Path,
    tmp_path: Path,
    metrics: Callable[[Path], list[dict[str, Any]]],
    checked: Callable[[Path], int],
) -> None:
    unknown_classes, killed = tmp_path / "left-alone", [tmp_path / "killed-1", tmp_path / "killed-2"]
    undisturbed = start(recipe, unknown_classes)
    with ThreadPoolExecutor() as pool:  # five kills each
        chains = [pool.submit(killed_run, recipe, run, seed, checked) for seed, run in enumerate(killed)]
        killed_while_writing = sum(chain.result() for chain in chains)
    assert killed_while_writing, "no kill came while a checkpoint was being written"

    finish(undisturbed)
    expected = metrics(unknown_classes)
    assert [line["step"] for line in expected if "loss" in line] == list(range(1, STEPS + 1))
    assert sum("held_out_loss" in line for line in expected) == STEPS // 20 + 1
    weights = Path("checkpoints") / f"step-{STEPS:08d}" / "portable" / "model.safetensors"
    for run in killed:
        assert metrics(run) == expected
        assert not list((run / "checkpoints").glob(".*")), "leftovers of a kill are still there"
        for name in ("latest", "best"):
            assert (run / name).read_text() == (unknown_classes / name).read_text()
        assert (run / weights).read_bytes() == (unknown_classes / weights).read_bytes()


@pytest.mark.parametrize("kind", ["fp16", "bf16", "recompute"])
def test_stopping_half_way_changes_nothing(
    kind: str,
    recipe: Path,
    tmp_path: Path,
    call: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    """In two halves and in one go, with the kinds of state that the kills above do not have."""
    settings = {
        # A scale that overflows at first and grows every second step: skipped steps and all of the scaler's state.
        "fp16": [
            "precision.compute=fp16",
            "precision.scaler.init=1e12",
            "precision.scaler.backoff=0.01",
            "precision.scaler.window=2",
        ],
        "bf16": ["precision.compute=bf16"],
        "recompute": ["train.recompute=full"],
    }[kind]
    common = ["train", "-c", recipe, *settings, "model.dropout_hidden=0.2", "optim.decay_steps=10"]
    call(*common, "--out", tmp_path / "whole", "train.steps=10")
    call(*common, "--out", tmp_path / "halves", "train.steps=5")
    call(*common, "--out", tmp_path / "halves", "train.steps=10", "--resume", "auto")
    expected = metrics(tmp_path / "whole")
    assert len(expected) == 10
    assert metrics(tmp_path / "halves") == expected
    if kind == "fp16":
        assert expected[-1]["skipped"] > 0
        assert len({line["loss_scale"] for line in expected}) > 3
