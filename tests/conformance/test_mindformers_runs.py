"""MindFormers' run modes and its 13B layout in our own words. Rows of the conformance list: S4-02, S4-05."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main
from gptworks.config import Layout, load
from gptworks.data.prepare import PrepareJob, prepare

TINY = [
    *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=512"),
    *("model.max_positions=32", "data.seq_len=32", "batch.global_size=4", "optim.lr=1e-2", "train.log_every=1"),
    *("run.device=cpu", "train.epochs=1", "data.split=1,0,0"),
]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_s4_02_train_finetune_eval_and_predict(
    corpus_file: Path, small_tokenizer: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = corpus_file.read_text(encoding="utf-8")[:6000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    prepare(
        PrepareJob(
            [str(tmp_path / "text.txt")],
            tmp_path / "rows" / "train",
            small_tokenizer,
            format="mindrecord",
            row_length=33,
        )
    )
    data, out, tuned = f"data.path={tmp_path / 'rows'}", str(tmp_path / "run"), str(tmp_path / "tuned")
    assert main(["train", *TINY, data, "--out", out]) == 0
    assert main(["train", *TINY, data, f"init.checkpoint={out}", "--out", tuned]) == 0
    assert losses(tmp_path / "tuned")[0] < losses(tmp_path / "run")[0] - 0.1
    capsys.readouterr()
    words = [
        "eval",
        "--model",
        tuned,
        "--task",
        "heldout",
        "--split",
        "all",
        "--data",
        str(tmp_path / "rows"),
        "--json",
    ]
    assert main([*words, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["perplexity"] < 512
    prompt = "I love Beijing, because"
    assert main(["generate", "--model", tuned, "--prompt", prompt, "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out.startswith(prompt)


def test_s4_05_the_13b_layout_dry_runs_on_16_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """data_parallel 2 with optimizer_shard is fsdp 2, model_parallel is tp, pipeline_stage pp. 16 real processes:
    tests/distributed/test_layouts.py."""
    layout = ["parallel.fsdp=2", "parallel.zero=1", "parallel.tp=8", "parallel.pp=1"]
    batch = ["batch.global_size=4", "batch.micro_size=2", "data.seq_len=1024", "train.steps=10"]
    assert main(["train", "--preset", "13B", *layout, *batch, "--dry-run", "--world", "16"]) == 0
    shown = capsys.readouterr().out
    assert "fsdp2.tp8: 16 processes" in shown and "12,848,384,000" in shown
    config = load(overrides=[*layout, *batch, "model.num_heads=8", "model.hidden_size=64"])
    assert Layout.from_config(config.parallel).data_parallel == 2
