"""GGUF of llama, qwen2 and qwen3: written here, read by transformers, and back to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import ggml_blocks, gguf_file
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import gguf, gguf_q4_0, huggingface, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.load import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 64, "vocab_size": 48,
    "max_positions": 64, "norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none",
}  # fmt: skip
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_max_positions": 8192}
YARN = {"type": "yarn", "factor": 4.0, "original_max_positions": 16}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, own head, theta": ("llama", {"tied": False, "rope_theta": 500000.0, "layernorm_eps": 1e-6}),
    "llama, llama3": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA3, "max_positions": 131072}),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama, yarn": ("llama", {"rope_scaling": YARN}),
    "llama, wide heads": ("llama", {"head_size": 16}),
    "qwen2": ("qwen2", {"bias": "qkv", "rope_theta": 1000000.0}),
    "qwen3": ("qwen3", {"qk_norm": True, "head_size": 16, "tied": False}),
}


def model_of(kind: str) -> ModelConfig:
    return from_dict({"model": {**SHAPE, **KINDS[kind][1]}}).model


def weights_of(model: ModelConfig) -> Weights:
    torch.manual_seed(5)
    tensors = {}
    for name, shape in our_shapes(model).items():
        drawn = torch.randn(shape) * 0.2
        tensors[name] = in_memory(drawn + 1 if "norm" in name or ".ln" in name or name.startswith("ln_f") else drawn)
    return Weights(model, tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back_to_the_bit(kind: str, tmp_path: Path) -> None:
    weights = weights_of(model_of(kind))
    gguf.write(tmp_path / "x.gguf", weights)
    file = gguf_file.read(tmp_path / "x.gguf")
    assert file.settings["general.architecture"] == KINDS[kind][0]
    opened = registry.open_any(tmp_path / "x.gguf").require_whole()
    assert opened.model == weights.model
    for name, each in weights.tensors.items():
        assert torch.equal(opened.tensors[name].read(), each.read()), name
    assert ("rope_freqs.weight" in file.tensors) == (kind == "llama, llama3")


@pytest.mark.parametrize("kind", KINDS)
def test_queries_and_keys_of_a_llama_turn_neighbours(kind: str, tmp_path: Path) -> None:
    """By the definition in llama.cpp: number 2i of a head and number 2i + 1 are one pair."""
    weights = weights_of(model_of(kind))
    gguf.write(tmp_path / "x.gguf", weights)
    size = weights.model.head_size
    stored = gguf_file.read(tmp_path / "x.gguf").tensors["blk.1.attn_k.weight"].read()
    huggingface_order = convert(tmp_path / "x.gguf", tmp_path / "hf", "hf").source.tensors["blocks.1.attn.qkv.weight"]
    queries = weights.model.heads_per_kv * size
    ours = huggingface_order.read().view(2, queries + 2 * size, -1)[:, queries : queries + size]
    for head in range(2):
        for i in range(size // 2):
            pair = (2 * i, 2 * i + 1) if KINDS[kind][0] == "llama" else (i, i + size // 2)
            assert torch.equal(stored[head * size + pair[0]], ours[head, i])
            assert torch.equal(stored[head * size + pair[1]], ours[head, i + size // 2])


def test_logits_through_hugging_face(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for number, kind in enumerate(("llama", "qwen2", "qwen3")):
        weights = weights_of(model_of(kind))
        gguf.write(tmp_path / f"{number}.gguf", weights)
        convert(tmp_path / f"{number}.gguf", tmp_path / kind, "hf", verify=True)
        theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        ids = (torch.arange(24) * 7 + 3).remainder(48)[None]
        opened = registry.open_any(tmp_path / f"{number}.gguf")
        with torch.no_grad():
            wanted = theirs(ids).logits
        found = conversion_check.logits(opened.model, opened.tensors, ids)
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), kind


def test_4_bits(tmp_path: Path) -> None:
    weights = weights_of(model_of("llama, own head, theta"))
    gguf_q4_0.write(tmp_path / "x.gguf", weights)
    types = gguf_file.read(tmp_path / "x.gguf").types
    assert types["blk.0.ffn_down.weight"] == types["blk.1.attn_q.weight"] == ggml_blocks.Q4_0
    assert types["token_embd.weight"] == types["output.weight"] == ggml_blocks.Q8_0
    opened = registry.open_any(tmp_path / "x.gguf").require_whole()
    for name, each in weights.tensors.items():
        # Steps from -8 to 7 of an eighth of the farthest value: one as far on the other side loses a whole step.
        difference = (opened.tensors[name].read() - each.read()).abs().max()
        assert difference <= (1 / 8 + 2**-10) * each.read().abs().max(), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 8}, r"llama lacks model\.sliding_window: 8"),
        ({"bias": "all"}, r"lacks model\.bias: all"),
        ({"mlp": "gelu"}, r"lacks .*model\.mlp: gelu"),
        ({"qk_norm": True, "rope_scaling": LLAMA3}, r"lacks model\.(qk_norm: True|rope_scaling: llama3)"),
        ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, r"model\.rope_scaling\.attention_factor is 2\.0"),
    ],
)
def test_what_llama_cpp_does_not_compute(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = from_dict({"model": {**SHAPE, **change}}).model
    with pytest.raises(CheckpointError, match=message):
        gguf.write(tmp_path / "x.gguf", weights_of(model))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"general.architecture": "gemma3"}, r"general.architecture is 'gemma3', needed one of gpt2, llama, qwen2"),
        ({"llama.expert_count": 8}, r"llama.expert_count is 8, which changes the computation"),
        ({"llama.rope.dimension_count": 4}, r"llama.rope.dimension_count is 4 and a head of queries has 8"),
        ({"llama.rope.scaling.type": "longrope"}, r"llama.rope.scaling.type is 'longrope', needed none, linear or"),
        ({"llama.attention.head_count_kv": 3}, "num_kv_heads"),
        ({"llama.attention.head_count_kv": 4}, r"'blk\.0\.attn_k\.weight' has shape \[16, 32\], needed \[32, 32\]"),
        ({"llama.block_count": 3}, "missing: 'blk.2.attn_norm.weight'"),
        ({"llama.block_count": 3_000_000}, "3000000 blocks are announced"),
        ({"llama.embedding_length": "wide"}, "llama.embedding_length is wide, needed a whole number"),
        ({"llama.rope.freq_base": "high"}, "llama.rope.freq_base is high, needed a number"),
        ({"llama.rope.scaling.attn_factor": 0.5}, "llama.rope.scaling.attn_factor is set, which is not supported"),
    ],
)
def test_files_that_are_wrong(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama")))
    file = gguf_file.read(tmp_path / "x.gguf")
    gguf_file.write(tmp_path / "y.gguf", {**file.settings, **settings}, file.tensors)
    with pytest.raises(CheckpointError, match=message):
        registry.open_any(tmp_path / "y.gguf").require_whole()


def test_tensors_missing_and_left_over(tmp_path: Path) -> None:
    gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama")))
    file = gguf_file.read(tmp_path / "x.gguf")
    tensors = dict(file.tensors)
    tensors["blk.0.attn_q.bias"] = in_memory(torch.zeros(32))
    tensors["nameless"] = in_memory(torch.zeros(32))
    del tensors["blk.1.ffn_gate.weight"]
    gguf_file.write(tmp_path / "y.gguf", file.settings, tensors)
    with pytest.raises(CheckpointError, match=r"missing: 'blk\.1\.ffn_gate\.weight'(.|\n)*'blk\.0\.attn_q\.bias'"):
        registry.open_any(tmp_path / "y.gguf").require_whole()


def test_slowdowns_of_another_rule(tmp_path: Path) -> None:
    gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama, llama3")))
    file = gguf_file.read(tmp_path / "x.gguf")
    other = in_memory(torch.linspace(1, 8, 4))
    gguf_file.write(tmp_path / "y.gguf", file.settings, {**file.tensors, "rope_freqs.weight": other})
    with pytest.raises(CheckpointError, match="has other numbers than Llama 3's rule with factor 8"):
        registry.open_any(tmp_path / "y.gguf")


def test_slowdowns_upon_a_scaling(tmp_path: Path) -> None:
    """llama.cpp multiplies the two."""
    gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama, llama3")))
    file = gguf_file.read(tmp_path / "x.gguf")
    gguf_file.write(tmp_path / "y.gguf", {**file.settings, "llama.rope.scaling.factor": 2.0}, file.tensors)
    with pytest.raises(
        CheckpointError, match=r"'rope_freqs\.weight' and llama\.rope\.scaling .*'linear' with factor 2"
    ):
        registry.open_any(tmp_path / "y.gguf")


def test_an_epsilon_that_nobody_states(tmp_path: Path) -> None:
    gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama")))
    file = gguf_file.read(tmp_path / "x.gguf")
    settings = {key: value for key, value in file.settings.items() if not key.endswith("epsilon")}
    gguf_file.write(tmp_path / "y.gguf", settings, file.tensors)
    with pytest.raises(CheckpointError, match=r"llama\.attention\.layer_norm_rms_epsilon is missing"):
        registry.open_any(tmp_path / "y.gguf")


def test_settings_that_are_older_or_left_out(tmp_path: Path) -> None:
    """As llama.cpp reads them: the factor's first name; YaRN of a context that the file does not state."""
    for number, settings in enumerate(
        ({"llama.rope.scale_linear": 4.0}, {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0})
    ):
        gguf.write(tmp_path / "x.gguf", weights_of(model_of("llama")))
        file = gguf_file.read(tmp_path / "x.gguf")
        gguf_file.write(tmp_path / f"{number}.gguf", {**file.settings, **settings}, file.tensors)
    linear, yarn = (registry.open_any(tmp_path / f"{n}.gguf", {"max_positions": 24}).model for n in (0, 1))
    assert (linear.rope_scaling.type, linear.rope_scaling.factor) == ("linear", 4.0)
    assert (yarn.rope_scaling.type, yarn.rope_scaling.original_max_positions) == ("yarn", 64)


def test_its_kind_has_a_family_of_hugging_face(tmp_path: Path) -> None:
    """The folder that comes out is named by what it is."""
    for kind in ("llama", "qwen2", "qwen3"):
        gguf.write(tmp_path / f"{kind}.gguf", weights_of(model_of(kind)))
        convert(tmp_path / f"{kind}.gguf", tmp_path / kind, "hf")
        assert huggingface.open(tmp_path / kind, {}).model == model_of(kind)
        assert f'"model_type": "{kind}"' in (tmp_path / kind / "config.json").read_text()
