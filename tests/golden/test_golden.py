"""A refactor gives identical output: twenty losses and two continuations, recorded in tiny_run.json.

Text, vocabulary, weights and order of samples are all functions of what is committed here. When a change of the numbers
is meant, say so in CHANGELOG.md and record them again:

    .venv/bin/python tests/golden/test_golden.py
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config import from_dict
from gptworks.data import corpus, prepare
from gptworks.generate.engine import generate
from gptworks.train.loop import train

RECORD = Path(__file__).parent / "tiny_run.json"
CORPUS = Path(__file__).parent.parent / "fixtures" / "corpus.txt"
PROMPT = "On Sunday morning Anna walked to"


def tiny_run(folder: Path) -> dict[str, Any]:
    """Prepare, train, evaluate and generate, as a user does."""
    rules = corpus.TextRules(keep_separator=False)
    tokenizer = prepare.train_tokenizer([str(CORPUS)], 400, rules)
    prepare.prepare(prepare.PrepareJob([str(CORPUS)], folder / "store", tokenizer, rules=rules, append_eod=True))
    cfg = from_dict(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 400, "max_positions": 64},
            "data": {"path": str(folder / "store"), "split": "150,10,0", "mask_eod": True, "reset_attention": True},
            "batch": {"global_size": 8, "micro_size": 4},
            "optim": {"lr": 6e-3, "min_lr": 6e-4, "warmup_steps": 4},
            "train": {"steps": 20, "log_every": 1},
            "evaluate": {"every": 10, "batches": 0},
            "run": {"out": str(folder / "run"), "device": "cpu"},
        }
    )
    train(cfg)
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    model = PretrainedGPT.from_pretrained(folder / "run")
    return {
        "losses": [line["loss"] for line in lines if "loss" in line],
        "grad_norms": [line["grad_norm"] for line in lines if "grad_norm" in line],
        "held_out_losses": [line["held_out_loss"] for line in lines if "held_out_loss" in line],
        "greedy": generate(model, PROMPT, strategy="greedy", max_new_tokens=24)[0],
        "sampled": generate(model, PROMPT, seed=1, top_k=40, temperature=0.8, max_new_tokens=24)[0],
    }


def test_the_recorded_run(tmp_path: Path) -> None:
    recorded, now = json.loads(RECORD.read_text(encoding="utf-8")), tiny_run(tmp_path)
    assert len(recorded["losses"]) == 20 and len(recorded["held_out_losses"]) == 2
    assert now["losses"] == pytest.approx(recorded["losses"], abs=1e-4)
    assert now["grad_norms"] == pytest.approx(recorded["grad_norms"], rel=1e-3)
    assert now["held_out_losses"] == pytest.approx(recorded["held_out_losses"], abs=1e-4)
    assert (now["greedy"], now["sampled"]) == (recorded["greedy"], recorded["sampled"])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        found = tiny_run(Path(temporary))
    for name in ("losses", "grad_norms", "held_out_losses"):
        found[name] = [round(value, 6) for value in found[name]]
    RECORD.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"recorded in {RECORD}")
