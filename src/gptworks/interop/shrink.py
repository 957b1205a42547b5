"""A large configuration made small enough to try on a laptop, with the same shape of layout and batch."""

import re
from collections.abc import Mapping
from math import gcd
from pathlib import Path
from typing import Any

STEPS, LENGTH, WIDTH = 10, 64, 64
SCALE = 65536.0  # more would be halved step by step, and no update done, for all of so few steps
NEW_TOKENS = 16
_LOGITS = 2**22  # of a micro-batch: beyond, a large vocabulary costs more than the rest of a tiny model
_SHAPE = (
    "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "ffn_size", "vocab_size", "max_positions"
)  # fmt: skip


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """What is changed: width, depth, context, numbers of steps, the micro-batch of a large vocabulary.

    Layout, rates, accumulation and data stay, and the model of a checkpoint that is to be trained further.
    """
    small = dict(config)
    stages = config.get("parallel.pp", 1) * config.get("parallel.virtual_stages", 1)
    heads = num_heads(config)
    small["data.seq_len"] = min(config.get("data.seq_len", 1024), LENGTH)
    if config.get("init.checkpoint"):
        for name in _SHAPE:  # it says so itself, and may have been shrunk as well
            small.pop(f"model.{name}", None)
    else:
        small |= {
            "model.num_layers": max(2, stages) if max(2, stages) % stages == 0 else stages,
            "model.hidden_size": WIDTH * max(1, heads // 4),
            "model.num_heads": heads,
            "model.ffn_size": 4 * WIDTH * max(1, heads // 4),
            "model.max_positions": min(config.get("model.max_positions", 1024), LENGTH),
        }
        if config.get("model.head_size"):
            small["model.head_size"] = small["model.hidden_size"] // heads
        if shared := config.get("model.num_kv_heads"):
            small["model.num_kv_heads"] = gcd(shared, heads)
    micro, batch = config.get("batch.micro_size", 0), config.get("batch.global_size", 0)
    logits = micro * small["data.seq_len"] * config.get("model.vocab_size", 50257)
    if micro > 1 and batch % micro == 0 and logits > _LOGITS:
        small |= {"batch.micro_size": 1, "batch.global_size": batch // micro}
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


def num_heads(config: Mapping[str, Any]) -> int:
    """The heads of a tiny model, which can be divided among its tensor-parallel ranks."""
    ranks: int = config.get("parallel.tp", 1)
    return 4 if 4 % ranks == 0 else ranks


def describe(config: Mapping[str, Any], small: Mapping[str, Any]) -> str:
    def after(key: str) -> Any:
        if key in small:
            return small[key]
        return "that of the checkpoint" if key.startswith("model.") else "unset"

    changed = [
        f"{key}: {config.get(key, 'unset')} -> {after(key)}"
        for key in {**config, **small}
        if config.get(key) != small.get(key)
    ]
    return "--shrink tiny: " + ", ".join(changed)


def newest_step(name: str, folder: Path) -> str:
    """The newest checkpoint there is, in place of one that is named by its step (model_1000/...) and is not there."""
    parts = Path(name).parts
    for depth, part in enumerate(parts):
        here, named = Path(*parts[:depth]), re.fullmatch(r"(\D*)(\d+)(\D*)", part)
        if named is None or (folder / here / part).exists() or not (folder / here).is_dir():
            continue
        pattern = re.compile(re.escape(named[1]) + r"(\d+)" + re.escape(named[3]))
        steps = {int(match[1]): match[0] for match in map(pattern.fullmatch, _names(folder / here)) if match}
        return str(Path(here, steps[max(steps)], *parts[depth + 1 :])) if steps else name
    return name


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]
