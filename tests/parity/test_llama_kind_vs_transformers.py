"""Logits, every gradient and twenty training losses equal to Hugging Face's Llama, Mistral, Qwen2 and Qwen3.

Weights are carried over by hand, name by name, so that no reader of folders is between the two.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gptworks.config.schema import ModelConfig, RopeScalingConfig
from gptworks.model import GPT, IGNORED

SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 101, "max_position_embeddings": 64}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {  # config, model, their keys, our keys
    "llama": (LlamaConfig, LlamaForCausalLM, {}, {"bias": "none"}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}, {"bias": "none"}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}, {"bias": "qkv"}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}, {"bias": "none", "qk_norm": True, "head_size": 8}),
}
LINEAR = {"factor": 4.0}
LLAMA3 = {"factor": 8.0, "original": 16, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original": 16}
# family, key-value heads, tied, window, rope scaling
CASES = {
    "llama, as many keys as queries": ("llama", 4, False, 0, None),
    "llama, grouped, tied": ("llama", 2, True, 0, None),
    "llama, one key for all": ("llama", 1, False, 0, None),
    "llama, linear": ("llama", 2, False, 0, ("linear", LINEAR)),
    "llama, llama3": ("llama", 2, True, 0, ("llama3", LLAMA3)),
    "llama, yarn": ("llama", 2, False, 0, ("yarn", YARN)),
    "llama, yarn with all its numbers": (
        *("llama", 2, False, 0),
        ("yarn", {**YARN, "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.7, "truncate": False}),
    ),
    "llama, yarn of a given strength": ("llama", 2, False, 0, ("yarn", {**YARN, "attention_factor": 1.7})),
    "mistral": ("mistral", 2, False, 0, None),
    "mistral, window": ("mistral", 2, False, 6, None),
    "qwen2": ("qwen2", 2, False, 0, None),
    "qwen2, tied, yarn": ("qwen2", 2, True, 0, ("yarn", YARN)),
    "qwen3": ("qwen3", 2, True, 0, None),
    "qwen3, one key for all, linear": ("qwen3", 1, False, 0, ("linear", LINEAR)),
}


def make(case: str, *, attention: str = "auto") -> tuple[GPT, Any]:
    """The same weights, far from zero, in our model and in theirs."""
    family, kv_heads, tied, window, scaling = CASES[case]
    config_type, model_type, theirs_more, ours_more = FAMILIES[family]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    ours_scaling: dict[str, Any] = {}
    if scaling is not None:
        kind, numbers = scaling
        renamed = {"original_max_position_embeddings" if k == "original" else k: v for k, v in numbers.items()}
        rope |= {"rope_type": kind, **renamed}
        ours_scaling = {"type": kind}
        ours_scaling |= {"original_max_positions" if k == "original" else k: v for k, v in numbers.items()}
    heads = {"num_attention_heads": 6 if family == "qwen3" else 4, "num_key_value_heads": kv_heads}
    more = {**theirs_more, **({"sliding_window": window} if window else {})}
    theirs = model_type(
        config_type(
            **SHAPE,
            **heads,
            **more,
            intermediate_size=56,
            rms_norm_eps=1e-4,
            rope_parameters=rope,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        )
    ).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            middle = 1.0 if "norm" in name else 0.0
            parameter.copy_(middle + 0.25 * torch.randn(parameter.shape, generator=generator))
    cfg = ModelConfig(
        num_layers=3,
        hidden_size=32,
        num_heads=heads["num_attention_heads"],
        num_kv_heads=kv_heads,
        ffn_size=56,
        vocab_size=101,
        max_positions=64,
        norm="rmsnorm",
        mlp="swiglu",
        positions="rope",
        rope_theta=500.0,
        rope_scaling=RopeScalingConfig(**ours_scaling),
        sliding_window=window,
        tied=tied,
        layernorm_eps=1e-4,
        attention=attention,  # type: ignore[arg-type]
        **ours_more,
    )
    ours = GPT(cfg).eval()
    ours.load_state_dict(as_ours(dict(theirs.state_dict()), cfg))
    return ours, theirs


def as_ours(theirs: dict[str, Tensor], cfg: ModelConfig) -> dict[str, Tensor]:
    """Their tensors, or the gradients of them, under our names and with one matrix for queries, keys and values."""
    found = {"wte.weight": theirs["model.embed_tokens.weight"], "ln_f.weight": theirs["model.norm.weight"]}
    found["head.weight"] = theirs["model.embed_tokens.weight" if cfg.tied else "lm_head.weight"]
    for i in range(cfg.num_layers):
        here = f"model.layers.{i}"
        names = {
            "ln1.weight": "input_layernorm.weight",
            "attn.out.weight": "self_attn.o_proj.weight",
            "ln2.weight": "post_attention_layernorm.weight",
            "mlp.gate.weight": "mlp.gate_proj.weight",
            "mlp.up.weight": "mlp.up_proj.weight",
            "mlp.down.weight": "mlp.down_proj.weight",
        }
        if cfg.qk_norm:
            names |= {f"attn.{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}
        found |= {f"blocks.{i}.{ours}": theirs[f"{here}.{name}"] for ours, name in names.items()}
        for kind in ("weight", "bias") if cfg.bias == "qkv" else ("weight",):
            q, k, v = (theirs[f"{here}.self_attn.{x}_proj.{kind}"] for x in "qkv")
            rows = []
            for head in range(cfg.num_kv_heads):
                share = cfg.num_heads // cfg.num_kv_heads * cfg.head_size
                rows += [q[head * share : (head + 1) * share]]
                rows += [each[head * cfg.head_size : (head + 1) * cfg.head_size] for each in (k, v)]
            found[f"blocks.{i}.attn.qkv.{kind}"] = torch.cat(rows)
    return found


def example() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens, labels = (torch.randint(0, 101, (3, 20), generator=generator) for _ in range(2))
    labels[0, 5:9] = IGNORED
    return tokens, labels


def assert_close(got: Tensor, wanted: Tensor, tolerance: float, what: str) -> None:
    assert got.shape == wanted.shape, what
    error = (got - wanted).abs().max().item()
    assert error <= tolerance * max(1.0, wanted.abs().max().item()), f"{what}: {error:.2e}"


def assert_same(ours: GPT, theirs: Any, tolerance: float) -> None:
    tokens, labels = example()
    logits = theirs(tokens).logits
    assert logits.abs().max() > 1.0, "the weights are too small to tell right from wrong"
    assert_close(ours(tokens), logits, tolerance, "logits")
    F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum").backward()
    ours(tokens, labels=labels).backward()
    wanted = as_ours({name: parameter.grad for name, parameter in theirs.named_parameters()}, ours.cfg)
    for name, parameter in ours.named_parameters():
        assert parameter.grad is not None and wanted[name].abs().max() > 0, name
        assert_close(parameter.grad, wanted[name], tolerance, f"gradient of {name}")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients(case: str) -> None:
    ours, theirs = make(case)
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("case", ["llama, grouped, tied", "llama, yarn", "mistral, window", "qwen2", "qwen3"])
def test_with_attention_written_out(case: str) -> None:
    ours, theirs = make(case, attention="math")
    assert_same(ours, theirs, 1e-5)


@pytest.mark.parametrize("family", ["llama, llama3", "mistral, window", "qwen2", "qwen3"])
def test_twenty_training_losses(family: str) -> None:
    """AdamW on both: what a difference in any gradient would become."""
    ours, theirs = make(family)
    with torch.no_grad():
        for model in (ours, theirs):
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter *= 0.3
    generator = torch.Generator().manual_seed(3)
    batches = torch.randint(0, 20, (20, 4, 25), generator=generator)
    losses: list[list[float]] = []
    for model in (ours, theirs):
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        losses.append([])
        for batch in batches:
            if isinstance(model, GPT):
                loss = model.loss(batch)
            else:
                logits = model(batch[:, :-1]).logits
                loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[1][-1] < losses[1][0] - 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
