"""A large configuration made small enough to try on a laptop, with the same shape of layout and batch."""

from collections.abc import Mapping
from typing import Any

STEPS, LENGTH, WIDTH = 10, 64, 64


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is changed: width, depth, context, numbers of steps. Layout, rates and data stay."""
    small = dict(config)
    stages = config.get("parallel.pp", 1) * config.get("parallel.virtual_stages", 1)
    ranks = config.get("parallel.tp", 1)
    heads = 4 if 4 % ranks == 0 else ranks
    small |= {
        "model.num_layers": max(2, stages) if max(2, stages) % stages == 0 else stages,
        "model.hidden_size": WIDTH * max(1, heads // 4),
        "model.num_heads": heads,
        "model.ffn_size": 4 * WIDTH * max(1, heads // 4),
        "model.max_positions": min(config.get("model.max_positions", 1024), LENGTH),
        "data.seq_len": min(config.get("data.seq_len", 1024), LENGTH),
    }
    if config.get("train.steps"):
        small["train.steps"] = min(config["train.steps"], STEPS)
        for key in ("checkpoint.every", "evaluate.every"):
            if config.get(key):
                small[key] = min(config[key], small["train.steps"])
        if config.get("evaluate.batches"):
            small["evaluate.batches"] = min(config["evaluate.batches"], 2)
    return small


def describe(config: Mapping[str, Any], small: Mapping[str, Any]) -> str:
    changed = [
        f"{key}: {config.get(key, 'unset')} -> {value}" for key, value in small.items() if config.get(key) != value
    ]
    return "--shrink tiny: " + ", ".join(changed)
