"""Checks that need more than one section. Each takes just the sections it reads and returns its complaints."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from gptworks.config.derive import Layout, cooldown_steps, has_held_out, plan_batch, with_layout
from gptworks.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from gptworks.config.stages import assign_layers, check_micro_batches, check_schedule
from gptworks.errors import ConfigError

Complaints = list[str]

_USUAL_TENSOR_PARALLEL = 8  # devices of a machine: so far, tp that would fit are named


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


def batch_equation(batch: BatchConfig, model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> Complaints:
    if "auto" in (parallel.dp, parallel.fsdp):
        return []  # how many ranks read data is known when the world is: checked again then
    return _refused_by(plan_batch, batch, model, data.seq_len, parallel)


def matrices_divide(model: ModelConfig, parallel: ParallelConfig) -> Complaints:
    """Attention is cut between heads. Heads of keys and values are cut too, or copied where there are fewer of them."""
    if parallel.tp == "auto":
        return []
    complaints = []
    for name in ("num_heads", "num_kv_heads", "ffn_size"):
        if not _divides(parallel.tp, model, name):
            most = max(parallel.tp, _USUAL_TENSOR_PARALLEL)
            keys = ("num_heads", "num_kv_heads", "ffn_size")
            fits = ", ".join(str(n) for n in range(1, most + 1) if all(_divides(n, model, key) for key in keys))
            verb = "neither divides nor is a multiple of" if name == "num_kv_heads" else "does not divide"
            complaints.append(
                f"parallel.tp: {parallel.tp} {verb} model.{name} ({getattr(model, name)}). tp that would fit: {fits}."
            )
    each = -(-model.vocab_size // parallel.tp)  # words of a rank; the last one has what is left
    if each * (parallel.tp - 1) >= model.vocab_size:
        complaints.append(
            f"parallel.tp: {parallel.tp} leaves a rank without rows of model.vocab_size ({model.vocab_size}). "
            "Use a smaller tp."
        )
    return complaints


def _divides(tp: int, model: ModelConfig, name: str) -> bool:
    size = getattr(model, name)
    if name == "num_kv_heads":
        # Where they are as many as heads, the check of heads says it.
        return size % tp == 0 or tp % size == 0 or size == model.num_heads
    return bool(size % tp == 0)


def sequence_divides(data: DataConfig, parallel: ParallelConfig) -> Complaints:
    if not parallel.sequence or parallel.tp == "auto" or data.seq_len % parallel.tp == 0:
        return []
    below = max(n for n in range(1, parallel.tp) if data.seq_len % n == 0)
    return [
        f"data.seq_len: {data.seq_len} is not a multiple of parallel.tp ({parallel.tp}), along which the sequence is "
        f"split. Use a parallel.tp that divides it (next below: {below}), or parallel.sequence: false."
    ]


def stages_have_layers(model: ModelConfig, parallel: ParallelConfig) -> Complaints:
    return _refused_by(assign_layers, model.num_layers, Layout.from_config(parallel).pp * parallel.virtual_stages)


def stages_are_busy(batch: BatchConfig, model: ModelConfig, data: DataConfig, parallel: ParallelConfig) -> Complaints:
    layout = Layout.from_config(parallel)
    if layout.pp == 1 or "auto" in (parallel.dp, parallel.fsdp) or batch_equation(batch, model, data, parallel):
        return []
    plan = plan_batch(batch, model, data.seq_len, parallel)
    return _refused_by(check_micro_batches, parallel.schedule, plan.accumulation, layout.pp)


def pipeline_settings_have_a_pipeline(parallel: ParallelConfig) -> Complaints:
    if parallel.pp != 1:
        return _refused_by(check_schedule, parallel.schedule, parallel.virtual_stages)
    return [
        f"parallel.{name}: {getattr(parallel, name)}, but parallel.pp is 1: there is no pipeline. "
        "Set parallel.pp, or leave it out."
        for name, usual in (("schedule", "1f1b"), ("virtual_stages", 1))
        if getattr(parallel, name) != usual
    ]


def sharding_has_shards(parallel: ParallelConfig) -> Complaints:
    complaints = []
    if parallel.zero and parallel.fsdp == 1:
        complaints.append(
            f"parallel.zero: {parallel.zero} shards over parallel.fsdp, which is 1. Set parallel.fsdp to the number "
            "of shards, or zero: 0."
        )
    if parallel.offload and not parallel.zero:
        complaints.append(
            "parallel.offload: true moves shards to the CPU, but parallel.zero is 0: nothing is sharded. Set "
            "parallel.fsdp above 1 and zero: 1, 2 or 3, or offload: false."
        )
    return complaints


def evaluation_has_data(
    evaluate: EvaluateConfig, data: DataConfig, checkpoint: CheckpointConfig, train: TrainConfig
) -> Complaints:
    complaints = []
    held_out = has_held_out(data)
    is_on = evaluate.every != 0 and (held_out or evaluate.every != "auto")
    if is_on and not held_out:
        complaints.append(
            f"evaluate.every: {evaluate.every}, but data.split {list(data.split)} leaves nothing held out. "
            "Set evaluate.every=0, a second share such as data.split='949,50,1', or data.held_out_path."
        )
    for name, wanted in (
        ("checkpoint.keep_best", checkpoint.keep_best),
        ("evaluate.patience", evaluate.patience),
        ("evaluate.tasks", ", ".join(evaluate.tasks)),
        ("train.sample_prompts", train.sample_prompts and "given"),
    ):
        if wanted and not is_on:
            fix = (
                "Set evaluate.every."
                if held_out
                else "Set a second share such as data.split='949,50,1', or data.held_out_path."
            )
            needed = "a held-out loss" if name in ("checkpoint.keep_best", "evaluate.patience") else "evaluations"
            complaints.append(f"{name}: {str(wanted).lower()} needs {needed}. {fix}")
    return complaints


def stages_have_an_order(data: DataConfig) -> Complaints:
    if not data.stages or data.order in ("shuffled", "sequential"):
        return []
    return [
        f"data.stages: given, but data.order: {data.order} mixes stores as another system does, with one set "
        "of weights. Use data.weights, or data.order: shuffled."
    ]


def rollback_has_an_order(train: TrainConfig, data: DataConfig) -> Complaints:
    if train.guard.action != "rollback" or data.order in ("shuffled", "sequential"):
        return []
    return [
        f"train.guard.action: rollback passes over samples, but data.order: {data.order} is laid out for a fixed "
        "number of them. Use train.guard.action: skip, or data.order: shuffled."
    ]


CHECKS: list[Callable[..., Complaints]] = [
    sequence_fits_positions,
    learning_rate_falls,
    warmup_ends,
    batch_equation,
    evaluation_has_data,
    matrices_divide,
    sequence_divides,
    stages_have_layers,
    stages_are_busy,
    pipeline_settings_have_a_pipeline,
    sharding_has_shards,
    rollback_has_an_order,
    stages_have_an_order,
]

# Those about numbers of the layout and the batch that someone else is still to choose.
LAYOUT_CHECKS = (batch_equation, stages_are_busy, pipeline_settings_have_a_pipeline, sharding_has_shards)


def _refused_by(rule: Callable[..., object], *numbers: Any) -> Complaints:
    """What is refused where it is done too is said there."""
    try:
        rule(*numbers)
    except ConfigError as error:
        return error.problems
    return []


def find(sections: dict[str, Any], without: Collection[Callable[..., Complaints]] = ()) -> Complaints:
    """Run every check whose sections are all there (a section with a type error is reported for that alone)."""
    complaints: Complaints = []
    for check in (check for check in CHECKS if check not in without):
        needed = inspect.signature(check).parameters
        if all(name in sections for name in needed):
            complaints += check(**{name: sections[name] for name in needed})
    return complaints


def suits(cfg: RunConfig, layout: Layout) -> bool:
    """Whether the model can be cut so."""
    parallel = with_layout(cfg.parallel, layout)
    complaints = matrices_divide(cfg.model, parallel) + stages_have_layers(cfg.model, parallel)
    return not complaints + sequence_divides(cfg.data, parallel)


def fit_layout(cfg: RunConfig, layout: Layout) -> ParallelConfig:
    """The parallel section with all numbers known, or what does not go together then."""
    parallel = with_layout(cfg.parallel, layout)
    if parallel != cfg.parallel:  # auto: what depends on it could not be checked before
        problems = find({**dict(cfg), "parallel": parallel})
        if problems:
            raise ConfigError("parallel", problems)
    return parallel
