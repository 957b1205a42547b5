"""Models of other people with the numbers they computed: one by transformers, one trained by minGPT, layer by layer."""

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gptworks
from gptworks.checkpoint.systems.huggingface_families import GPT2
from gptworks.config.schema import GenerateConfig, ModelConfig
from gptworks.generate.engine import continue_tokens
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import build_gpt
from gptworks.parallel.slices import Region


def assert_close(got: Tensor, wanted: Tensor, what: str = "logits") -> None:
    assert got.shape == wanted.shape, what
    error = (got - wanted).abs().max().item()
    assert error <= 1e-5 * max(1.0, wanted.abs().max().item()), f"{what}: {error:.2e}"


# gpt2-tiny-canon: one set of weights in the files of several systems


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_gpt2_tiny_canon(file: str, shared_data: Path, tmp_path: Path) -> None:
    canon = shared_data / "fixtures" / "gpt2-tiny-canon"
    for name in ("config.json", file):
        shutil.copy(canon / "hf" / name, tmp_path)
    reference = np.load(canon / "reference.npz")
    model = gptworks.GPT.from_pretrained(tmp_path)
    with torch.no_grad():
        logits = model(torch.from_numpy(reference["input_ids"]))
    assert_close(logits, torch.from_numpy(reference["logits"]))


# gpt-nano-sort: minGPT, trained to sort six digits, with every intermediate activation of one input


def tensor_of(entry: dict[str, Any]) -> Tensor:
    values = np.frombuffer(base64.b64decode(entry["data"]), dtype=np.float32).copy()
    return torch.from_numpy(values).reshape(entry["shape"])


class MinGPTWeights:
    """minGPT names its tensors as GPT-2 does, and keeps matrices as [out, in]."""

    def __init__(self, file: dict[str, Any], cfg: ModelConfig) -> None:
        self.file, self.cfg = file, cfg

    def tensor(self, name: str, shape: torch.Size, region: Region | None = None) -> Tensor:
        assert region is None  # one process has it whole
        rule = GPT2.rule(name)
        theirs = tensor_of(self.file[rule.theirs[0]])
        is_matrix = name.startswith("blocks.") and theirs.dim() == 2
        return rule.from_theirs([theirs.T if is_matrix else theirs], self.cfg.head_size)


@pytest.fixture(scope="module")
def nano_sort(shared_data: Path) -> tuple[GPT, dict[str, Tensor]]:
    folder = shared_data / "models" / "gpt-nano-sort"
    file = json.loads((folder / "gpt-nano-sort-model.json").read_text(encoding="utf-8"))
    shape = file["config"]
    cfg = ModelConfig(
        num_layers=shape["n_layer"],
        hidden_size=shape["n_embd"],
        num_heads=shape["n_head"],
        vocab_size=shape["vocab_size"],
        max_positions=shape["block_size"],
        tied=False,
    )
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, MinGPTWeights(file, cfg)).eval()
    partials = json.loads((folder / "gpt-nano-sort-t0-partials.json").read_text(encoding="utf-8"))
    return model, {name: tensor_of(entry) for name, entry in partials.items() if name != "config"}


def test_nano_sort_layer_by_layer(nano_sort: tuple[GPT, dict[str, Tensor]]) -> None:
    model, wanted = nano_sort
    seen: dict[str, Tensor] = {}

    def keep_output(name: str) -> Any:
        return lambda module, args, output: seen.__setitem__(name, output)

    def keep_input(name: str) -> Any:
        return lambda module, args: seen.__setitem__(name, args[0])

    first = model.blocks["0"]
    outputs = {
        "tok_emb": model.wte,
        "ln1": first.ln1,
        "yProj": first.attn.out,
        "ln2": first.ln2,
        "fc": first.mlp.up,
        "mlp": first.mlp.down,
        "block0": first,
        "block1": model.blocks["1"],
        "block2": model.blocks["2"],
        "ln_f": model.ln_f,
    }
    inputs = {"x": first, "y": first.attn.out, "attnResid": first.ln2, "gelu": first.mlp.down}
    hooks = [module.register_forward_hook(keep_output(name)) for name, module in outputs.items()]
    hooks += [module.register_forward_pre_hook(keep_input(name)) for name, module in inputs.items()]
    hooks.append(first.attn.qkv.register_forward_hook(keep_output("qkv by head")))
    with torch.no_grad():
        logits = model(wanted["idx"].long())
    for hook in hooks:
        hook.remove()

    by_head = seen.pop("qkv by head").view(3, 11, 3, 3, 16)  # row, token, head, q|k|v, size
    for kind, name in enumerate("qkv"):
        assert_close(by_head[:, :, :, kind].transpose(1, 2), wanted[name], name)
    assert len(seen) == 14
    for name, activation in seen.items():
        assert_close(activation, wanted[name], name)
    assert_close(logits, wanted["lm_head"])
    assert_close(logits.softmax(-1), wanted["probs"], "probabilities")


def test_nano_sort_sorts(nano_sort: tuple[GPT, dict[str, Tensor]]) -> None:
    """Six digits in, the same digits in order out: the whole way through cache and generation."""
    model, _ = nano_sort
    digits = torch.randint(0, 3, (50, 6), generator=torch.Generator().manual_seed(0)).tolist()
    cfg = GenerateConfig(strategy="greedy", max_new_tokens=5)
    rows = [new.tokens for (new,) in continue_tokens(model, digits, cfg, vocab_size=3)]
    right = [row == sorted(given)[:5] for row, given in zip(rows, digits, strict=True)]
    assert sum(right) >= 48
