"""gptworks convert and inspect on checkpoints, as typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.checkpoint.systems import registry
from gptworks.cli import options
from gptworks.data.formats.registry import FORMATS


def gptworks(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "gptworks", *map(str, args)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("convert") / "gpt2-tiny"
    GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=16, n_embd=24, n_layer=2, n_head=4)).save_pretrained(path)
    return path


def test_options_name_every_format() -> None:
    assert options.WEIGHT_FORMATS.replace(" or ", ", ").split(", ") == list(registry.NAMES)
    assert set(options.DATASET_FORMATS.replace(" or ", ", ").split(", ")) == set(FORMATS)


def test_a_checkpoint_is_inspected(source: Path) -> None:
    done = gptworks("inspect", source)
    assert done.returncode == 0, done.stderr
    assert f"{source}: hf (Hugging Face GPT-2 folder)" in done.stdout
    assert "2 layers of 24, 4 heads, feed-forward 96, 48 words, 16 positions, head tied" in done.stdout
    assert "blocks.{0..1}.attn.qkv.weight" in done.stdout
    assert json.loads(gptworks("inspect", source, "--json").stdout)["model"]["num_heads"] == 4


def test_a_checkpoint_is_converted(source: Path, tmp_path: Path) -> None:
    done = gptworks("convert", source, tmp_path / "out", "--to", "hf", "--verify", "-o", "model.vocab_size=64")
    assert done.returncode == 0, done.stderr
    assert "28 tensors; 2 x 24, 4 heads, 64 words" in done.stdout
    assert "note: vocabulary: 48 -> 64 rows, 16 added" in done.stdout
    assert "verified: 28 of 28 tensors equal to the bit; largest difference of logits 0" in done.stdout
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
def test_mistakes(args: list[str], said: str, source: Path, tmp_path: Path) -> None:
    done = gptworks("convert", source, tmp_path / "out", *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
