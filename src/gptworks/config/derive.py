"""Numbers that follow from others: exact, or refused."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gptworks.config.schema import AXES, BatchConfig, OptimConfig, ParallelConfig, TrainConfig
from gptworks.errors import ConfigError, UsageError


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

    @property
    def degrees(self) -> str:
        """As in a configuration: pp=2 x tp=2."""
        return " x ".join(f"{name}={size}" for name, size in vars(self).items() if size > 1) or "all of them 1"

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """The reverse of str: `tp2.pp2`, in any order."""
        sizes: dict[str, int] = {}
        for piece in [] if text == "1" else text.split("."):
            found = re.fullmatch(r"(pp|dp|fsdp|tp)([1-9][0-9]*)", piece)
            if not found:
                raise UsageError(
                    f"layout {text!r}: {piece!r} is not an axis and a number. Needed: such as tp2.pp2, of the axes "
                    f"{', '.join(AXES)}."
                )
            if found[1] in sizes:
                raise UsageError(f"layout {text!r}: {found[1]} is said twice. Say it once.")
            sizes[found[1]] = int(found[2])
        return cls(**sizes)

    @classmethod
    def known(cls, parallel: ParallelConfig) -> "Layout":
        """What the configuration says without knowing the world: 1 where it says auto."""
        return cls(**{axis: 1 if isinstance(size, str) else size for axis, size in _degrees(parallel).items()})


def solve_layout(parallel: ParallelConfig, world_size: int, takes: Callable[[Layout], bool] | None = None) -> Layout:
    """The layout of a world of so many processes: the product is the world, or it is refused. `takes`: whether a layout
    suits the model, so that no other is proposed."""
    asked, known = _degrees(parallel), Layout.known(parallel)
    auto = next((axis for axis, size in asked.items() if size == "auto"), None)
    if auto and world_size % known.world_size == 0:
        return Layout(**vars(known) | {auto: world_size // known.world_size})
    if known.world_size == world_size:
        return known
    needed = f"a multiple of {known.world_size} ranks" if auto else f"{known.world_size} ranks"
    ratio = {axis: size for axis, size in vars(known).items() if axis != auto}

    def distance(layout: Layout) -> tuple[float, ...]:
        """How many degrees would change, by how much, and whether the directions that cost most grow."""
        here = vars(layout)
        return (
            sum(here[axis] != size for axis, size in ratio.items()),
            sum(abs(math.log(here[axis] / size)) for axis, size in ratio.items()),
            layout.pp * layout.tp,
        )

    suiting = [layout for layout in layouts(world_size) if takes is None or takes(layout)]
    nearest = sorted(suiting, key=distance)[:3]
    fits = f"Fits: {', or '.join(layout.degrees for layout in nearest)}." if nearest else "No layout of so many fits."
    if takes is not None and world_size % known.world_size:
        below = world_size // known.world_size * known.world_size
        near = f"{below} or {below + known.world_size}" if below else str(known.world_size)
        fits += f" {known.degrees} itself goes with {near} ranks" + ("." if auto else " (and parallel.dp=auto).")
    raise ConfigError("parallel", [f"parallel: {known.degrees} needs {needed}, but the world has {world_size}. {fits}"])


def with_layout(parallel: ParallelConfig, layout: Layout) -> ParallelConfig:
    """The same with all four numbers known; what follows from them follows anew."""
    return ParallelConfig(**parallel.model_dump(exclude_unset=True) | vars(layout))


def _degrees(parallel: ParallelConfig) -> dict[str, int | str]:
    return {axis: getattr(parallel, axis) for axis in AXES}


def layouts(world_size: int) -> Iterator[Layout]:
    """All layouts of so many processes."""
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for pp in divisors:
        for dp in (n for n in divisors if world_size % (pp * n) == 0):
            for fsdp in (n for n in divisors if world_size % (pp * dp * n) == 0):
                yield Layout(pp, dp, fsdp, world_size // (pp * dp * fsdp))


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


def num_steps(
    train: TrainConfig, samples_per_epoch: int, global_size: int, seq_len: int, *, step: int = 0, consumed: int = 0
) -> int:
    """The last optimizer step. Epochs are rounded down to whole batches (never below one), tokens up.

    `step`, `consumed`: the steps and samples that are done, perhaps with another batch.
    """
    if train.steps:
        return train.steps
    if train.epochs:
        left = math.floor((train.epochs * samples_per_epoch - consumed) / global_size + 1e-9)
        return max(1, step + max(0, left))
    if train.tokens:
        return step + max(0, math.ceil((train.tokens - consumed * seq_len) / (global_size * seq_len)))
    raise ConfigError(
        "train", ["train.steps: how long to train is not said. Set one of train.steps, train.epochs, train.tokens."]
    )
