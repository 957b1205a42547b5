"""W-06. nanoGPT's ckpt.pt: read as nanoGPT computes it, and written so that its own loader takes it."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, nanogpt, registry
from gptworks.checkpoint.systems.contract import EXACT, SplitSpec, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

ARGS: dict[str, Any] = {"n_layer": 2, "n_head": 4, "n_embd": 16, "block_size": 12, "vocab_size": 48, "dropout": 0.0}
TOKENS = torch.arange(20).view(2, 10) * 11 % 48


class Norm(nn.Module):
    def __init__(self, size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Layer(nn.Module):
    def __init__(self, size: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.heads = Norm(size, bias), Norm(size, bias), heads
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(size, 3 * size, bias), "c_proj": nn.Linear(size, size, bias)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(size, 4 * size, bias), "c_proj": nn.Linear(4 * size, size, bias)})

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        q, k, v = (
            each.view(batch, length, self.heads, -1).transpose(1, 2)
            for each in self.attn["c_attn"](self.ln_1(x)).split(size, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.attn["c_proj"](mixed)
        return x + self.mlp["c_proj"](nn.GELU()(self.mlp["c_fc"](self.ln_2(x))))


class NanoGPT(nn.Module):
    """The network of nanoGPT with its names, after its description."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        size = ARGS["n_embd"]
        layers = [Layer(size, ARGS["n_head"], bias) for _ in range(ARGS["n_layer"])]
        parts = {"wte": nn.Embedding(ARGS["vocab_size"], size), "wpe": nn.Embedding(ARGS["block_size"], size)}
        self.transformer = nn.ModuleDict({**parts, "h": nn.ModuleList(layers), "ln_f": Norm(size, bias)})
        self.lm_head = nn.Linear(size, ARGS["vocab_size"], bias=False)
        self.lm_head.weight = self.transformer["wte"].weight

    @torch.no_grad()
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.transformer["wte"](tokens) + self.transformer["wpe"](torch.arange(tokens.shape[1]))
        for layer in self.transformer["h"]:
            x = layer(x)
        return self.lm_head(self.transformer["ln_f"](x))


def trained(bias: bool = True) -> NanoGPT:
    torch.manual_seed(1)
    model = NanoGPT(bias)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.3)
    return model


def save(path: Path, model: NanoGPT, *, prefix: str = "_orig_mod.", bias: bool = True, **more: Any) -> Path:
    state = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    content = {"model": state, "optimizer": optimizer.state_dict(), "model_args": {**ARGS, "bias": bias}}
    torch.save({**content, "iter_num": 250, "best_val_loss": torch.tensor(3.5), "config": {"lr": 0.1}, **more}, path)
    return path


def close(found: Tensor, expected: Tensor) -> bool:
    return float((found - expected).abs().max()) <= EXACT * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("bias", [True, False])
def test_w06_logits_are_nanogpts(bias: bool, prefix: str, tmp_path: Path) -> None:
    model = trained(bias)
    save(tmp_path / "ckpt.pt", model, bias=bias, prefix=prefix)
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        opened = registry.open_any(path).require_whole()
        assert opened.system == "nanogpt"
        assert close(conversion_check.logits(opened.model, opened.tensors, TOKENS), model(TOKENS))
    assert opened.model.gelu == "erf"
    assert opened.about["step"] == 250
    assert any("biases of zero" in remark for remark in opened.remarks) == (not bias)
    tanh = registry.open_any(tmp_path, {"gelu": "tanh"})  # a negative control
    assert not close(conversion_check.logits(tanh.model, tanh.tensors, TOKENS), model(TOKENS))


