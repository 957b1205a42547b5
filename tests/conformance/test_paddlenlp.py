"""PaddleNLP's training command in our own words. Row of the conformance list: S2-04."""

import json
from pathlib import Path

import pytest

from gptworks.cli.main import main

FLAGS = [
    *("optim.weight_decay=0.01", "optim.clip=1.0", "optim.decay_steps=320000", "optim.warmup_steps=3200"),
    *("batch.micro_size=4", "batch.global_size=4", "checkpoint.every=100000", "run.device=cpu", "train.steps=4"),
    *("optim.lr=1e-2", "train.log_every=1", "data.seq_len=32", "data.order=paddle", "evaluate.every=0"),
]
SMALL = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=512"]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_s2_04_fresh_weights_of_a_preset_and_those_of_a_folder(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A preset is a shape, with fresh weights; a folder is trained further, and says its shape itself."""
    data = f"data.path={small_store}"
    first = ["train", "--preset", "gpt2", *SMALL, "model.max_positions=32", *FLAGS, data, "optim.warmup_steps=2"]
    assert main([*first, "--out", str(tmp_path / "first")]) == 0
    further = ["train", *FLAGS, data, f"init.checkpoint={tmp_path / 'first'}", "optim.lr=0"]
    assert main([*further, "--out", str(tmp_path / "further")]) == 0
    fresh, trained = losses(tmp_path / "first"), losses(tmp_path / "further")
    assert len(fresh) == len(trained) == 4 and trained[0] < fresh[0] - 0.05
    capsys.readouterr()
    assert main([*first, "batch.mirco_size=4", "--out", str(tmp_path / "never")]) == 2
    assert "batch.mirco_size: unknown key; did you mean 'micro_size'?" in capsys.readouterr().err
    assert main(["train", "--preset", "gpt5", "--out", str(tmp_path / "never")]) == 2
