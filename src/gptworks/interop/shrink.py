"""A large configuration made small enough to try on a laptop, with the same shape of layout and batch."""

from collections.abc import Mapping
from typing import Any

STEPS, LENGTH, WIDTH = 10, 64, 64
SCALE = 65536.0  # more would be halved step by step, and no update done, for all of so few steps


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
    if config.get("data.too_long"):
        small["data.too_long"] = "truncate"  # rows that were cut for the long context
    if config.get("generate.max_new_tokens"):
        small["generate.max_new_tokens"] = min(config["generate.max_new_tokens"], LENGTH)
    if config.get("precision.scaler.init"):
        small["precision.scaler.init"] = min(config["precision.scaler.init"], SCALE)
    if small.pop("train.epochs", None):
        small["train.steps"] = STEPS
    if small.get("train.steps"):
        small["train.steps"] = min(small["train.steps"], STEPS)
        for key in ("checkpoint.every", "evaluate.every"):
            if config.get(key):
                small[key] = min(config[key], small["train.steps"])
        if config.get("evaluate.batches"):
            small["evaluate.batches"] = min(config["evaluate.batches"], 2)
        if config.get("optim.warmup_steps") and not config.get("optim.decay_steps"):  # it ends with the training
            small["optim.warmup_steps"] = min(config["optim.warmup_steps"], small["train.steps"] / 2)
    return small


def describe(config: Mapping[str, Any], small: Mapping[str, Any]) -> str:
    changed = [
        f"{key}: {config.get(key, 'unset')} -> {small.get(key, 'unset')}"
        for key in {**config, **small}
        if config.get(key) != small.get(key)
    ]
    return "--shrink tiny: " + ", ".join(changed)
