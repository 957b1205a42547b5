"""OneFlow's training command in our own words. Rows of the conformance list: S1-05, S1-06, S1-07."""

import json
from pathlib import Path

import pytest
import torch

from gptworks.cli.main import main

# Every flag of the document's command that says something about the training, and the sizes small.
COMMAND = [
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=4", "model.vocab_size=512"),
    *("model.gelu=erf", "data.seq_len=32", "model.max_positions=32", "data.split=949,50,1", "data.order=oneflow"),
    *("batch.micro_size=4", "batch.global_size=8", "optim.lr=0.00015", "optim.min_lr=1.0e-5", "optim.schedule=cosine"),
    *("optim.decay_steps=320000", "optim.warmup_steps=3200", "optim.warmup_from=0", "optim.cosine_clock=from_start"),
    *("optim.weight_decay=0.01", "optim.clip=1.0", "train.recompute=full", "precision.compute=fp16"),
    *("precision.scaler.init=65536", "run.device=cpu", "train.seed=12345", "evaluate.every=0"),
]


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def checkpoint(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`--load checkpoint --save checkpoint`, which is not there at first: two times, the second with more steps."""
    out, threads = tmp_path_factory.mktemp("oneflow") / "checkpoint", torch.get_num_threads()
    often = ["train.log_every=2", "checkpoint.every=3", "checkpoint.keep_last=9", "--resume", "auto"]
    for steps in (6, 9):
        order = "data.order=shuffled"  # OneFlow's own is laid out for one number of steps
        words = [*COMMAND, order, f"data.path={small_store}", f"train.steps={steps}", *often, "--out", str(out)]
        assert main(["train", *words]) == 0
    torch.set_num_threads(threads)
    return out


def test_s1_05_the_whole_command_runs(small_store: Path, tmp_path: Path) -> None:
    words = [*COMMAND, f"data.path={small_store}", "train.steps=3", "train.log_every=1", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    assert [line["lr"] for line in lines(tmp_path / "run")] == pytest.approx([0, 0.00015 / 3200, 2 * 0.00015 / 3200])


def test_s1_06_load_save_and_how_often(checkpoint: Path) -> None:
    assert [line["step"] for line in lines(checkpoint)] == [2, 4, 6, 8, 9]
    steps = sorted(path.name for path in (checkpoint / "checkpoints").glob("step-*"))
    assert steps == ["step-00000003", "step-00000006", "step-00000009"]


def test_s1_07_recomputing_and_the_loss_scale(checkpoint: Path, small_store: Path, tmp_path: Path) -> None:
    """fp16 with the scale that was asked for; nothing recomputed gives the same losses."""
    assert {line["loss_scale"] for line in lines(checkpoint)} == {65536.0}
    kept = ["data.order=shuffled", "train.recompute=none", "train.log_every=2", "train.steps=6"]
    words = [*COMMAND, *kept, f"data.path={small_store}", "--out", str(tmp_path / "run")]
    assert main(["train", *words]) == 0
    assert [line["loss"] for line in lines(tmp_path / "run")] == [line["loss"] for line in lines(checkpoint)[:3]]
