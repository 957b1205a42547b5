"""The description of a GPT's tensors against the model itself, and the tag that second implementations check."""

import re
import subprocess
import sys
from typing import Any, Literal

import pytest
import torch

from gptworks import architecture
from gptworks.architecture import ANY, TensorSpec, require_known, tensors, union, variant
from gptworks.config.schema import ModelConfig, RopeScalingConfig
from gptworks.errors import UsageError
from gptworks.model import GPT

SHAPE = {"num_layers": 3, "hidden_size": 24, "num_heads": 4, "ffn_size": 40, "vocab_size": 31, "max_positions": 10}


class Spiral(ModelConfig):
    """An invented variant: a curve that nobody knows."""

    curve: Literal["straight", "spiral"] = "straight"


KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "untied": {"tied": False},
    "llama": {
        "norm": "rmsnorm",
        "positions": "rope",
        "mlp": "swiglu",
        "bias": "none",
        "tied": False,
        "num_kv_heads": 2,
    },
    "qwen3": {
        "norm": "rmsnorm",
        "positions": "rope",
        "mlp": "swiglu",
        "bias": "none",
        "qk_norm": True,
        "num_kv_heads": 1,
        "head_size": 10,
    },
    "qwen2": {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "qkv", "num_kv_heads": 2},
    "all biases": {"norm": "rmsnorm", "positions": "none", "mlp": "swiglu"},
    "no biases": {"bias": "none"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_of_the_model_are_those_that_are_described(kind: str) -> None:
    cfg = ModelConfig(**SHAPE, **KINDS[kind])
    with torch.device("meta"):
        model = GPT(cfg)
    found = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert list(found.items()) == [(name, spec.shape) for name, spec in tensors(cfg).items()]
    assert set(model.state_dict()) == set(tensors(cfg)) | {"head.weight"}


def test_what_is_described_beside_the_shapes() -> None:
    """By hand, from the papers: column-parallel and row-parallel matrices, GPT-2's fresh weights."""
    described = tensors(ModelConfig(**SHAPE, tied=False))
    assert {name for name, spec in described.items() if spec.role.tp_dim == 1} == {
        f"blocks.{i}.{name}.weight" for i in range(3) for name in ("attn.out", "mlp.down")
    }
    assert {re.sub(r"blocks\.\d\.", "", name) for name, spec in described.items() if spec.role.tp_dim == 0} == {
        "wte.weight",
        "head.weight",
        *(f"{name}.{kind}" for name in ("attn.qkv", "mlp.up") for kind in ("weight", "bias")),
    }
    assert described["blocks.1.attn.qkv.bias"].pieces == (6, 6, 6)
    kinds = {name: spec.role.kind for name, spec in described.items() if not name.startswith("blocks.")}
    assert kinds == {
        "wte.weight": "embedding",
        "wpe.weight": "embedding",
        "ln_f.weight": "gain",
        "ln_f.bias": "bias",
        "head.weight": "matrix",
    }
    assert {spec.role.init for spec in described.values() if spec.role.kind == "bias"} == {"zeros"}


def test_what_is_described_of_grouped_queries() -> None:
    """By hand: 4 heads of 6 in 2 groups, so 2 x (12 + 6 + 6) rows; a gate beside each up; gains on all ranks."""
    described = tensors(ModelConfig(**SHAPE, **KINDS["llama"], qk_norm=True))
    qkv = described["blocks.2.attn.qkv.weight"]
    assert qkv.shape == (48, 24) and qkv.pieces == (12, 6, 6)
    assert qkv.on_rank(2, 1).shape == (24, 24)
    assert described["blocks.0.mlp.gate.weight"].role.tp_dim == described["blocks.0.mlp.up.weight"].role.tp_dim == 0
    q_norm = described["blocks.0.attn.q_norm.weight"]
    assert q_norm.shape == (6,) and q_norm.role.tp_dim is None and q_norm.role.sees_own_heads
    assert not any(name.endswith("bias") or name.startswith("wpe") for name in described)


def test_what_a_stage_has_beside_its_blocks() -> None:
    def names(*, tied: bool, is_first: bool, is_last: bool) -> list[str]:
        return list(architecture.around_blocks(ModelConfig(**SHAPE, tied=tied), is_first=is_first, is_last=is_last))

    words, end = ["wte.weight", "wpe.weight"], ["ln_f.weight", "ln_f.bias"]
    for tied in (True, False):
        assert names(tied=tied, is_first=True, is_last=False) == words
        assert names(tied=tied, is_first=False, is_last=False) == []
        assert names(tied=tied, is_first=False, is_last=True) == [*end, "head.weight"]
    assert names(tied=True, is_first=True, is_last=True) == [*words, *end]
    assert names(tied=False, is_first=True, is_last=True) == [*words, *end, "head.weight"]


@pytest.mark.parametrize("size", [1, 2, 7, 31, 32])
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 8])
def test_a_cut_is_that_of_torch(size: int, tp: int) -> None:
    spec = TensorSpec("wte.weight", (size, 2), architecture.role_of("wte.weight"))
    theirs = [len(part) for part in torch.zeros(size, 2).chunk(tp)]
    ours = [spec.on_rank(tp, rank).shape[0] for rank in range(tp)]
    assert ours == theirs + [0] * (tp - len(theirs))
    whole = TensorSpec("wpe.weight", (size, 2), architecture.role_of("wpe.weight"))
    assert whole.on_rank(tp, 0).shape == (size, 2)


