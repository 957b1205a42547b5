"""Numbers that follow from others: exact, or refused."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gptworks.config.schema import (
    AXES,
    BatchConfig,
    DataConfig,
    EvaluateConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from gptworks.config.stages import check_micro_batches
from gptworks.errors import ConfigError, UsageError

# Tokens of a step where nobody says, up to so many parameters in the matrices of the blocks: those of the quickstart,
# of nanoGPT's shakespeare_char, half-way, and from GPT-2 on those of Brown et al. 2020 (GPT-3), table 2.1.
_USUAL_TOKENS = ((2e6, 2**11), (2e7, 2**14), (6e7, 2**17), (1e9, 2**19), (5e9, 2**20), (1e11, 2**21))
_MOST_USUAL_TOKENS = 3 * 2**20
_MICRO_NUMBERS = 2**22  # of the hidden states of one micro-batch where nobody says: 4 samples of GPT-2's 1,024 x 768
_MICRO_BATCHES_PER_STAGE = 4  # of a pipeline where nobody says: its ranks wait less than a fifth of the time
_EVALUATIONS = 10  # of a run where nobody says


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
            degree = re.fullmatch(r"(pp|dp|fsdp|tp)([1-9][0-9]*)", piece)
            if not degree:
                raise UsageError(
                    f"layout {text!r}: {piece!r} is not an axis and a number. Needed: such as tp2.pp2, of the axes "
                    f"{', '.join(AXES)}."
                )
            if degree[1] in sizes:
                raise UsageError(f"layout {text!r}: {degree[1]} is said twice. Say it once.")
            sizes[degree[1]] = int(degree[2])
        return cls(**sizes)

    @classmethod
    def from_config(cls, parallel: ParallelConfig) -> "Layout":
        """What the configuration says without knowing the world: 1 where it says auto."""
        return cls(**{axis: 1 if isinstance(size, str) else size for axis, size in _degrees(parallel).items()})


def solve_layout(parallel: ParallelConfig, world_size: int, takes: Callable[[Layout], bool] | None = None) -> Layout:
    """The layout of a world of so many processes: the product is the world, or it is refused. `takes`: whether a layout
    suits the model, so that no other is proposed."""
    asked, known = _degrees(parallel), Layout.from_config(parallel)
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
    """The section with all four degrees known; what follows from them is derived again."""
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


def usual_samples(model: ModelConfig, seq_len: int, multiple_of: int = 1) -> int:
    """Samples of a step where nobody says how many: such as suit a model of this size. Rounded up to the multiple."""
    in_heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_size
    in_ffn = (2 if model.mlp == "gelu" else 3) * model.ffn_size
    matrices = model.num_layers * model.hidden_size * (in_heads + in_ffn)
    tokens = next((tokens for most, tokens in _USUAL_TOKENS if matrices <= most), _MOST_USUAL_TOKENS)
    return max(1, -(-tokens // seq_len // multiple_of)) * multiple_of


def plan_batch(batch: BatchConfig, model: ModelConfig, seq_len: int, parallel: ParallelConfig) -> BatchPlan:
    """The batch of a run, or of a plan, whose degrees are known. Where nobody says anything of it, it is the usual one
    of such a model; a pipeline gets micro-batches enough to keep its stages busy."""
    layout = Layout.from_config(parallel)
    is_open = not batch.micro_size and not batch.accumulation
    if is_open and not batch.global_size:
        samples = usual_samples(model, seq_len, layout.data_parallel * layout.pp)
    elif is_open and layout.pp > 1:
        samples = batch.global_size
    else:
        return solve_batch(batch, layout.data_parallel)
    plan = solve_batch(BatchConfig(global_size=samples), layout.data_parallel)
    most = max(1, _MICRO_NUMBERS // (model.hidden_size * seq_len))
    micro_size = _micro_size(plan.micro_size, most, layout.pp, parallel.schedule)
    return BatchPlan(samples, micro_size, plan.micro_size // micro_size, layout.data_parallel)


def _micro_size(of_a_rank: int, most: int, pp: int, schedule: str) -> int:
    """The largest up to `most` that divides the samples of a rank, with several for each pipeline stage if there can be
    so many. Where no number of them keeps the stages busy it is all of them, which is refused elsewhere."""

    def is_busy(size: int) -> bool:
        try:
            check_micro_batches(schedule, of_a_rank // size, pp)
        except ConfigError:
            return False
        return True

    sizes = [size for size in range(1, min(of_a_rank, most) + 1) if of_a_rank % size == 0]
    if pp == 1:
        return max(sizes)
    busy = [size for size in sizes if is_busy(size)]
    many = [size for size in busy if of_a_rank // size >= _MICRO_BATCHES_PER_STAGE * pp]
    return max(many) if many else min(busy, default=of_a_rank)


def derived(cfg: RunConfig) -> dict[str, tuple[int, str]]:
    """What a run would take for keys that are left open, and why, as far as the configuration tells."""
    derived: dict[str, tuple[int, str]] = {}
    if "auto" not in (cfg.parallel.dp, cfg.parallel.fsdp, cfg.parallel.pp):
        plan = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, cfg.parallel)
        is_said = any(dict(cfg.batch).values())
        origin = (
            "from the rest of the batch" if is_said else f"suits a model of this size, {cfg.data.seq_len:,} tokens each"
        )
        derived["batch.global_size"] = (plan.global_size, origin)
        derived["batch.micro_size"] = (plan.micro_size, "from the rest of the batch")
        derived["batch.accumulation"] = (plan.accumulation, "from the rest of the batch")
    if cfg.train.steps and has_held_out(cfg.data):
        derived["evaluate.every"] = (
            evaluate_every(cfg.evaluate, cfg.train.steps, cfg.train.log_every),
            "a tenth of train.steps, or train.log_every",
        )
    asked = {"evaluate.every": cfg.evaluate.every} | {f"batch.{name}": size for name, size in cfg.batch}
    return {key: value for key, value in derived.items() if asked[key] in (0, "auto") and value[0] != asked[key]}


def has_held_out(data: DataConfig) -> bool:
    """Whether the configuration holds out anything; of a small corpus it may still be nothing."""
    return bool(data.held_out_path) or (len(data.split) > 1 and data.split[1] > 0)


def evaluate_every(evaluate: EvaluateConfig, last_step: int, log_every: int) -> int:
    """Steps between evaluations; `auto` is ten evaluations in a run, but no more of them than log lines."""
    return max(log_every, last_step // _EVALUATIONS) if evaluate.every == "auto" else evaluate.every


def solve_batch(batch: BatchConfig, data_parallel: int) -> BatchPlan:
    """Fill in what is missing of the batch equation, of which one number at least is given."""
    total, micro, accumulation = batch.global_size, batch.micro_size, batch.accumulation
    equation = "batch.global_size = batch.micro_size x batch.accumulation x data-parallel"

    def refuse(got: str, fix: str) -> ConfigError:
        return ConfigError("batch", [f"batch.global_size: {got}; needs {equation}. {fix}"])

    def divide(number: int, by: int, name: str) -> int:
        if number % by:
            below, above = number // by * by, (number // by + 1) * by
            nearest = f"{below} or {above}" if below else str(above)
            raise refuse(f"{number} is not a multiple of {name} = {by}", f"Nearest: global_size={nearest}.")
        return number // by

    if not (total or micro or accumulation):
        raise ValueError("nothing is given of the batch equation: plan_batch knows what is usual")
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
    raise _no_end()


def require_end(train: TrainConfig) -> None:
    """Before anything is read or written."""
    if not any(train.ends().values()):
        raise _no_end()


def _no_end() -> ConfigError:
    return ConfigError(
        "train", ["train.steps: how long to train is not said. Set one of train.steps, train.epochs, train.tokens."]
    )
