"""Checks that need more than one section. Each takes just the sections it reads and returns its complaints."""

import inspect
from collections.abc import Callable
from typing import Any

from gptworks.config.derive import cooldown_steps, solve_batch
from gptworks.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
)
from gptworks.errors import ConfigError

Complaints = list[str]


def sequence_fits_positions(data: DataConfig, model: ModelConfig) -> Complaints:
    if data.seq_len <= model.max_positions:
        return []
    return [
        f"data.seq_len: {data.seq_len} is longer than model.max_positions ({model.max_positions}). "
        f"Set data.seq_len={model.max_positions}, or model.max_positions={data.seq_len}."
    ]


def learning_rate_falls(optim: OptimConfig) -> Complaints:
    if optim.min_lr <= optim.lr or optim.allow_rising_lr or optim.schedule == "constant":
        return []
    return [
        f"optim.min_lr: {optim.min_lr:g} is above optim.lr ({optim.lr:g}). Swap them, set optim.schedule: constant, "
        "or optim.allow_rising_lr: true if the rate is meant to rise after the warmup."
    ]


def warmup_ends(optim: OptimConfig, train: TrainConfig) -> Complaints:
    last, name = (optim.decay_steps, "optim.decay_steps") if optim.decay_steps else (train.steps, "train.steps")
    if not last:
        return []  # the number of steps comes from epochs or tokens: checked again when it is known
    return warmup_fits(optim, last, name)


def warmup_fits(optim: OptimConfig, last: int, name: str) -> Complaints:
    complaints = []
    if optim.warmup_steps > last:
        complaints.append(
            f"optim.warmup_steps: {optim.warmup_steps:g} is longer than {name} ({last}). Shorten the warmup."
        )
    elif optim.schedule == "wsd" and optim.warmup_steps + cooldown_steps(optim, last) > last:
        complaints.append(
            f"optim.cooldown_steps: warmup ({optim.warmup_steps:g}) and cooldown ({cooldown_steps(optim, last)}) "
            f"together are longer than {name} ({last}). Shorten one of them."
        )
    return complaints


def batch_equation(batch: BatchConfig, parallel: ParallelConfig) -> Complaints:
    try:
        solve_batch(batch, parallel.data_parallel)
    except ConfigError as error:
        return error.problems
    return []


def evaluation_has_data(evaluate: EvaluateConfig, data: DataConfig, checkpoint: CheckpointConfig) -> Complaints:
    complaints = []
    held_out = data.held_out_path or (data.split[1] if len(data.split) > 1 else 0.0)
    if evaluate.every and not held_out:
        complaints.append(
            f"evaluate.every: {evaluate.every}, but data.split {list(data.split)} leaves nothing held out. "
            "Set evaluate.every=0, a second share such as data.split='949,50,1', or data.held_out_path."
        )
    for name, wanted in (
        ("checkpoint.keep_best", checkpoint.keep_best),
        ("evaluate.patience", evaluate.patience),
    ):
        if wanted and not evaluate.every:
            complaints.append(f"{name}: {str(wanted).lower()} needs a held-out loss. Set evaluate.every.")
    return complaints


CHECKS: list[Callable[..., Complaints]] = [
    sequence_fits_positions,
    learning_rate_falls,
    warmup_ends,
    batch_equation,
    evaluation_has_data,
]


def find(sections: dict[str, Any]) -> Complaints:
    """Run every check whose sections are all there (a section with a type error is reported for that alone)."""
    complaints: Complaints = []
    for check in CHECKS:
        needed = inspect.signature(check).parameters
        if all(name in sections for name in needed):
            complaints += check(**{name: sections[name] for name in needed})
    return complaints
