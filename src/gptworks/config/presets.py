"""Model shapes by name. A preset fills the `model` section; everything else comes from the recipe."""

import difflib
from copy import deepcopy
from typing import Any

from gptworks.config.schema import ModelConfig
from gptworks.errors import ConfigError

# What all of Llama's kind have; each is as its publisher's config.json says.
_LLAMA: dict[str, Any] = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none"}
_QWEN: dict[str, Any] = {**_LLAMA, "vocab_size": 151936, "rope_theta": 1e6, "layernorm_eps": 1e-6}
_SMOLLM2: dict[str, Any] = {**_LLAMA, "vocab_size": 49152, "max_positions": 8192, "rope_theta": 1e5}
_LLAMA3_SCALING = {"type": "llama3", "factor": 32.0, "original_max_positions": 8192}

# GPT-2 by OpenAI, vocabulary 50257. GPT-3 sizes as the five systems ship them, vocabulary padded to 50304
# (50257 rounded up to a multiple of 128; 51200 for 175B, which they split eight ways).
_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50257},
    "gpt2-medium": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50257},
    "gpt2-large": {"num_layers": 36, "hidden_size": 1280, "num_heads": 20, "vocab_size": 50257},
    "gpt2-xl": {"num_layers": 48, "hidden_size": 1600, "num_heads": 25, "vocab_size": 50257},
    "117M": {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50304},
    "345M": {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304},
    "1.3B": {"num_layers": 24, "hidden_size": 2048, "num_heads": 16, "vocab_size": 50304},
    "2.7B": {"num_layers": 32, "hidden_size": 2560, "num_heads": 32, "vocab_size": 50304},
    "6.7B": {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "vocab_size": 50304},
    "13B": {"num_layers": 40, "hidden_size": 5120, "num_heads": 40, "vocab_size": 50304},
    "175B": {"num_layers": 96, "hidden_size": 12288, "num_heads": 96, "vocab_size": 51200},
    "tiny": {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "vocab_size": 50257, "max_positions": 128},
    "tiny-4k": {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "vocab_size": 4096, "max_positions": 128},
    "llama2-7b": {
        **_LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "ffn_size": 11008,
        "vocab_size": 32000,
        "max_positions": 4096,
        "tied": False,
    },
    "llama3-8b": {
        **_LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_size": 14336,
        "vocab_size": 128256,
        "max_positions": 8192,
        "rope_theta": 5e5,
        "tied": False,
    },
    "llama3.2-1b": {
        **_LLAMA,
        "num_layers": 16,
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_size": 8192,
        "vocab_size": 128256,
        "max_positions": 131072,
        "rope_theta": 5e5,
        "rope_scaling": _LLAMA3_SCALING,
    },
    "mistral-7b": {  # v0.1; later ones have no window
        **_LLAMA,
        "num_layers": 32,
        "hidden_size": 4096,
        "num_heads": 32,
        "num_kv_heads": 8,
        "ffn_size": 14336,
        "vocab_size": 32000,
        "max_positions": 32768,
        "sliding_window": 4096,
        "tied": False,
    },
    "qwen2.5-0.5b": {
        **_QWEN,
        "num_layers": 24,
        "hidden_size": 896,
        "num_heads": 14,
        "num_kv_heads": 2,
        "ffn_size": 4864,
        "max_positions": 32768,
        "bias": "qkv",
    },
    "qwen3-0.6b": {
        **_QWEN,
        "num_layers": 28,
        "hidden_size": 1024,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_size": 128,
        "ffn_size": 3072,
        "max_positions": 40960,
        "qk_norm": True,
    },
    "qwen3-4b": {
        **_QWEN,
        "num_layers": 36,
        "hidden_size": 2560,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 128,
        "ffn_size": 9728,
        "max_positions": 40960,
        "qk_norm": True,
    },
    "smollm2-135m": {
        **_SMOLLM2,
        "num_layers": 30,
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "ffn_size": 1536,
    },
    "smollm2-360m": {
        **_SMOLLM2,
        "num_layers": 32,
        "hidden_size": 960,
        "num_heads": 15,
        "num_kv_heads": 5,
        "ffn_size": 2560,
    },
    "smollm2-1.7b": {
        **_SMOLLM2,
        "num_layers": 24,
        "hidden_size": 2048,
        "num_heads": 32,
        "ffn_size": 8192,
        "rope_theta": 1.3e5,
    },
    "tinyllama-1.1b": {
        **_LLAMA,
        "num_layers": 22,
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "ffn_size": 5632,
        "vocab_size": 32000,
        "max_positions": 2048,
        "tied": False,
    },
    "stories15m": {
        **_LLAMA,
        "num_layers": 6,
        "hidden_size": 288,
        "num_heads": 6,
        "ffn_size": 768,
        "vocab_size": 32000,
        "max_positions": 256,
    },
}

_ALIASES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1.5B": "gpt2-xl", "gpt2-small": "gpt2"}


def names() -> list[str]:
    return list(_SHAPES)


def aliases() -> dict[str, str]:
    return dict(_ALIASES)


def near(name: str) -> str:
    """The preset that a misspelt name may mean; empty where there is none."""
    known = {key.lower(): key for key in [*_SHAPES, *_ALIASES]}
    spelled = difflib.get_close_matches(name.lower(), known, 1, 0.6)
    return known[spelled[0]] if spelled else ""


def find(name: str) -> dict[str, Any]:
    """The `model` section of a preset."""
    known = {key.lower(): key for key in [*_SHAPES, *_ALIASES]}
    key = known.get(name.lower())
    if key is None:
        meant = f" Did you mean {preset}?" if (preset := near(name)) else ""
        raise ConfigError("preset", [f"'{name}' is not known.{meant} Presets: {', '.join([*_SHAPES, *_ALIASES])}."])
    return deepcopy(_SHAPES[_ALIASES.get(key, key)])


def model_config(name: str) -> ModelConfig:
    return ModelConfig.model_validate(find(name))
