"""data.stages in runs: resumed in the middle of one, with one more later, and data.weights that change on the way."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.checkpoint import manifest as manifests

Call = Callable[..., Any]
# Steps of 4 samples of 16 tokens: the second stage begins with sample 10, in the middle of the third step.
STAGES = "{from_tokens: 0, to_tokens: 160, weights: [3, 1]}, {from_tokens: 160, to_tokens: 384, weights: [1, 3]}"


@pytest.fixture
def train(recipe: Path, small_store: Path, tmp_path: Path, call: Call) -> Call:
    second = tmp_path / "second"
    for file in small_store.parent.glob(f"{small_store.name}*"):
        if not (tmp_path / file.name.replace("small", "second", 1)).exists():
            shutil.copy(file, tmp_path / file.name.replace("small", "second", 1))

    def run(out: str, *more: str, expect: int = 0) -> Any:
        paths = f"data.path=[{small_store}, {second}]"
        return call("train", "-c", recipe, "--out", tmp_path / out, paths, "optim.decay_steps=6", *more, expect=expect)

    return run


def last(run: Path, step: int = 6) -> manifests.Manifest:
    return manifests.read(run / "checkpoints" / f"step-{step:08d}")


def weights(manifest: manifests.Manifest) -> dict[str, str]:
    return {name: entry["sha256"] for name, entry in manifest.files.items() if name.startswith("portable/")}


def test_a_run_is_resumed_in_the_middle_of_a_stage(train: Call, tmp_path: Path, metrics: Call) -> None:
    train("whole", f"data.stages=[{STAGES}]")
    for steps in ("2", "4"):
        train(
            "parts", f"data.stages=[{STAGES}]", f"train.steps={steps}", *(["--resume", "auto"] if steps == "4" else [])
        )
    train("parts", f"data.stages=[{STAGES}]", "--resume", "auto")
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert weights(last(tmp_path / "parts")) == weights(last(tmp_path / "whole"))
    assert last(tmp_path / "whole").stages == [[0, [3.0, 1.0]], [10, [1.0, 3.0]]]
    assert last(tmp_path / "whole", 2).stages == [[0, [3.0, 1.0]]]


def test_a_stage_is_added_later(train: Call, tmp_path: Path, metrics: Call) -> None:
    only = "{from_tokens: 0, to_tokens: 160, weights: [3, 1]}"
    done = train("early", f"data.stages=[{only}]", expect=2)
    assert "data.stages: the last one ends at 160 tokens, but training goes on to 384" in done.err
    train("early", f"data.stages=[{only}]", "train.steps=2")
    train("early", f"data.stages=[{STAGES}]", "--resume", "auto")
    train("whole", f"data.stages=[{STAGES}]")
    assert metrics(tmp_path / "early") == metrics(tmp_path / "whole")

    moved = STAGES.replace("160", "64")
    done = train("early", f"data.stages=[{moved}]", "--resume", "auto", expect=2)
    assert "its samples up to number 24 had the weights 3, 1 from sample 0 on; 1, 3 from sample 10 on" in done.err


@pytest.mark.slow
def test_weights_change_from_the_next_sample_on_and_that_is_recorded(
    train: Call, tmp_path: Path, metrics: Call
) -> None:
    train("changed", "data.weights=[3, 1]", "train.steps=2")
    done = train("changed", "data.weights=[1, 3]", "train.steps=4", "--resume", "auto")
    assert "weights of the stores change from sample 8 on" in done.out
    done = train("changed", "data.weights=[1, 3]", "--resume", "auto")
    assert "weights of the stores change" not in done.out
    assert last(tmp_path / "changed").stages == [[0, [3.0, 1.0]], [8, [1.0, 3.0]]]
    # The same as stages that were known from the start.
    known = STAGES.replace("160", "128")
    train("known", f"data.stages=[{known}]")
    assert [line["loss"] for line in metrics(tmp_path / "changed")] == [
        line["loss"] for line in metrics(tmp_path / "known")
    ]
    done = train("changed", "train.steps=8", "--resume", "auto", expect=2)
    assert "with weights or without any" in done.err


def test_another_system_has_one_set_of_weights(train: Call) -> None:
    done = train("never", f"data.stages=[{STAGES}]", "data.order=megatron", expect=2)
    assert "data.stages: given, but data.order: megatron mixes stores as another system does" in done.err