def test_the_description_is_read_without_torch() -> None:
    code = "import sys, gptworks.architecture; assert 'torch' not in sys.modules, 'torch'"
    subprocess.run([sys.executable, "-c", code], check=True)


# The tag


def test_a_key_that_is_new_is_part_of_the_tag() -> None:
    assert variant(Spiral(**SHAPE)) == {}
    assert variant(Spiral(**SHAPE, curve="spiral", gelu="erf", tied=False, dropout_hidden=0.1)) == {
        "tied": False,
        "gelu": "erf",
        "curve": "spiral",
    }


def test_a_default_that_follows_from_other_keys_is_no_variant() -> None:
    assert variant(ModelConfig(**{**SHAPE, "ffn_size": 7})) == {}


def test_a_number_that_any_value_will_do_for() -> None:
    cfg = ModelConfig(**SHAPE, **KINDS["llama"], rope_scaling=RopeScalingConfig(type="yarn", factor=2.0))
    assert variant(cfg) == {**KINDS["llama"], "rope_scaling": "yarn"}
    knows: dict[str, Any] = {key: (value,) for key, value in KINDS["llama"].items()}
    knows |= {"num_kv_heads": ANY, "rope_scaling": ("yarn",)}
    require_known(cfg, knows, "this file", UsageError)
    knows["rope_scaling"] = ("linear",)
    with pytest.raises(UsageError, match=r": model\.rope_scaling: yarn \(known: none, linear\)\.$"):
        require_known(cfg, knows, "this file", UsageError)
    with pytest.raises(UsageError, match=r"model\.num_kv_heads: 2 \(known: 4\)"):
        require_known(cfg, architecture.GPT2, "this file", UsageError)


def test_what_several_know_together() -> None:
    window, erf = {"sliding_window": ANY, "gelu": ("erf",)}, {"gelu": ("sigmoid", "erf")}
    for tables in ([window, erf, {"sliding_window": (8,)}], [{"sliding_window": (8,)}, window, erf]):
        together = union(tables)
        assert together["sliding_window"] is ANY and together["gelu"] == ("erf", "sigmoid")


def test_what_is_unknown_is_named() -> None:
    knows = {"gelu": ("erf",), "tied": (False,)}
    require_known(Spiral(**SHAPE, gelu="erf", tied=False), knows, "this file", UsageError)
    with pytest.raises(UsageError, match=r"this file .*: model\.curve: spiral \(known: straight\)\."):
        require_known(Spiral(**SHAPE, curve="spiral", gelu="erf"), knows, "this file", UsageError)
    with pytest.raises(UsageError, match=r"model\.gelu: sigmoid \(known: tanh, erf\)"):
        require_known(Spiral(**SHAPE, gelu="sigmoid"), knows, "this file", UsageError)
    with pytest.raises(UsageError, match=r"model\.gelu: sigmoid \(known: tanh, erf\)"):  # each value once
        require_known(Spiral(**SHAPE, gelu="sigmoid"), {"gelu": ("tanh", "erf")}, "this file", UsageError)