def test_masks_that_old_checkpoints_carry_are_left_out(tmp_path: Path) -> None:
    model = trained()
    file = save(tmp_path / "ckpt.pt", model)
    content = torch.load(file)
    content["model"]["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 12, 12)
    torch.save(content, file)
    assert close(
        conversion_check.logits((o := registry.open_any(file).require_whole()).model, o.tensors, TOKENS), model(TOKENS)
    )


def test_w06_there_and_back_and_into_nanogpts_loader(tmp_path: Path) -> None:
    source = save(tmp_path / "ckpt.pt", trained())
    convert(source, tmp_path / "hf", "hf", verify=True)
    done = convert(tmp_path / "hf", tmp_path / "back.pt", "nanogpt", verify=True)
    assert done.certificate is not None
    assert done.certificate["tensors"]["different"] == 0
    found = torch.load(tmp_path / "back.pt")
    expected = torch.load(source)
    assert {"_orig_mod." + name for name in found["model"]} == set(expected["model"])
    assert all(torch.equal(each, expected["model"]["_orig_mod." + name]) for name, each in found["model"].items())
    assert {key: found["model_args"][key] for key in ARGS} == ARGS
    assert found["model_args"]["bias"] is True
    # As nanoGPT's train.py resumes: strictly, and with its optimizer in two groups.
    model = NanoGPT()
    model.load_state_dict(found["model"], strict=True)
    assert close(model(TOKENS), trained()(TOKENS))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=1e-3)
    optimizer.load_state_dict(found["optimizer"])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_the_tanh_form_and_the_step_survive(tmp_path: Path) -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=20, max_positions=8, layernorm_eps=1e-4)
    tensors = {name: in_memory(torch.randn(shape)) for name, shape in our_shapes(model).items()}
    nanogpt.write(tmp_path / "x.pt", Weights(model, tensors, step=9), SplitSpec())
    opened = registry.open_any(tmp_path / "x.pt").require_whole()
    assert opened.model == model
    assert opened.about["step"] == 9
    (tmp_path / "hf").mkdir()
    huggingface.write(tmp_path / "hf", Weights(model, tensors))
    gelu, epsilon = convert(tmp_path / "hf", tmp_path / "y.pt", "nanogpt", verify=True).notes
    assert "nanoGPT has the exact one" in gelu
    assert epsilon == "model.layernorm_eps is 0.0001; nanoGPT has 1e-05"


@pytest.mark.parametrize(("change", "message"), [({"tied": False}, "no head of its own"), ({"ffn_size": 20}, "4 x")])
def test_what_nanogpt_cannot_hold(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 20, "max_positions": 8}
    model = ModelConfig(**{**shape, **change})
    tensors = {name: in_memory(torch.zeros(shape)) for name, shape in our_shapes(model).items()}
    (tmp_path / "hf").mkdir()
    huggingface.write(tmp_path / "hf", Weights(model, tensors))
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "hf", tmp_path / "x.pt", "nanogpt")
    assert [found.name for found in tmp_path.iterdir()] == ["hf"]


def test_what_does_not_fit_is_told(tmp_path: Path) -> None:
    file = save(tmp_path / "ckpt.pt", trained(), model_args={**ARGS, "n_layer": 3, "bias": True})
    with pytest.raises(CheckpointError, match="has 2 layers, and its model_args say n_layer 3"):
        registry.open_any(file)
    save(file, trained(False), bias=True)  # it says biases, and has none
    with pytest.raises(CheckpointError, match="missing"):
        registry.open_any(file).require_whole()
    torch.save({"model": {}}, file)
    with pytest.raises(CheckpointError, match="'model_args'"):
        nanogpt.open(file, {})


@pytest.mark.slow
def test_damage_is_a_checkpoint_error_or_read(tmp_path: Path) -> None:
    file = save(tmp_path / "ckpt.pt", trained())
    good = file.read_bytes()
    end = good.index(b"PK\x03\x04", 4)
    draws = random.Random(3)
    refused = 0
    for attempt in range(250):
        bad = bytearray(good)
        for _ in range(draws.randint(1, 3)):
            bad[draws.randrange(end if attempt % 4 else len(bad))] = draws.randrange(256)
        file.write_bytes(bad[: draws.randrange(1, len(bad))] if attempt % 10 == 0 else bad)
        try:
            registry.recognise(file)
            opened = nanogpt.open(file, {}).require_whole()
            conversion_check.logits(opened.model, opened.tensors, TOKENS[:, :1] % opened.model.vocab_size)
        except CheckpointError:
            refused += 1
    assert refused > 100
