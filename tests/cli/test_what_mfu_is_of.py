"""A run says what its MFU is a share of, on the screen and in its folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.train import speed
from gptworks.train.speed import Product

BUSY = "the CPU was busy when its speed was measured (our threads had 30% of the time). "
BUSY += "Beside other work fewer threads are often faster: run.threads=1"


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def peak_of(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "environment.json").read_text())["mfu_of"]
    return found


def test_a_measured_peak_is_named_and_kept(
    recipe: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_products", lambda *_: [Product(1e-4, 1.0)])
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "train.steps=1")
    assert "\nMFU: of 21.47 TFLOP/s, a product of fp32 measured here\n" in done.out
    assert "  MFU 0%  ETA" in done.out
    assert peak_of(tmp_path / "run") == {"flops": 2 * 1024**3 / 1e-4, "source": "a product of fp32 measured here"}
    assert 0 <= lines_of(tmp_path / "run")[0]["mfu"] < 0.01


def test_on_a_busy_cpu_there_is_a_dash_and_no_number(
    recipe: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_products", lambda *_: [Product(1e-4, 0.3)])
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "train.steps=1")
    assert f"\nMFU is not shown: {BUSY}\n" in done.out
    assert "  MFU -  ETA" in done.out
    assert peak_of(tmp_path / "run") == {"flops": None, "source": BUSY}
    assert all("mfu" not in line for line in lines_of(tmp_path / "run"))


def test_a_peak_that_the_model_beats_is_given_up_aloud(
    recipe: Path, call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "_products", lambda *_: [Product(1e9, 1.0)])
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "train.steps=2")
    assert done.out.count("MFU is not shown: the model does ") == 1
    assert "\nstep 1: MFU is not shown: the model does " in done.out and "  MFU -  ETA" in done.out
    assert all("mfu" not in line for line in lines_of(tmp_path / "run"))


def test_the_lines_of_fleetx_stay_as_they_are(recipe: Path, call: Callable[..., Any], tmp_path: Path) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "train.steps=1", "train.log_style=fleetx")
    assert "MFU" not in done.out
