"""SmolLM2-135M goes on training on tinyshakespeare: the losses of transformers, step by step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_model_places import CORPORA, needed

from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.load import from_dict
from gptworks.train.loop import train

pytestmark = pytest.mark.real_models

STEPS, ROWS, LENGTH, RATE = 10, 2, 128, 1e-4

TUNED = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, rows, rate = sys.argv[1], json.load(open(sys.argv[2])), float(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
decayed = [p for p in model.parameters() if p.ndim == 2]
others = [p for p in model.parameters() if p.ndim != 2]
groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), eps=1e-8)
losses = []
for batch in rows:
    ids = torch.tensor(batch)
    logits = model(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    losses.append(float(loss))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
print(json.dumps(losses))
"""


def test_losses_of_ten_steps(smollm2_folder: Path, peer: Callable[..., Any], tmp_path: Path) -> None:
    text = needed(CORPORA / "tinyshakespeare" / "input.txt").read_text(encoding="utf-8")[:40_000]
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    store = tmp_path / "store"
    command = ["prepare", tmp_path / "text.txt", "--tokenizer", smollm2_folder, "--out", store]
    assert main([*map(str, command)]) == 0
    cfg = from_dict(
        {
            "model": huggingface.read_config(smollm2_folder).model_dump(),
            "init": {"checkpoint": str(smollm2_folder)},
            "data": {"path": str(store), "seq_len": LENGTH, "order": "sequential", "split": "1,0,0"},
            "batch": {"global_size": ROWS, "micro_size": ROWS},
            "optim": {"lr": RATE, "schedule": "constant", "weight_decay": 0.1, "clip": 1.0},
            "train": {"steps": STEPS, "log_every": 1},
            "checkpoint": {"portable": False},
            "run": {"out": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    run = train(cfg).folder
    ours = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = np.fromfile(store.with_suffix(".bin"), dtype=np.uint16).astype(np.int64)
    starts = LENGTH * np.arange(STEPS * ROWS).reshape(STEPS, ROWS)
    batches = [[tokens[start : start + LENGTH + 1].tolist() for start in row] for row in starts.tolist()]
    (tmp_path / "rows.json").write_text(json.dumps(batches))
    theirs = peer(TUNED, smollm2_folder, tmp_path / "rows.json", RATE)
    assert len(ours) == STEPS and np.abs(np.array(ours) - np.array(theirs)).max() < 1e-4
    assert theirs[-1] < theirs[0]
