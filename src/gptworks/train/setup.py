"""All that can be known, and can fail, before a weight exists or a file is written."""

from dataclasses import dataclass, replace

from gptworks import cpu
from gptworks.checkpoint.systems.huggingface_families import family_of
from gptworks.config import checks
from gptworks.config.checks import fit_layout
from gptworks.config.derive import BatchPlan, evaluate_every, has_held_out, num_steps, plan_batch
from gptworks.config.schema import DataConfig, ModelConfig, OptimConfig, ParallelConfig, RunConfig
from gptworks.counted import counted
from gptworks.data import foreign_order, provenance
from gptworks.data.dataset import Dataset
from gptworks.data.loader import Batches
from gptworks.data.mixture import Stage
from gptworks.data.passed_over import PassedOver
from gptworks.data.windows import LocatedSamples, OrderedSamples
from gptworks.errors import CheckpointError, ConfigError, EmptySplitError
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.plan import sizes
from gptworks.tokenizer import Tokenizer
from gptworks.train import native_blocks, schedule, trackers, what_is_measured
from gptworks.train.precision import DTYPES

# Rows of the vocabulary that no token uses are worth a word from this share and this number of parameters on.
_MANY_UNUSED, _LEAST_UNUSED = 0.05, 1e6


@dataclass(frozen=True)
class Setup:
    world: World
    dataset: Dataset
    train_samples: LocatedSamples
    held_out: OrderedSamples | None
    batch: BatchPlan
    last_step: int
    vocab_size: int
    evaluate_every: int  # 0 = never
    samples_asked: int | None  # of training; None where the order does not depend on it
    parallel: ParallelConfig  # with the number that auto stands for
    stages: tuple[Stage, ...] = ()  # the weights of the stores, from which sample on
    notes: tuple[str, ...] = ()  # about what was left open and is off

    def going_on(self, cfg: RunConfig, step: int, consumed: int) -> "Setup":
        """After so many steps and samples, perhaps with another batch than now."""
        last_step = _last_step(cfg, self.train_samples.per_epoch, self.batch.global_size, step=step, consumed=consumed)
        every = evaluate_every(cfg.evaluate, last_step, cfg.train.log_every) if self.held_out else 0
        return replace(self, last_step=last_step, evaluate_every=every)

    def with_stages(self, stages: tuple[Stage, ...]) -> "Setup":
        """With weights as a run has had them until now, and will have them from here on."""
        if stages == self.stages:
            return self
        return replace(self, stages=stages, train_samples=self.dataset.samples("train", stages=stages))

    def batches(self, consumed: int = 0, passed_over: PassedOver | None = None) -> Batches:
        return Batches(
            self.train_samples,
            self.batch,
            self.dataset.eod_policy,
            vocab_size=self.vocab_size,
            data_rank=self.world.data_rank,
            consumed=consumed,
            passed_over=passed_over,
        )

    def origins(self, sample_ids: list[int]) -> list[provenance.Origin]:
        """Where these training samples come from."""
        return provenance.origins(self.dataset.stores, self.train_samples, sample_ids, self.dataset.tokenizer)


def prepare(cfg: RunConfig, world: World | None = None) -> Setup:
    """Open the data, solve the batch equation, count the steps. `world`: None = the one the environment tells of."""
    world = world or process_group.start(cfg.parallel, cfg.run, identity(cfg))
    if world.computes_on_cpu:
        cpu.require(DTYPES[cfg.precision.compute])
    parallel = fit_layout(cfg, world.layout)
    if cfg.checkpoint.portable:
        _require_portable(cfg.model)
    dataset = Dataset(cfg.data, vocab_size=cfg.model.vocab_size, seed=cfg.train.seed)
    what_is_measured.check(cfg, dataset.tokenizer)
    trackers.require_installed(cfg.run.track)
    per_epoch = dataset.samples_per_epoch("train")
    batch = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel)
    last_step = _last_step(cfg, per_epoch, batch.global_size)
    _refuse_end_of_stages(cfg.data, last_step * batch.global_size * cfg.data.seq_len)
    every = evaluate_every(cfg.evaluate, last_step, cfg.train.log_every)
    asked = {
        split: foreign_order.num_samples(
            split,
            steps=last_step,
            global_size=batch.global_size,
            evaluate_every=every,
            evaluate_batches=cfg.evaluate.batches,
        )
        for split in ("train", "held_out")
        if dataset.has_foreign_order
    }
    train_samples = dataset.samples("train", asked.get("train"))
    held_out, notes = _held_out(cfg, dataset, asked.get("held_out")) if every else (None, [])
    return Setup(
        world=world,
        dataset=dataset,
        train_samples=train_samples,
        held_out=held_out,
        batch=batch,
        last_step=last_step,
        vocab_size=cfg.model.vocab_size,
        evaluate_every=every if held_out else 0,
        samples_asked=asked.get("train"),
        parallel=parallel,
        stages=dataset.stages,
        notes=(
            *notes,
            *_about_vocabulary(cfg.model, cfg.init.checkpoint, dataset.tokenizer),
            *_about_rate(cfg.optim, last_step),
            *_about_products(cfg, world),
        ),
    )


