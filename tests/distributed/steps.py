"""The same few steps on any layout: what the ranks report is compared with what one process reports."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, ParallelConfig, ScalerConfig
from gptworks.data.loader import IGNORED, Batch
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build
from gptworks.parallel.parts import Part
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import StepReport, train_step

ONE = World(torch.device("cpu"))
ROWS, LENGTH, VOCAB = 16, 16, 97
TOLERANCE = 5e-6  # of losses in fp32: rounding stays below 2e-6, the mildest mistake seen was 1e-5


@dataclass(frozen=True)
class Case:
    """What is trained, besides the layout."""

    accumulation: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    compute: torch.dtype = torch.float32
    clip: float = 1.0
    steps: int = 5


def layouts(*names: str, slow: tuple[str, ...] = ()) -> list[Any]:
    """Parameters of a test; those of `slow` are not in `make test`."""
    marked = [(name, ()) for name in names] + [(name, pytest.mark.slow) for name in slow]
    return [pytest.param(Layout.parse(name), id=name, marks=marks) for name, marks in marked]


def shape(**changes: Any) -> ModelConfig:
    usual = {"num_layers": 3, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, "max_positions": LENGTH}
    return ModelConfig.model_validate(usual | changes)


def build_part(world: World, case: Case) -> Part:
    cfg = shape(**case.model)
    parallel = ParallelConfig(**vars(world.layout) | case.parallel)
    weights = FreshWeights(InitConfig(std=0.1), cfg.num_layers, seed=7)
    return build(cfg, world, case.compute, weights, parallel=parallel, **case.build).train()


def global_batch(step: int) -> Batch:
    """Rows score 0 to LENGTH - 1 tokens, the first one none: the counts of ranks and micro-batches differ."""
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    labels = tokens[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : LENGTH - row] = IGNORED
    return Batch(tokens[:, :-1].clone(), labels, None, None, torch.arange(step * ROWS, (step + 1) * ROWS))


def micro_batches(world: World, step: int, accumulation: int) -> list[Batch]:
    """This rank's, cut as the loader cuts them."""
    whole = global_batch(step)
    size = ROWS // (accumulation * world.data_parallel)
    firsts = [micro * size * world.data_parallel + world.data_rank * size for micro in range(accumulation)]
    return [
        Batch(whole.tokens[i : i + size], whole.labels[i : i + size], None, None, whole.sample_ids[i : i + size])
        for i in firsts
    ]


def new_optimizer(part: Any, lr: float = 3e-3) -> torch.optim.AdamW:
    return optim.build(part, OptimConfig(lr=lr, weight_decay=0.1))


def run_steps(world: World, case: Case) -> list[StepReport]:
    part = build_part(world, case)
    optimizer = new_optimizer(part)
    scaler = LossScaler(ScalerConfig(init=1024.0), enabled=case.compute == torch.float16)
    return [
        train_step(
            part,
            optimizer,
            micro_batches(world, step, case.accumulation),
            world,
            scaler,
            clip=case.clip,
            seed=1,
            step=step,
        )
        for step in range(1, case.steps + 1)
    ]


def differences(ranks: list[list[StepReport]], wanted: list[StepReport]) -> tuple[float, float]:
    """The largest of losses, and relative to it of gradient norms, over ranks and steps."""
    pairs = [pair for reports in ranks for pair in zip(reports, wanted, strict=True)]
    losses = max(abs(got.loss - one.loss) for got, one in pairs)
    return losses, max(abs(got.grad_norm - one.grad_norm) / one.grad_norm for got, one in pairs)


def assert_equal_to_one_process(ranks: list[list[StepReport]], wanted: list[StepReport], what: Any) -> None:
    losses, norms = differences(ranks, wanted)
    assert losses < TOLERANCE and norms < 5e-5, f"{what}: losses differ by {losses:.2g}, norms by {norms:.2g}"
    for reports in ranks:
        assert [r.updated for r in reports] == [r.updated for r in wanted], what
    assert all(_but_ids(reports) == _but_ids(ranks[0]) for reports in ranks), "ranks disagree"


def _but_ids(reports: list[StepReport]) -> list[tuple[float, float, bool]]:
    return [(report.loss, report.grad_norm, report.updated) for report in reports]
