"""Formats that cannot hold a Llama say so by the key and write nothing; the folder for transformers can."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.checkpoint.systems.contract import SplitSpec, Weights
from gptworks.cli.main import main
from gptworks.config import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, ConfigError, UsageError
from gptworks.export.folder import export
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.tokenizer import Tokenizer
from gptworks.train.setup import prepare

LLAMA: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 512,
    "max_positions": 32,
    "norm": "rmsnorm",
    "positions": "rope",
    "mlp": "swiglu",
    "bias": "none",
}


def model_of(cfg: ModelConfig) -> GPT:
    torch.manual_seed(1)
    return GPT(cfg).eval()


@pytest.mark.parametrize("name", ["paddlenlp", "mindspore", "oneflow", "llmc", "nanogpt", "fleetx", "megatron"])
def test_refused_by_name(name: str, tmp_path: Path) -> None:
    cfg, system = ModelConfig(**LLAMA), registry.system(name)
    tensors = {key: in_memory(each.detach()) for key, each in model_of(cfg).named_parameters()}
    path = tmp_path / f"model{system.SUFFIX}" if system.SUFFIX else tmp_path
    with pytest.raises(CheckpointError) as refused:
        system.write(path, Weights(cfg, tensors), SplitSpec())
    for said in ("model.norm: rmsnorm (known: layernorm)", "model.positions: rope", "model.num_kv_heads: 2 (known: 4)"):
        assert said in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_does_not_compute_it(tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    pytest.importorskip("ctranslate2")
    cfg = ModelConfig(**LLAMA)
    parameters = dict(model_of(cfg).named_parameters())
    huggingface.save(tmp_path / "source", cfg, parameters, eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(tmp_path / "source")
    with pytest.raises(UsageError, match=r"model\.norm: rmsnorm \(known: layernorm\)"):
        export(tmp_path / "source", "ctranslate2", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("more", [{}, {"sliding_window": 6}, {"bias": "qkv"}, {"qk_norm": True, "head_size": 12}])
def test_exported_for_transformers(more: dict[str, Any], tmp_path: Path, small_tokenizer: Tokenizer) -> None:
    cfg = ModelConfig(**{**LLAMA, **more})
    model = model_of(cfg)
    huggingface.save(tmp_path / "source", cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(tmp_path / "source")
    export(tmp_path / "source", "hf", tmp_path / "out")
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(0, 512, (2, 20), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        assert (theirs(tokens).logits - model(tokens)).abs().max() <= 1e-5


def test_a_run_without_a_family_says_so_before_it_starts(small_store: Path, tmp_path: Path) -> None:
    values = {
        "model": {**LLAMA, "mlp": "gelu"},
        "data": {"path": str(small_store)},
        "train": {"steps": 1},
        "run": {"out": str(tmp_path / "run")},
    }
    alone = World(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"checkpoint\.portable: true .*model\.mlp: gelu \(known: swiglu\)"):
        prepare(from_dict(values), alone)
    prepare(from_dict(values | {"checkpoint": {"portable": False}}), alone)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("model_type", ["mixtral", "deepseek_v3", "gemma3_text"])
def test_a_folder_of_an_unknown_family_is_told_by_every_verb(
    model_type: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 32}))
    (folder / "model.safetensors").write_bytes(b"never looked at")
    out = tmp_path / "out"
    for command in (
        ["inspect", folder],
        ["convert", folder, out, "--to", "hf"],
        ["export", "--model", folder, "--to", "hf", "--out", out],
        ["generate", "--model", folder, "--prompt", "x"],
        ["train", "-o", f"init.checkpoint={folder}", "--out", out, "--dry-run", "train.steps=1"],
    ):
        assert main([*map(str, command)]) == 2, command
        told = capsys.readouterr().err
        known = "'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3'"
        assert f"config.json: model_type is '{model_type}', needed one of {known}." in told, command
        assert not out.exists()
