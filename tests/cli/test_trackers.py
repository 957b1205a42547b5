"""run.track: TensorBoard, and what happens when a program that follows a run is unknown, missing or fails."""

import json
from collections.abc import Callable, Mapping
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from gptworks import config
from gptworks.errors import TrainingError
from gptworks.train import trackers

Call = Callable[..., Any]


def scalars(run: Path) -> dict[str, dict[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    found.Reload()
    return {name: {each.step: each.value for each in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboard_goes_on_where_the_run_goes_on(recipe: Path, tmp_path: Path, call: Call) -> None:
    run = tmp_path / "run"
    same = ["optim.decay_steps=6", "run.track=tensorboard"]
    call("train", "-c", recipe, "--out", run, "train.steps=4", "checkpoint.every=3", *same)
    call("train", "-c", recipe, "--out", run, *same, "--resume", run / "checkpoints" / "step-00000003")
    found = scalars(run)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found["loss"] == pytest.approx({line["step"]: line["loss"] for line in lines}, rel=1e-6)
    assert list(found["loss"]) == [1, 2, 3, 4, 5, 6]


class Followed:
    """A program that falls over at a step."""

    name = "trackio"
    told: list[int]

    def __init__(self, begun: trackers.Begun) -> None:
        begun.ids.setdefault(self.name, "an id")
        self.begun, self.told = begun, []
        Followed.last = self  # type: ignore[attr-defined]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            raise ConnectionError("no route\nto the host")
        self.told.append(step)

    def rewind(self, step: int) -> None: ...

    def close(self) -> None:
        raise AssertionError("it has been left alone")


@pytest.fixture
def is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: util.find_spec("json"))


@pytest.mark.usefixtures("is_installed")
def test_one_that_fails_in_the_middle_is_left_alone_and_that_is_said_once(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch, metrics: Call, finished: Path
) -> None:
    monkeypatch.setitem(trackers.ADAPTERS, "trackio", Followed)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "run.track=trackio", "run.project=mine")
    assert (
        done.out.count("run.track: trackio failed and gets nothing more from this run: ConnectionError: no route") == 1
    )
    followed = Followed.last  # type: ignore[attr-defined]
    assert followed.told == [1, 2]
    assert metrics(tmp_path / "run") == metrics(finished), "training is as without it"
    assert followed.begun.project == "mine" and followed.begun.config["train"]["steps"] == 6
    assert followed.begun.environment["python"], "the machine goes along"
    assert json.loads((tmp_path / "run" / "trackers.json").read_text()) == {"trackio": "an id"}


@pytest.mark.usefixtures("is_installed")
def test_one_that_cannot_begin_is_told_before_the_first_step(recipe, tmp_path: Path, call: Call, monkeypatch) -> None:
    def broken(begun: trackers.Begun) -> trackers.Tracker:
        raise PermissionError("no key")

    monkeypatch.setitem(trackers.ADAPTERS, "wandb", broken)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "run.track=[wandb]", expect=2)
    assert "run.track: wandb could not begin: PermissionError: no key." in done.err


@pytest.mark.usefixtures("is_installed")
@pytest.mark.parametrize("content", [b"\xff", b"[]", b'{"trackio": 1}', b"[" * 100_000])
def test_names_there_that_cannot_be_read(
    content: bytes, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run would begin there, beside the first half of this one."""
    monkeypatch.setitem(trackers.ADAPTERS, "trackio", Followed)
    (tmp_path / "trackers.json").write_bytes(content)
    (tmp_path / "environment.json").write_bytes(content.replace(b"{", b"["))
    with pytest.raises(TrainingError, match=r"trackers\.json: holds no names of runs") as error:
        trackers.begin(config.load(recipe, overrides=["run.track=trackio"]), tmp_path, 3)
    assert "Remove it" in str(error.value)
    (tmp_path / "trackers.json").unlink()
    (followed,) = trackers.begin(config.load(recipe, overrides=["run.track=trackio"]), tmp_path, 3)
    assert followed.begun.environment == {}  # type: ignore[attr-defined]


def test_unknown_and_missing_ones_are_refused(recipe: Path, tmp_path: Path, call: Call, monkeypatch) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "run.track=[comet]", expect=2)
    assert "run.track" in done.err and "comet" in done.err and "mlflow" in done.err
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "run.track=[mlflow]", expect=2)
    assert "run.track: mlflow is not installed. Install it: pip install mlflow" in done.err
    assert not (tmp_path / "run").exists()
