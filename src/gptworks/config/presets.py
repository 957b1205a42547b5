"""Model shapes by name. A preset fills the `model` section; everything else comes from the recipe."""

import difflib
from typing import Any

from gptworks.config.schema import ModelConfig
from gptworks.errors import ConfigError

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
}

_ALIASES = {"124M": "gpt2", "355M": "gpt2-medium", "774M": "gpt2-large", "1.5B": "gpt2-xl", "gpt2-small": "gpt2"}


def names() -> list[str]:
    return list(_SHAPES)


def aliases() -> dict[str, str]:
    return dict(_ALIASES)


def find(name: str) -> dict[str, Any]:
    """The `model` section of a preset."""
    known = {key.lower(): key for key in [*_SHAPES, *_ALIASES]}
    key = known.get(name.lower())
    if key is None:
        near = difflib.get_close_matches(name.lower(), known, 1, 0.6)
        meant = f" Did you mean {known[near[0]]}?" if near else ""
        raise ConfigError("preset", [f"'{name}' is not known.{meant} Presets: {', '.join([*_SHAPES, *_ALIASES])}."])
    return dict(_SHAPES[_ALIASES.get(key, key)])


def model_config(name: str) -> ModelConfig:
    return ModelConfig(**find(name))
