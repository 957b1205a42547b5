"""gptworks convert and inspect on checkpoints, as typed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.checkpoint.systems import registry
from gptworks.cli import options
from gptworks.data.formats.registry import FORMATS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("convert") / "gpt2-tiny"
    GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=16, n_embd=24, n_layer=2, n_head=4)).save_pretrained(path)
    return path


def test_options_name_every_format() -> None:
    assert options.WEIGHT_FORMATS.replace(" or ", ", ").split(", ") == list(registry.NAMES)
    assert set(options.DATASET_FORMATS.replace(" or ", ", ").split(", ")) == set(FORMATS)


def test_a_checkpoint_is_inspected(source: Path, call: Callable[..., Any]) -> None:
    out = call("inspect", source).out
    assert f"{source}: hf (Hugging Face GPT-2 folder)" in out
    assert "2 layers of 24, 4 heads, feed-forward 96, 48 words, 16 positions, head tied" in out
    assert "blocks.{0..1}.attn.qkv.weight" in out
    assert json.loads(call("inspect", source, "--json").out)["model"]["num_heads"] == 4


def test_a_checkpoint_is_converted(source: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    out = call("convert", source, tmp_path / "out", "--to", "hf", "--verify", "-o", "model.vocab_size=64").out
    assert "28 tensors; 2 x 24, 4 heads, 64 words" in out
    assert "note: vocabulary: 48 -> 64 rows, 16 added" in out
    assert "verified: 28 of 28 tensors equal to the bit; largest difference of logits 0" in out
    assert (tmp_path / "out" / "certificate.json").is_file()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--to", "nonsense"], "'nonsense' is no format of checkpoints"),
        (["--to", "hf", "--tp", "2"], "keeps a model in one piece"),
        (["--to", "hf", "--tp", "0"], "--tp: got 0; needs 1 or more"),
        (["--to", "hf", "--row-length", "5"], "the option is for datasets"),
        (["--to", "hf", "-o", "optim.lr=3"], "-o optim.lr=3: needed model.KEY=VALUE"),
        (["--to", "hf", "-o", "model.heads=3"], "-o model.heads=3: needed model.KEY=VALUE"),
    ],
)
def test_mistakes(args: list[str], said: str, source: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    done = call("convert", source, tmp_path / "out", *args, expect=2)
    assert said in done.err
    assert "Traceback" not in done.err
    assert list(tmp_path.iterdir()) == []
