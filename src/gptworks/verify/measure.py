"""A few steps of training on any layout, with all that is to be compared written down."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gptworks.checkpoint.pretrained import Pretrained, fields_not_stored
from gptworks.config.checks import fit_layout
from gptworks.config.derive import plan_batch, with_layout
from gptworks.config.schema import RunConfig
from gptworks.data.loader import Batches, EodPolicy
from gptworks.data.windows import OrderedSamples, Sample, Source
from gptworks.evaluate.heldout import held_out_loss
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.parallel.build import FreshWeights, WeightSource
from gptworks.parallel.parts import Part
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.run import build_part
from gptworks.train.setup import prepare
from gptworks.train.step import train_step
from gptworks.verify import reference
from gptworks.verify.reference import Compared

WEIGHTS, GRADIENTS = "weights", "gradients"


@dataclass(frozen=True)
class Numbers:
    losses: list[float]
    grad_norms: list[float]
    held_out: float | None


@dataclass(frozen=True)
class LayoutResults:
    """Of all ranks of a layout."""

    numbers: list[Numbers]  # of every rank
    tensors: dict[str, dict[str, Compared]]  # weights and gradients, each against the reference

    def write(self, path: Path) -> None:
        tensors = {
            kind: {name: [one.difference, sorted(one.slices)] for name, one in compared.items()}
            for kind, compared in self.tensors.items()
        }
        path.write_text(json.dumps({"numbers": [asdict(n) for n in self.numbers], "tensors": tensors}))

    @classmethod
    def read(cls, path: Path) -> "LayoutResults":
        values = json.loads(path.read_text(encoding="utf-8"))
        tensors = {
            kind: {
                name: Compared(difference, {tuple(key) for key in slices})
                for name, (difference, slices) in compared.items()
            }
            for kind, compared in values["tensors"].items()
        }
        return cls([Numbers(**n) for n in values["numbers"]], tensors)


class SyntheticSamples:
    """Random tokens. The first of a sample, more or fewer of them, are not scored: ranks have different counts."""

    sources: tuple[Source, ...] = ()

    def __init__(self, vocab_size: int, seq_len: int, seed: int, split: int, per_epoch: int) -> None:
        self.vocab_size, self.seq_len, self.per_epoch = vocab_size, seq_len, per_epoch
        self.seed, self.split = seed, split

    def at(self, first: int, count: int) -> list[Sample]:
        return [self._sample(number) for number in range(first, first + count)]

    def _sample(self, number: int) -> Sample:
        draw = np.random.default_rng([self.seed, self.split, number])
        scored = np.arange(self.seq_len) >= draw.integers(0, max(1, self.seq_len // 2))
        return Sample(draw.integers(0, self.vocab_size, self.seq_len + 1), scored)


def record(cfg: RunConfig, world: World, steps: int, folder: Path, *, synthetic: bool) -> Numbers:
    """One process: its tensors go to the folder."""
    numbers, tensors = _steps(cfg, world, steps, folder, synthetic=synthetic, keep=True)
    assert not tensors
    return numbers


def compare(cfg: RunConfig, world: World, steps: int, folder: Path, *, synthetic: bool) -> LayoutResults:
    """A rank of a layout, against what `record` left in the folder. All ranks get the same."""
    numbers, tensors = _steps(cfg, world, steps, folder, synthetic=synthetic, keep=False)
    everyone: list[tuple[Numbers, dict[str, dict[str, Compared]]]] = Ranks.shared(world).gather((numbers, tensors))
    tensors = {k: reference.merge(t.get(k, {}) for _, t in everyone) for k in (WEIGHTS, GRADIENTS)}
    return LayoutResults([n for n, _ in everyone], tensors)


def _steps(
    cfg: RunConfig, world: World, steps: int, folder: Path, *, synthetic: bool, keep: bool
) -> tuple[Numbers, dict[str, dict[str, Compared]]]:
    parallel = fit_layout(cfg, world.layout)
    batches, held_out, eod_policy = _samples(cfg, world, synthetic=synthetic)
    weights: WeightSource = FreshWeights(cfg.init, cfg.model.num_layers, cfg.train.seed)
    if cfg.init.checkpoint:
        weights = Pretrained.open(cfg.init.checkpoint, shape=fields_not_stored(cfg.model.model_dump())).weights
    part = build_part(cfg, world, parallel, weights)
    optimizer = optim.build(part, cfg.optim)
    scaler = LossScaler(cfg.precision.scaler, enabled=cfg.precision.compute == "fp16")
    tensors: dict[str, dict[str, Compared]] = {}

    def see(kind: str, named: list[tuple[str, Tensor]]) -> None:
        if keep:
            reference.write(folder, kind, named)
        else:
            tensors[kind] = reference.compare(folder, kind, part.as_stored(named), tied=cfg.model.tied)

    see(WEIGHTS, [(name, parameter.detach()) for name, parameter in part.named_parameters()])
    first = _FirstGradients(part, optimizer)
    losses, norms = [], []
    part.train()
    for step in range(1, steps + 1):
        report = train_step(
            part,
            optimizer,
            batches.next_step(),
            world,
            scaler,
            clip=cfg.optim.clip,
            seed=cfg.train.seed,
            step=step,
        )
        losses.append(report.loss)
        norms.append(report.grad_norm)
        if first.named and GRADIENTS not in tensors and not (keep and (folder / f"{GRADIENTS}.json").exists()):
            see(GRADIENTS, first.unclipped(report.grad_norm, cfg.optim.clip))
    held_out_mean = None
    if held_out is not None:
        held_out_mean = held_out_loss(
            part,
            held_out,
            eod_policy,
            micro_size=batches.plan.micro_size,
            num_samples=cfg.evaluate.batches * batches.plan.global_size,
            device=world.device,
            world=world,
        ).loss
    return Numbers(losses, norms, held_out_mean), tensors


class _FirstGradients:
    """A copy of what the optimizer is given at its first update."""

    def __init__(self, part: Part, optimizer: Any) -> None:
        self.part = part
        self.named: list[tuple[str, Tensor]] = []
        self.hook = optimizer.register_step_pre_hook(lambda *_: self._copy())

    def _copy(self) -> None:
        self.hook.remove()
        self.named = [(name, p.grad.detach().clone()) for name, p in self.part.named_parameters() if p.grad is not None]

    def unclipped(self, norm: float, clip: float) -> list[tuple[str, Tensor]]:
        """As they were before clipping: a wrong norm would make every one of them look wrong."""
        factor = clip / norm if clip and norm > clip else 1.0
        for _, gradient in self.named:
            shard.local(gradient).div_(factor)
        named, self.named = self.named, []
        return named


def _samples(cfg: RunConfig, world: World, *, synthetic: bool) -> tuple[Batches, OrderedSamples | None, EodPolicy]:
    if not synthetic:
        setup = prepare(cfg, world)
        return setup.batches(), setup.held_out, setup.dataset.eod_policy
    plan = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, with_layout(cfg.parallel, world.layout))
    eod_policy = EodPolicy(None, mask_loss=False, reset_positions=False, reset_attention=False)
    shape = (cfg.model.vocab_size, cfg.data.seq_len, cfg.train.seed)
    train: OrderedSamples = SyntheticSamples(*shape, split=0, per_epoch=2**40)
    # One more than fills the batches: ranks do not all have the same number of them.
    held_out = SyntheticSamples(*shape, split=1, per_epoch=max(1, cfg.evaluate.batches * plan.global_size - 1))
    batches = Batches(train, plan, eod_policy, vocab_size=cfg.model.vocab_size, data_rank=world.data_rank)
    return batches, held_out, eod_policy


def relative(difference: float, to: float) -> float:
    return 0.0 if difference == 0.0 else difference / to if to else math.inf
