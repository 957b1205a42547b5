"""Numbers that follow from others: exact, or refused."""

import math
from dataclasses import dataclass

from gptworks.config.schema import BatchConfig, OptimConfig, TrainConfig
from gptworks.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """How many processes there are in each direction, outermost first: neighbours in `tp` talk most."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def data_parallel(self) -> int:
        """Ranks that read different samples."""
        return self.dp * self.fsdp

    def __str__(self) -> str:
        """Such as pp2.tp2; "1" where there is one process."""
        return ".".join(f"{name}{size}" for name, size in vars(self).items() if size > 1) or "1"


@dataclass(frozen=True)
class BatchPlan:
    """global_size = micro_size x accumulation x data_parallel, all known."""

    global_size: int
    micro_size: int
    accumulation: int
    data_parallel: int


def solve_batch(batch: BatchConfig, data_parallel: int) -> BatchPlan:
    """Fill in what is missing of the batch equation."""
    total, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    equation = "batch.global_size = batch.micro_size x batch.accumulation x data-parallel"

    def refuse(got: str, fix: str) -> ConfigError:
        return ConfigError("batch", [f"batch.global_size: {got}; needs {equation}. {fix}"])

    def divide(what: int, by: int, name: str) -> int:
        if what % by:
            below, above = what // by * by, (what // by + 1) * by
            nearest = f"{below} or {above}" if below else str(above)
            raise refuse(f"{what} is not a multiple of {name} = {by}", f"Nearest: global_size={nearest}.")
        return what // by

    if not total:
        micro, accumulation = micro or 1, accumulation or 1
        return BatchPlan(micro * accumulation * data_parallel, micro, accumulation, data_parallel)
    if micro and accumulation:
        product = micro * accumulation * data_parallel
        if product != total:
            raise refuse(
                f"{total} is not {micro} x {accumulation} x {data_parallel} = {product}",
                f"Set batch.global_size={product}, or leave one of the three out.",
            )
    elif micro:
        accumulation = divide(total, micro * data_parallel, f"micro_size x data-parallel ({micro} x {data_parallel})")
    elif accumulation:
        micro = divide(
            total, accumulation * data_parallel, f"accumulation x data-parallel ({accumulation} x {data_parallel})"
        )
    else:
        micro, accumulation = divide(total, data_parallel, "data-parallel"), 1
    return BatchPlan(total, micro, accumulation, data_parallel)


def cooldown_steps(optim: OptimConfig, end: int) -> int:
    """Length of the final descent of a wsd schedule that ends at step `end`."""
    return optim.cooldown_steps or max(1, end // 5)


def num_steps(train: TrainConfig, samples_per_epoch: int, global_size: int, seq_len: int) -> int:
    """The last optimizer step. Epochs are rounded down to whole batches (never below one), tokens up."""
    if train.steps:
        return train.steps
    if train.epochs:
        return max(1, math.floor(train.epochs * samples_per_epoch / global_size + 1e-9))
    if train.tokens:
        return math.ceil(train.tokens / (global_size * seq_len))
    raise ConfigError(
        "train", ["train.steps: how long to train is not said. Set one of train.steps, train.epochs, train.tokens."]
    )
