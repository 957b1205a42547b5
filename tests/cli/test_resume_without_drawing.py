"""What a checkpoint fills is not drawn before: for a large model that would take minutes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.parallel import build


def test_a_run_that_resumes_draws_no_weight(
    recipe: Path,
    call: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call("train", "-c", recipe, "--out", tmp_path / "alone", "train.steps=8", "optim.decay_steps=6")
    call("train", "-c", recipe, "--out", tmp_path / "stopped", "train.steps=4", "optim.decay_steps=6")

    def refuse(name: str, *_: object) -> None:
        raise AssertionError(f"{name} was drawn")

    monkeypatch.setattr(build, "draw", refuse)
    call(
        "train", "-c", recipe, "--out", tmp_path / "stopped", "--resume", "auto", "train.steps=8", "optim.decay_steps=6"
    )
    assert metrics(tmp_path / "stopped") == metrics(tmp_path / "alone")
    with pytest.raises(AssertionError, match=r"wte.weight was drawn"):
        call("train", "-c", recipe, "--out", tmp_path / "fresh")
