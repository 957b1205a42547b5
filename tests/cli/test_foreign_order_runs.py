"""A run in the order of another system: it resumes to the same losses, for the number of samples it began with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.data.foreign_order import ORDERS
from gptworks.data.store import Store

SETTINGS = ["evaluate.every=4", "evaluate.batches=3", "model.dropout_hidden=0.1", "optim.decay_steps=10"]


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_in_two_parts_is_a_run(
    order: str,
    recipe: Path,
    tmp_path: Path,
    call: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    common = ["train", "-c", recipe, f"data.order={order}", *SETTINGS, "train.steps=10"]
    call(*common, "--out", tmp_path / "whole")
    done = call(*common, "--out", tmp_path / "again")
    assert f"samples as {ORDERS[order]} would lay out 40" in done.out
    middle = tmp_path / "again" / "checkpoints" / "step-00000008"
    assert json.loads((middle / "manifest.json").read_text())["samples_asked"] == 40
    call(*common, "--out", tmp_path / "again", "--resume", middle)
    expected = metrics(tmp_path / "whole")
    assert sum("held_out_loss" in line for line in expected) == 3
    assert metrics(tmp_path / "again") == expected


def test_the_orders_differ(
    recipe: Path, tmp_path: Path, call: Callable[..., Any], metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    losses = set()
    for order in ("shuffled", "sequential", *ORDERS):
        call("train", "-c", recipe, "--out", tmp_path / order, f"data.order={order}", "train.steps=1")
        losses.add(metrics(tmp_path / order)[0]["loss"])
    assert len(losses) == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        (["train.steps=11"], "44"),
        (["train.steps=5"], "20"),
        (["batch.global_size=8"], "48"),
        # as many samples in all, but two batches of 4 are read already
        (["batch.global_size=2", "train.steps=12"], "28 in all"),
        (["batch.global_size=12", "train.steps=2"], None),
        (["batch.micro_size=1"], None),
    ],
)
def test_another_number_of_samples_is_refused(
    changes: list[str], asks: str | None, recipe: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    common = ["train", "-c", recipe, "--out", tmp_path / "run", "data.order=megatron", "train.steps=6"]
    call(*common, "checkpoint.portable=false")
    middle = tmp_path / "run" / "checkpoints" / "step-00000002"
    done = call(*common, *changes, "--resume", middle, expect=2 if asks else 0)
    if asks:
        assert (
            f"{middle}: the order of samples (data.order: megatron) was laid out for 24, but this run asks for {asks} ("
            in done.err
        )
        assert "set train.steps (or epochs, tokens) and batch.global_size back" in done.err
    else:
        assert "resuming from" in done.out


def test_our_own_orders_go_on_with_any_number(finished: Path, recipe: Path, call: Callable[..., Any]) -> None:
    manifest = json.loads((finished / "checkpoints" / "step-00000006" / "manifest.json").read_text())
    assert manifest["samples_asked"] is None
    call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=7", "batch.global_size=8")


def test_the_end_in_epochs(recipe: Path, small_store: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    starts = Store(small_store).document_starts
    per_epoch = int(starts[144] - 1) // 16
    end = ["train.steps=0", "train.epochs=0.02", "data.order=paddle"]
    call("train", "-c", recipe, "--out", tmp_path / "run", *end)
    last = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    asked = json.loads((last / "manifest.json").read_text())["samples_asked"]
    assert asked == int(0.02 * per_epoch / 4) * 4 > 4


def test_several_stores_without_weights_do_not_last(
    recipe: Path, small_store: Path, tmp_path: Path, call: Callable[..., Any]
) -> None:
    common = ["train", "-c", recipe, "--out", tmp_path / "run", "data.order=megatron"]
    both = f"data.path=[{small_store}, {small_store}]"
    refused = call(*common, both, "train.steps=1000000", expect=2).err
    assert "data.weights: not set" in refused and "asks for 4,000,000" in refused
    assert not (tmp_path / "run").exists()
    call(*common, both, "data.weights=[1, 3]", "train.steps=2")
