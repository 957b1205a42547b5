"""A pipeline computes what one process computes: losses, gradient norms, evaluation and generation."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.data.loader import Batch, Borders, collate
from gptworks.data.windows import Sample
from gptworks.errors import ConfigError, UsageError
from gptworks.model import GPT, tie
from gptworks.model.init import seed_of
from gptworks.parallel import pipeline, recompute
from gptworks.parallel.apply import FreshWeights
from gptworks.parallel.launch import World
from gptworks.parallel.pipeline import Pipeline
from gptworks.parallel.stages import check_micro_batches

TOLERANCE = 5e-6
STEPS = 5
CLIP = 0.5
SEED = 7
EOD = 0
LENGTH = 12

# (schedule, stages per rank)
SCHEDULES = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved", 2),
    ("looped_bfs", 2),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
    ("zbv", 2),
]


def config(**changes: Any) -> ModelConfig:
    shape = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "vocab_size": 61, "max_positions": 16}
    return ModelConfig(**(shape | changes))


def micro_batch(number: int, rows: int = 2) -> Batch:
    """Documents end at other places in each, so that the numbers of scored tokens differ."""
    tokens = np.random.default_rng(number).integers(0, 61, (rows, LENGTH + 1))
    tokens[:, 1 : 1 + number % 4] = EOD
    return collate([Sample(row, None) for row in tokens], 0, Borders(EOD, True, True, True))


def batches_of(step: int, data_rank: int = 0, num_micro_batches: int = 4) -> list[Batch]:
    return [micro_batch(1000 * step + 100 * data_rank + number) for number in range(num_micro_batches)]


def global_scored(step: int, data_parallel: int, num_micro_batches: int) -> int:
    return sum(b.num_scored for r in range(data_parallel) for b in batches_of(step, r, num_micro_batches))


def optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, fused=True)


@functools.cache
def one_process(cfg: ModelConfig, data_parallel: int = 1, num_micro_batches: int = 4) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    model = GPT(cfg)
    fill([model], cfg)
    optimizer = optimizer_of(list(model.parameters()))
    found = []
    for step in range(STEPS):
        num_scored = global_scored(step, data_parallel, num_micro_batches)
        loss = 0.0
        for rank in range(data_parallel):
            for batch in batches_of(step, rank, num_micro_batches):
                loss_sum = model(batch.tokens, **batch.keywords()) / num_scored
                loss_sum.backward()
                loss += loss_sum.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss, norm.item()))
    return found


@torch.no_grad()
def fill(parts: Sequence[GPT], cfg: ModelConfig) -> None:
    weights = FreshWeights(InitConfig(), cfg.num_layers, SEED)
    for name, parameter in pipeline.named_parameters(parts):
        whole = weights.tensor(name, parameter.shape)
        if isinstance(parameter, DTensor):
            parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(whole)


def build(
    world: World,
    cfg: ModelConfig,
    schedule: str,
    virtual: int,
    *,
    recompute_mode: str = "none",
    backend: str = "",
) -> Pipeline:
    parts = []
    for stage in pipeline.stages_of(world.place.pp, world.layout.pp, virtual, schedule):
        with torch.device("meta"):
            part = GPT(cfg)
        pipeline.keep_stage(part, stage, world.layout.pp * virtual)
        recompute.apply_inside(part, recompute_mode)
        if backend:
            for block in part.blocks.values():
                block.forward = torch.compile(block.forward, backend=backend)
        recompute.apply_around(part, recompute_mode)
        if world.axis("fsdp") is not None:
            shard(part, world)
        part.to_empty(device=world.device)
        tie(part)
        parts.append(part)
    fill(parts, cfg)
    return Pipeline(parts, world, schedule=schedule)


def shard(part: GPT, world: World) -> None:
    mesh = world.axis("fsdp")
    for module in (*part.blocks.values(), part):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def global_norm(run: Pipeline, world: World) -> float:
    squares = torch.zeros(())
    for _, parameter in pipeline.named_parameters_once(run.parts):
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        squares += gradient.double().square().sum().float()
    for axis in ("pp", "fsdp"):
        mesh = world.axis(axis)
        if mesh is not None:
            distributed.all_reduce(squares, group=mesh.get_group())
    return squares.sqrt().item()


def train(
    run: Pipeline,
    world: World,
    *,
    num_micro_batches: int = 4,
    steps: int = STEPS,
    seed_dropout: Callable[[int], Callable[[int, int], None]] | None = None,
    sum_tied: bool = True,
) -> list[tuple[float, float]]:
    parameters = [parameter for _, parameter in pipeline.named_parameters(run.parts)]
    optimizer = optimizer_of(parameters)
    found = []
    for step in range(steps):
        num_scored = global_scored(step, world.data_parallel, num_micro_batches)
        batches = batches_of(step, world.data_rank, num_micro_batches)
        hook = None if seed_dropout is None else seed_dropout(step)
        loss_sums = run.step(batches, 1 / num_scored, seed_dropout=hook)
        assert len(loss_sums) == (num_micro_batches if run.has_last else 0)
        loss = run.share_losses(loss_sums, num_micro_batches).sum() / num_scored
        if world.axis("fsdp") is not None:
            distributed.all_reduce(loss, group=world.axis("fsdp").get_group())
        if sum_tied:
            run.sum_tied_gradients()
        norm = global_norm(run, world)
        torch._foreach_mul_([p.grad for p in parameters], min(1.0, CLIP / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), norm))
    return found


def difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    return float(np.abs(np.array(found)[:, 0] - np.array(expected)[:, 0]).max())


def norm_difference(found: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    return float(np.abs(np.array(found)[:, 1] - np.array(expected)[:, 1]).max())


def assert_equal(results: list[Any], expected: list[tuple[float, float]]) -> None:
    for found in results:
        assert difference(found, expected) < TOLERANCE
        assert norm_difference(found, expected) < 2e-5


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("schedule", "virtual"), SCHEDULES)
def test_two_ranks_train_like_one_process(run_layout, schedule: str, virtual: int, tied: bool) -> None:
    cfg = config(tied=tied)
    results = run_layout(Layout(pp=2), lambda world: train(build(world, cfg, schedule, virtual), world))
    assert_equal(results, one_process(cfg))
