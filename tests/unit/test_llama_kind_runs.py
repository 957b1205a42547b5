"""A run of Llama's kind: stopped and gone on with, to the bit; what the folder of an earlier version does not say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks.config import from_dict
from gptworks.config.schema import RunConfig
from gptworks.errors import DamagedCheckpoint
from gptworks.train.loop import train
from gptworks.train.resume import changes

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
    "max_positions": 24,
    "norm": "rmsnorm",
    "positions": "rope",
    "mlp": "swiglu",
    "bias": "none",
    "qk_norm": True,
    "sliding_window": 9,
    "dropout_hidden": 0.1,
}


def config(store: Path, out: Path, steps: int, **train_more: Any) -> RunConfig:
    return from_dict(
        {
            "model": LLAMA,
            "data": {"path": str(store), "split": "1,0,0", "reset_attention": True, "reset_positions": True},
            "batch": {"global_size": 4, "micro_size": 2},
            "optim": {"lr": 3e-3, "decay_steps": 6},
            "train": {"steps": steps, "log_every": 1, **train_more},
            "run": {"out": str(out), "device": "cpu"},
        }
    )


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_gone_on_with_to_the_bit(recompute: str, small_store: Path, tmp_path: Path) -> None:
    train(config(small_store, tmp_path / "whole", 6, recompute=recompute))
    train(config(small_store, tmp_path / "parts", 3, recompute=recompute))
    train(config(small_store, tmp_path / "parts", 6, recompute=recompute), resume_from="auto")
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole") and len(losses(tmp_path / "whole")) == 6
    whole, parts = (gptworks.GPT.from_pretrained(tmp_path / name) for name in ("whole", "parts"))
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_keys_that_came_later_are_not_changes(small_store: Path, tmp_path: Path) -> None:
    """A checkpoint of a version that knew GPT-2 only says nothing about norms and positions."""
    plain = {key: LLAMA[key] for key in ("num_layers", "hidden_size", "num_heads", "vocab_size", "max_positions")}
    now = from_dict({"model": plain, "train": {"steps": 1}})
    before = now.model_dump(mode="json")
    before["model"] = {key: before["model"][key] for key in (*plain, "ffn_size", "tied", "gelu")}
    assert changes(before, now) == []
    other = from_dict({"model": {**plain, "norm": "rmsnorm", "num_kv_heads": 2}, "train": {"steps": 1}})
    assert [str(each) for each in changes(before, other)] == [
        "model.norm: layernorm -> rmsnorm",
        "model.num_kv_heads: 4 -> 2",
    ]


@pytest.mark.parametrize("model", [{"num_layers": "many"}, {"layers": 2}, {"num_heads": 5, "hidden_size": 16}])
def test_a_manifest_whose_model_is_none_is_damaged(model: dict[str, Any]) -> None:
    """So that `--resume auto` goes back to the checkpoint before."""
    now = from_dict({"model": {key: LLAMA[key] for key in ("num_layers", "vocab_size")}, "train": {"steps": 1}})
    with pytest.raises(DamagedCheckpoint, match=f"the manifest's config.model is no.*{next(iter(model))}"):
        changes({**now.model_dump(mode="json"), "model": model}, now)
