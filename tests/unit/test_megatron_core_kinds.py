"""Checkpoints of Megatron core that are a Llama, Mistral or Qwen: every split comes back to the bit, args say the kind.

The logits of the real one are in test_megatron_weights.py (its fixtures) and tests/interop.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, megatron_core, registry
from gptworks.checkpoint.systems.contract import SplitSpec, Weights
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

SHAPE = {"num_layers": 4, "hidden_size": 16, "num_heads": 4, "ffn_size": 40, "vocab_size": 48, "max_positions": 12}
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
LLAMA3 = {"type": "llama3", "factor": 32.0, "original_max_positions": 8192}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tied": False, "rope_theta": 500000.0, "layernorm_eps": 1e-6},
    "llama, llama3": {**LLAMA, "rope_scaling": LLAMA3},
    "llama, linear, biases": {**LLAMA, "bias": "all", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {**LLAMA, "num_kv_heads": 1, "sliding_window": 5},
    "qwen2": {**LLAMA, "bias": "qkv"},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 6},
    "no family": {"positions": "none", "num_kv_heads": 2, "gelu": "erf"},
}
FILE = "iter_0000005/mp_rank_00/model_optim_rng.pt"


def weights(model: ModelConfig) -> Weights:
    torch.manual_seed(0)
    tensors = {name: in_memory(torch.randn(shape) * 0.4) for name, shape in our_shapes(model).items()}
    return Weights(model, tensors, step=5)


def model_of(kind: str, **more: Any) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **KINDS[kind], **more})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [SplitSpec(1, 1), SplitSpec(2, 2), SplitSpec(4, 1)], ids=str)
def test_every_split_comes_back_to_the_bit(kind: str, cut: SplitSpec, tmp_path: Path) -> None:
    """Also with more ranks than heads of keys and values."""
    given = weights(model_of(kind))
    megatron_core.write(tmp_path, given, cut)
    opened = registry.open_any(tmp_path).require_whole()
    assert opened.system == "megatron-core" and opened.model == given.model
    for name, each in given.tensors.items():
        assert torch.equal(opened.tensors[name].read(), each.read()), name
        whole = tuple(slice(0, size) for size in each.shape)
        half = (slice(1, each.shape[0] // 2 + 1), *whole[1:])
        assert torch.equal(opened.tensors[name].region(half), each.read()[half]), name


def test_the_names_and_the_order_are_megatrons(tmp_path: Path) -> None:
    """On each rank its part of the gate, then its part of what the gate lets through."""
    given = weights(model_of("qwen3"))
    megatron_core.write(tmp_path, given, SplitSpec(2, 1))
    content = torch.load(tmp_path / FILE.replace("00/model", "01/model"), weights_only=False)
    found = content["model"]
    inner = found["decoder.layers.3.mlp.linear_fc1.weight"]
    gate, up = (given.tensors[f"blocks.3.mlp.{name}.weight"].read()[20:] for name in ("gate", "up"))
    assert torch.equal(inner, torch.cat([gate, up]))
    assert found["decoder.layers.3.self_attention.q_layernorm.weight"].shape == (6,)
    assert not any(name.endswith("bias") or "[" in name for name in found)
    args = content["args"]
    assert (args.swiglu, args.normalization, args.position_embedding_type) == (True, "RMSNorm", "rope")
    assert (args.group_query_attention, args.num_query_groups, args.kv_channels) == (True, 2, 6)
    assert (args.add_bias_linear, args.qk_layernorm, args.rotary_percent) == (False, True, 1.0)


def test_names_of_transformer_engine(tmp_path: Path) -> None:
    given = weights(model_of("llama"))
    megatron_core.write(tmp_path, given)
    content = torch.load(tmp_path / FILE, weights_only=False)
    inside = {".input_layernorm.": ".self_attention.linear_qkv.layer_norm_"}
    inside[".pre_mlp_layernorm."] = ".mlp.linear_fc1.layer_norm_"
    for theirs, called in inside.items():
        content["model"] = {name.replace(theirs, called): each for name, each in content["model"].items()}
    torch.save(content, tmp_path / FILE)
    opened = registry.open_any(tmp_path).require_whole()
    assert all(torch.equal(each.read(), opened.tensors[name].read()) for name, each in given.tensors.items())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_converted_from_hugging_face_and_back(kind: str, tmp_path: Path) -> None:
    given = weights(model_of(kind))
    (tmp_path / "hf").mkdir()
    huggingface.write(tmp_path / "hf", given)
    core = convert(tmp_path / "hf", tmp_path / "core", "megatron-core", cut=SplitSpec(2, 2), verify=True)
    convert(core.destination, tmp_path / "back", "hf", verify=True)
    back = registry.open_any(tmp_path / "back").require_whole()
    assert back.model == given.model
    assert all(torch.equal(each.read(), back.tensors[name].read()) for name, each in given.tensors.items())


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, r"rope_scaling: yarn \(known: none, linear, lla"),
        ("llama", {"rope_scaling": {**LLAMA3, "original_max_positions": 16}}, "original_max_positions: 16, which is"),
        ("llama", {"rope_scaling": {**LLAMA3, "high_freq_factor": 8.0}}, "high_freq_factor: 8, which is always 4"),
        ("llama", {"rope_theta": 10000.5}, "rope_theta: 10000.5, which is a whole number"),
        ("no family", {"bias": "none"}, "model.bias: none with model.norm: layernorm"),
        ("no family", {"qk_norm": True}, "model.qk_norm with model.norm: layernorm"),
    ],
)  # fmt: skip
def test_what_its_args_cannot_say(kind: str, more: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        megatron_core.write(tmp_path, weights(model_of(kind, **more)))
    assert list(tmp_path.iterdir()) == []


def test_a_split_that_megatron_refuses(tmp_path: Path) -> None:
    model = model_of("llama", num_heads=6, num_kv_heads=2, hidden_size=24, ffn_size=48)
    with pytest.raises(CheckpointError, match=r"--tp 3: 2 heads of keys and values"):
        megatron_core.write(tmp_path, weights(model), SplitSpec(3, 1))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"rotary_percent": 0.5}, "rotary_percent=0.5: partial rotary embeddings"),
        ({"rotary_interleaved": True}, "rotary_interleaved=True: rotary embeddings of neighbouring pairs"),
        ({"window_size": (3, 3)}, r"window_size=.*3, 3.*; needed \(tokens before, 0\)"),
        ({"normalization": "LayerNorm"}, "qk_layernorm with normalization=LayerNorm"),
        ({"use_rope_scaling": True, "rotary_seq_len_interpolation_factor": 2.0}, "needed one of them"),
        ({"position_embedding_type": "yarn"}, "position_embedding_type=yarn; known: learned_absolute, rope, none"),
        ({"num_query_groups": 4}, "has shape"),
    ],
)
def test_args_that_are_refused(args: dict[str, object], said: str, tmp_path: Path) -> None:
    megatron_core.write(tmp_path, weights(model_of("qwen3")))
    content = torch.load(tmp_path / FILE, weights_only=False)
    vars(content["args"]).update(args)
    torch.save(content, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=said):
        registry.open_any(tmp_path).require_whole()


def test_a_gated_matrix_that_is_missing_is_named(tmp_path: Path) -> None:
    megatron_core.write(tmp_path, weights(model_of("llama")))
    content = torch.load(tmp_path / FILE, weights_only=False)
    del content["model"]["decoder.layers.2.mlp.linear_fc1.weight"]
    torch.save(content, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"2 missing: 'decoder\.layers\.2\.mlp\.linear_fc1\[gate\]\.weight'"):
        registry.open_any(tmp_path).require_whole()
