"""Going on from a checkpoint: what may have changed in the configuration and what may not."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.checkpoint.manifest import Manifest
from gptworks.config.derive import BatchPlan
from gptworks.config.load import flatten
from gptworks.config.schema import BatchConfig, ModelConfig, RunConfig
from gptworks.data import mixture
from gptworks.data.dataset import Dataset
from gptworks.data.mixture import Stage
from gptworks.data.passed_over import PassedOver
from gptworks.errors import CheckpointError, DamagedCheckpoint
from gptworks.launch import rank_env

# A change of these would make it another model or another sequence of samples.
_FIXED = (
    "model.",
    "train.seed",
    "data.split",
    "data.held_out_path",
    "data.seq_len",
    "data.order",
    "data.mask_eod",
    "data.reset_",
    "data.too_long",
)
# Decided once, at the first step.
_SPENT = ("init.",)
# Dropout may be changed on the way; it belongs to how, not to what.
_FREE_OF_MODEL = ("model.dropout_", "model.attention")


@dataclass(frozen=True)
class Change:
    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key}: {self.before} -> {self.now}"


def changes(before: dict[str, Any], now: RunConfig) -> list[Change]:
    old, new = flatten(before), flatten(now.model_dump(mode="json"))
    # Keys that came with a later version: what they were then follows from the others.
    try:
        model = ModelConfig.model_validate(before.get("model", {})).model_dump(mode="json")
    except ValueError as error:
        reason = " ".join(str(error).split())[:300]
        raise DamagedCheckpoint(f"the manifest's config.model is not a model: {reason}") from None
    old = flatten({"model": model}) | old
    return [Change(key, old.get(key), new.get(key)) for key in sorted(old | new) if old.get(key) != new.get(key)]


def is_fixed(key: str) -> bool:
    return key.startswith(_FIXED + _SPENT) and not key.startswith(_FREE_OF_MODEL)


def refuse_fixed(changed: list[Change], checkpoint: str) -> None:
    fixed = [change for change in changed if is_fixed(change.key)]
    if fixed:
        listed = "\n".join(f"  {change}" for change in fixed)
        raise CheckpointError(
            f"{checkpoint}: cannot go on with another model or another order of samples:\n{listed}\n"
            f"Set them back, or start anew in another --out; of the same model {_with_its_weights(checkpoint)}"
        )


def refuse_derived_batch(before: Manifest, asked: BatchConfig, now: BatchPlan, checkpoint: str) -> None:
    """Another number of samples per step must be asked for: a layout alone does not change what is learned."""
    if before.global_size in (0, now.global_size) or asked.global_size:
        return
    then = flatten(before.config)
    if any(getattr(asked, name) != then.get(f"batch.{name}") for name in ("micro_size", "accumulation")):
        return
    raise CheckpointError(
        f"{checkpoint}: was trained with {before.global_size} samples per step, but batch.global_size is not set, and "
        f"is now derived as {now.global_size} ({now.data_parallel} data-parallel ranks). Set "
        f"batch.global_size={before.global_size} to go on as before (with a batch.micro_size that fits), or "
        f"batch.global_size={now.global_size} to change it."
    )


def refuse_other_number(before: int | None, now: int | None, read_at_end: int, order: str, checkpoint: str) -> None:
    """The order of another system is laid out for a number of samples; another number is another order.

    `read_at_end` may be more than that when the batch size changed on the way.
    """
    if before == now and (now is None or read_at_end <= now):
        return
    asks = now if before != now else f"{read_at_end} in all"
    raise CheckpointError(
        f"{checkpoint}: the order of samples (data.order: {order}) was laid out for {before}, but this run asks for "
        f"{asks} (steps x batch.global_size). That would be another order: set train.steps (or epochs, tokens) and "
        f"batch.global_size back, or start anew {_with_its_weights(checkpoint)}"
    )


def stages_going_on(before: Manifest, dataset: Dataset, checkpoint: str) -> tuple[Stage, ...]:
    """The weights of the stores as they were, and from the next sample on as they are asked for now."""
    known = mixture.from_json(before.stages)
    weights = flatten(before.config).get("data.weights")
    if not known and weights and len(weights) == len(dataset.cfg.path):  # written before stages were
        known = (Stage(0, dataset.shared_out(tuple(weights))),)
    place = PassedOver.from_json(before.passed_over).place(before.consumed)
    stages: tuple[Stage, ...] | None = None
    if bool(known) == bool(dataset.stages) and not (dataset.has_foreign_order and known != dataset.stages):
        stages = mixture.going_on(known, dataset.stages, place, planned=bool(dataset.cfg.stages))
    if stages is None:
        raise CheckpointError(
            f"{checkpoint}: its samples up to number {place:,} had the weights {_listed(known)}; the configuration "
            f"asks for {_listed(dataset.stages)}. Weights may change from the next sample on, and stages may be added, "
            "but what was read stays as it was, with weights or without any: set data.weights or the first data.stages "
            "back."
        )
    return stages


def _listed(stages: Sequence[Stage]) -> str:
    weights = [f"{', '.join(f'{each:g}' for each in stage.weights)} from sample {stage.first:,} on" for stage in stages]
    return "; ".join(weights) or "none"


def command(run: Path, *more: str) -> str:
    """What a user types to go on with a run, as it was started and with the configuration that it wrote down."""
    started = rank_env.read(os.environ)
    by_us = rank_env.is_supervised(os.environ) and started.local_size == started.world_size > 1
    processes = ["--nproc", str(started.world_size)] if by_us else []
    return shlex.join(["gptworks", "train", "-c", str(run / run_paths.CONFIG), *processes, *more])


def _with_its_weights(checkpoint: str) -> str:
    return f"with its weights: `gptworks train -c CONFIG --out ANOTHER init.checkpoint={checkpoint}`."
