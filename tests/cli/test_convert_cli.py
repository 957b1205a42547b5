"""gptworks convert and inspect on checkpoints, as typed."""

import json
import shutil
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
    assert f"{source}: hf (Hugging Face folder (" in out
    assert "2 layers of 24, 4 heads, feed-forward 96, vocabulary 48, 16 positions, head tied" in out
    assert "blocks.{0..1}.attn.qkv.weight" in out
    assert json.loads(call("inspect", source, "--json").out)["model"]["num_heads"] == 4


def test_a_checkpoint_is_converted(source: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    out = call("convert", source, tmp_path / "out", "--to", "hf", "--verify", "-o", "model.vocab_size=64").out
    assert "28 tensors; 2 x 24, 4 heads, vocabulary 64" in out
    assert "note: vocabulary: 48 -> 64 rows, 16 added" in out
    assert "verified: 28 of 28 tensors equal to the bit; largest difference of logits 0" in out
    assert (tmp_path / "out" / "certificate.json").is_file()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--to", "nonsense"], "'nonsense' is not a format of checkpoints"),
        (["--to", "hf", "--from", "tnt"], "hf is a format of checkpoints, and tnt one of datasets"),
        (["--to", "hf", "-o", "model.num_heads=2", "--verify"], "says that there are 4 heads"),
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


@pytest.mark.parametrize("to", ["hf", "mindspore", "gguf"])
def test_weights_that_are_not_here(to: str, tmp_path: Path, call: Callable[..., Any], monkeypatch: Any) -> None:
    """The format says that weights are meant; the message says what to do about them."""
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    said = call("convert", "nowhere", tmp_path / "out", "--to", to, expect=2).err
    assert "nowhere: no such folder. Needed: a run folder of gptworks, a Hugging Face GPT-2 folder" in said
    said = call("convert", "gpt2-xl", tmp_path / "out", "--to", to, expect=2).err
    assert "gpt2-xl: these weights are not on this machine" in said and "config.json and model.safetensors" in said
    assert "not on this machine" in call("inspect", "gpt2-xl", "--from", "hf", expect=2).err


def test_s4_10_a_file_of_weights_is_converted(source: Path, tmp_path: Path, call: Callable[..., Any]) -> None:
    """`pytorch_model.bin`, with the config.json beside it and without."""
    model = GPT2LMHeadModel.from_pretrained(source)
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        torch.save(model.state_dict(), tmp_path / name / "pytorch_model.bin")
    shutil.copy(source / "config.json", tmp_path / "with")
    file, alone = (tmp_path / name / "pytorch_model.bin" for name in ("with", "without"))
    first, second = tmp_path / "a.ckpt", tmp_path / "b.ckpt"
    for more in ([], ["--from", "hf"]):
        out = call("convert", file, first, "--to", "mindspore", "--verify", *more).out
        assert "28 of 28 tensors equal to the bit" in out
        said = call("convert", alone, second, "--to", "mindspore", *more, expect=2).err
        assert "Give it with -o model.num_heads=N" in said
        call("convert", alone, second, "--to", "mindspore", "-o", "model.num_heads=4", *more)
        assert first.read_bytes() == second.read_bytes()
        first.unlink()
        Path(f"{first}.certificate.json").unlink()
        second.unlink()
    assert "2 layers of 24, 4 heads" in call("inspect", source / "model.safetensors").out
    assert "2 layers of 24, heads not stored" in call("inspect", alone).out
    assert "2 layers of 24, 4 heads" in call("inspect", alone, "-o", "model.num_heads=4").out


def test_a_file_of_a_checkpoint_in_several_stands_for_all(source: Path, tmp_path: Path, call: Any) -> None:
    GPT2LMHeadModel.from_pretrained(source).save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    file = sorted((tmp_path / "parts").glob("model-*.safetensors"))[1]
    out = call("convert", file, tmp_path / "out", "--to", "hf", "--verify", "--from", "hf").out
    assert "28 of 28 tensors equal to the bit" in out


def test_options_of_the_other_kind_are_refused(source: Path, small_store: Path, call: Callable[..., Any]) -> None:
    assert "--tokenizer: " in call("inspect", source, "--tokenizer", "gpt2", expect=2).err
    assert "-o is for checkpoints" in call("inspect", small_store, "-o", "model.num_heads=2", expect=2).err
    assert "--from nanogpt, but it is of format megatron" in call(
        "inspect", small_store, "--from", "nanogpt", expect=2
    ).err  # fmt: skip
    assert "documents" in call("inspect", small_store, "--from", "megatron").out


def test_a_file_without_a_tokenizer_says_so(
    source: Path, tmp_path: Path, small_tokenizer: Any, call: Callable[..., Any]
) -> None:
    shutil.copytree(source, tmp_path / "hf")
    small_tokenizer.save(tmp_path / "hf")
    (tmp_path / "hf" / "added_tokens.json").write_text("{}")
    out = call("convert", tmp_path / "hf", tmp_path / "x.ckpt", "--to", "mindspore").out
    assert f"note: mindspore is one file without a tokenizer: copy that in {tmp_path / 'hf'} beside it" in out
    for to in ("megatron", "oneflow", "fleetx", "paddlenlp"):
        out = call("convert", tmp_path / "hf", tmp_path / to, "--to", to).out
        assert "tokenizer" not in out.replace("tokenizer.json", "").replace("tokenizer_config.json", "")
        found = registry.open_any(tmp_path / to, {"num_heads": 4}).open_tokenizer()
        assert found is not None and found.identity == small_tokenizer.identity
        assert (tmp_path / to / "added_tokens.json").is_file()
    for to, name in (("mindspore", "y.ckpt"), ("nanogpt", "ckpt.pt"), ("llmc", "gpt2.bin")):
        more = ["-o", "model.gelu=tanh"]
        call("convert", tmp_path / "hf", tmp_path / "files" / name, "--to", to, *more)
        small_tokenizer.save(tmp_path / "files")
        found = registry.open_any(tmp_path / "files" / name, {"num_heads": 4}).open_tokenizer()
        assert found is not None and found.identity == small_tokenizer.identity


def test_fine_tuning_from_a_file_that_lacks_the_heads(
    recipe: Path, finished: Path, tmp_path: Path, call: Callable[..., Any], metrics: Any
) -> None:
    """W-04, S4-10: a MindSpore .ckpt as init.checkpoint. Its first loss is that of the run it was converted from."""
    call("convert", finished, tmp_path / "x.ckpt", "--to", "mindspore")
    common = ["train.steps=1", "optim.lr=0", "train.log_every=1"]
    call("train", "-c", recipe, "--out", tmp_path / "one", f"init.checkpoint={finished}", *common)
    call("train", "-c", recipe, "--out", tmp_path / "two", f"init.checkpoint={tmp_path / 'x.ckpt'}", *common)
    one, two = (metrics(tmp_path / name)[0]["loss"] for name in ("one", "two"))
    assert two == pytest.approx(one, abs=1e-6)
    # Without a model section: the shapes tell it, all but the heads.
    bare = tmp_path / "bare.yaml"
    bare.write_text("data:" + recipe.read_text().split("data:", 1)[1], encoding="utf-8")
    more = [f"init.checkpoint={tmp_path / 'x.ckpt'}", *common]
    said = call("train", "-c", bare, "--out", tmp_path / "three", *more, expect=2).err
    assert "-o model.num_heads=N" in said
    call("train", "-c", bare, "--out", tmp_path / "three", *more, "model.num_heads=2")
    assert metrics(tmp_path / "three")[0]["loss"] == pytest.approx(one, abs=1e-6)