def _about_products(cfg: RunConfig, world: World) -> list[str]:
    compute = cfg.precision.compute
    if not world.computes_on_cpu or native_blocks.multiplies_by_itself(cfg.model, cfg.train, compute, world):
        return []
    return list(filter(None, [cpu.about_speed(compute)]))


def _refuse_end_of_stages(data: DataConfig, tokens: int) -> None:
    end = data.stages[-1].to_tokens if data.stages else 0
    if end and tokens > end:
        raise ConfigError(
            "data",
            [
                f"data.stages: the last one ends at {end:,} tokens, but training goes on to {tokens:,}. Add a stage, "
                "leave its to_tokens out, or train for less."
            ],
        )


def _require_portable(model: ModelConfig) -> None:
    """Not at the first checkpoint, after hours."""
    try:
        family_of(model)
    except CheckpointError as error:
        raise ConfigError(
            "checkpoint",
            [
                "checkpoint.portable: true writes a Hugging Face folder with each checkpoint; there is none for such "
                f"a model: {error} Set checkpoint.portable: false, or change the model."
            ],
        ) from None


# Names of files, which machines may have in places of their own; that they hold the same is checked when they are read.
_LOCAL = {"data.path", "data.held_out_path", "data.tokenizer", "init.checkpoint"}


def identity(cfg: RunConfig) -> dict[str, object]:
    """What all ranks must have been told alike, by dotted names."""
    sections = cfg.model_dump(mode="json", exclude={"run"})
    named = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    return {name: value for name, value in named.items() if name not in _LOCAL}


def _held_out(cfg: RunConfig, dataset: Dataset, asked: int | None) -> tuple[OrderedSamples | None, list[str]]:
    """What evaluation reads. It is off, which is said, where nobody asked for it and a small corpus leaves nothing."""
    is_auto = cfg.evaluate.every == "auto"
    if is_auto and not has_held_out(cfg.data):
        return None, []
    try:
        samples = dataset.samples("held_out", asked)
        return samples, [f"not evaluated on: {reason}" for reason in dataset.not_measured("held_out")]
    except EmptySplitError as error:
        needs_it = cfg.checkpoint.keep_best or cfg.evaluate.patience
        if not is_auto or needs_it:
            raise
        return None, [f"no evaluation: {error}"]


def _about_vocabulary(model: ModelConfig, checkpoint: str, tokenizer: Tokenizer | None) -> list[str]:
    """Rows that no token of the data uses, where they are many and the weights of a checkpoint do not need them."""
    unused = model.vocab_size - tokenizer.vocab_size if tokenizer and not checkpoint else 0
    saved = unused * model.hidden_size * (1 if model.tied else 2)
    total = sizes.num_parameters(model)
    if tokenizer is None or saved < max(_MANY_UNUSED * total, _LEAST_UNUSED):
        return []
    return [
        f"model.vocab_size: {model.vocab_size:,} rows, but the tokenizer of the data has {tokenizer.vocab_size:,} "
        f"tokens. A new run with model.vocab_size={tokenizer.vocab_size} saves {saved / 1e6:,.1f}M of "
        f"{total / 1e6:,.1f}M parameters ({saved / total:.0%})."
    ]


def _about_rate(optim: OptimConfig, last_step: int) -> list[str]:
    """A run all of whose steps have rate 0 changes nothing, which nobody should take for training."""
    if not optim.lr or schedule.highest_until(last_step, optim, last_step):
        return []
    is_warmup = optim.warmup_steps and optim.warmup_from == 0 and last_step == 1
    why, instead = (
        ("the warmup begins at 0", "optim.warmup_from=1")
        if is_warmup
        else (
            f"optim.schedule {optim.schedule} comes to optim.min_lr ({optim.min_lr:g}) in the last step",
            "optim.schedule=constant or an optim.min_lr",
        )
    )
    return [
        f"the learning rate is 0 in the whole run ({counted(last_step, 'step')}), so nothing is learned: {why}. Train "
        f"for more steps, or set {instead}."
    ]


def _last_step(cfg: RunConfig, per_epoch: int, global_size: int, *, step: int = 0, consumed: int = 0) -> int:
    last = num_steps(cfg.train, per_epoch, global_size, cfg.data.seq_len, step=step, consumed=consumed)
    too_long = checks.warmup_fits(cfg.optim, cfg.optim.decay_steps or last, "the training")
    if too_long:
        raise ConfigError("optim", too_long)
    return last


def show_first_batch(setup: Setup) -> str:
    """The first micro-batch, decoded, with what is scored and where documents begin."""
    batch = setup.batches().next_step()[0]
    tokenizer = setup.dataset.tokenizer

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids) if tokenizer else " ".join(str(i) for i in ids)

    lines = []
    for row in range(len(batch.tokens)):
        tokens, labels = batch.tokens[row].tolist(), batch.labels[row].tolist()
        scored = [label for label in labels if label >= 0]
        lines += [f"--- sample {int(batch.sample_ids[row])}: {len(tokens)} tokens, {len(scored)} scored", text(tokens)]
        if len(scored) < len(tokens):
            lines += ["--- scored:", text(scored)]
        if batch.positions is not None:
            lines.append(f"--- positions start again {int((batch.positions[row, 1:] == 0).sum())} times")
        if batch.segments is not None:
            lines.append(f"--- {int(batch.segments[row].max()) + 1} documents; attention stays within each")
    return "\n".join(lines)
