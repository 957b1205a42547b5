"""MindFormers GPT2's weights, and the formats W-04 and W-05. Rows of the conformance list: S4-10, W-04, W-05."""

from pathlib import Path

import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import mindspore_ckpt
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=48, max_positions=12)


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the hub has gpt2: pytorch_model.bin, names without `transformer.`, and causal masks among the tensors."""
    folder = tmp_path_factory.mktemp("hub")
    gpt = build_gpt(MODEL, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, seed=5))
    huggingface.save(folder, MODEL, dict(gpt.named_parameters()), eod_id=47)
    found = huggingface.safetensors_file.read(folder / "model.safetensors")
    state = {name.removeprefix("transformer."): each.read().clone() for name, each in found.items()}
    state |= {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(2)}
    torch.save(state, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "pytorch_model.bin", weights_only=True)


def test_s4_10_pytorch_model_bin_becomes_a_ckpt_of_mindformers_names(bin_folder: Path, tmp_path: Path) -> None:
    """What its converter does: c_attn cut in three and turned, all other matrices as they are."""
    convert(bin_folder, tmp_path / "gpt2.ckpt", "mindspore", verify=True)
    found = {name: each.read() for name, each in mindspore_ckpt.read(tmp_path / "gpt2.ckpt").tensors.items()}
    state = state_of(bin_folder)
    expected = {
        "backbone.embedding.word_embedding.embedding_table": state["wte.weight"],
        "backbone.embedding.position_embedding.embedding_table": state["wpe.weight"],
        "backbone.layernorm.gamma": state["ln_f.weight"],
        "backbone.layernorm.beta": state["ln_f.bias"],
    }
    for i in range(2):
        here, there = f"h.{i}", f"backbone.blocks.{i}"
        for n in (1, 2):
            expected[f"{there}.layernorm{n}.gamma"] = state[f"{here}.ln_{n}.weight"]
            expected[f"{there}.layernorm{n}.beta"] = state[f"{here}.ln_{n}.bias"]
        for kind in ("weight", "bias"):
            for n, part in enumerate(state[f"{here}.attn.c_attn.{kind}"].chunk(3, -1), 1):
                expected[f"{there}.attention.dense{n}.{kind}"] = part.T if kind == "weight" else part
            expected[f"{there}.attention.projection.{kind}"] = state[f"{here}.attn.c_proj.{kind}"]
            expected[f"{there}.output.mapping.{kind}"] = state[f"{here}.mlp.c_fc.{kind}"]
            expected[f"{there}.output.projection.{kind}"] = state[f"{here}.mlp.c_proj.{kind}"]
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("row", "to", "name"), [("S4-10, W-04", "mindspore", "gpt2.ckpt"), ("W-05", "oneflow", "iter5_snapshot")]
)
def test_s4_10_w_04_w_05_there_and_back_to_the_bit(
    row: str, to: str, name: str, bin_folder: Path, tmp_path: Path
) -> None:
    convert(bin_folder, tmp_path / name, to, verify=True)
    given = {"num_heads": 4, "gelu": "tanh"}  # neither is in these formats
    convert(tmp_path / name, tmp_path / "back", "hf", overrides=given, verify=True)
    back = {
        key: each.read()
        for key, each in huggingface.safetensors_file.read(tmp_path / "back" / "model.safetensors").items()
    }
    expected = {f"transformer.{key}": tensor for key, tensor in state_of(bin_folder).items() if ".attn.bias" not in key}
    assert sorted(back) == sorted(expected)
    for key, tensor in expected.items():
        assert torch.equal(back[key], tensor), key
    tokens = conversion_check.sample_tokens(MODEL)
    logits = []
    for folder in (bin_folder, tmp_path / "back"):
        opened = registry.open_any(folder)
        logits.append(conversion_check.logits(opened.model, opened.require_whole().tensors, tokens))
    assert torch.equal(*logits)


def test_s4_10_on_the_command_line(bin_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gptworks(*args: str | Path, expect: int = 0) -> str:
        assert main([str(arg) for arg in args]) == expect
        shown = capsys.readouterr()
        return shown.err if expect else shown.out

    file, back = tmp_path / "gpt2.ckpt", tmp_path / "back"
    assert "28 of 28 tensors equal to the bit" in gptworks("convert", bin_folder, file, "--to", "mindspore", "--verify")
    shown = gptworks("inspect", file)
    assert "mindspore" in shown and "heads not stored (-o model.num_heads=N converts it)" in shown
    refused = gptworks("convert", file, back, "--to", "hf", expect=2)
    assert "does not carry the number of heads" in refused and "-o model.num_heads=N" in refused
    gptworks("convert", file, back, "--to", "hf", "-o", "model.num_heads=4")
    assert (back / "config.json").is_file()
    shown = gptworks("convert", back, tmp_path / "of", "--to", "oneflow")
    assert "note: oneflow does not keep model.gelu: it computes with erf, and this model is made for tanh." in shown
    assert "  ... 163 more, " in shown and len(shown.splitlines()) < 12


def test_w_04_a_file_is_generated_from_directly(
    bin_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a conversion: what the file does not say is asked for, one thing after the other."""
    convert(bin_folder, tmp_path / "gpt2.ckpt", "mindspore")
    asked = ["generate", "--model", str(tmp_path / "gpt2.ckpt"), "--prompt", "a", "--device", "cpu"]
    assert main(asked) == 2
    assert "-o model.num_heads=N" in capsys.readouterr().err
    assert main([*asked, "-o", "model.num_heads=4"]) == 2
    assert "Name one with --tokenizer" in capsys.readouterr().err
