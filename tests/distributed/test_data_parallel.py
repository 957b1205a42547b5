"""Replicas and shards: what is summed, what is not finite on one rank, what each of them holds.

That they learn what one process learns is proved in test_equals_one_process.py and, closer, in test_layouts.py.
"""

import math
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from steps import (
    ONE,
    TOLERANCE,
    Case,
    build_part,
    differences,
    micro_batches,
    new_optimizer,
    run_steps,
)

from gptworks.config.derive import Layout
from gptworks.config.schema import ScalerConfig
from gptworks.errors import DataError
from gptworks.launch.world import World
from gptworks.model import IGNORED
from gptworks.parallel import shard
from gptworks.train import optim, step
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step


def test_the_type_of_the_sum_can_be_chosen(run_layout) -> None:
    """Sums in bf16 differ from those in fp32, on replicas and on shards."""

    def found(world: World) -> list[float]:
        differing = []
        for zero in (0, 2):
            how = {"parallel": {"zero": zero}, "compute": torch.bfloat16, "steps": 2}
            exact = run_steps(world, Case(2, **how))
            rounded = run_steps(world, Case(2, build={"reduce_dtype": torch.bfloat16}, **how))
            differing.append(abs(rounded[0].grad_norm / exact[0].grad_norm - 1))
        return differing

    for differing in run_layout(Layout(fsdp=2), found):
        assert all(1e-7 < difference < 1e-2 for difference in differing), differing


# What must not go unnoticed


def test_a_count_of_this_rank_alone_is_noticed(run_layout) -> None:
    wanted = run_steps(ONE, Case())

    def own_count(world: World) -> Any:
        real = step.sum_over
        step.sum_over = lambda world, numbers, *axes: real(world, numbers, *(axes if len(axes) > 2 else ()))
        return run_steps(world, Case())

    losses, norms = differences(run_layout(Layout(dp=2), own_count), wanted)
    assert losses > 100 * TOLERANCE and norms > 1e-2


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2)], ids=str)
def test_a_step_without_a_scored_token_is_refused_by_all_before_the_update(run_layout, layout: Layout) -> None:
    """Some on one rank are enough for all."""

    def steps(world: World) -> Any:
        part = build_part(world, Case())
        optimizer, scaler = new_optimizer(part), LossScaler(ScalerConfig(), enabled=False)
        none = [replace(b, labels=torch.full_like(b.labels, IGNORED)) for b in micro_batches(world, 1, 2)]

        def one(batches: list[Any]) -> str:
            before = [shard.local(p.detach()).clone() for _, p in part.named_parameters()]
            try:
                found = str(train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=1).updated)
            except DataError as error:
                found = str(error).partition(",")[0]
            after = [shard.local(p.detach()) for _, p in part.named_parameters()]
            return f"{found}, same {all(map(torch.equal, before, after))}"

        return one(none), one(none if layout.dp > 1 and world.rank else micro_batches(world, 1, 2))

    for refused, learned in run_layout(layout, steps):
        assert refused.startswith("step 1: no token of samples [") and refused.endswith("same True")
        assert learned == "True, same False"


# Not finite on one rank


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(fsdp=2), Layout(tp=2), Layout(pp=2)], ids=str)
def test_an_overflow_on_one_rank_is_skipped_by_all(run_layout, layout: Layout) -> None:
    def steps(world: World) -> Any:
        part = build_part(world, Case(compute=torch.float16))
        optimizer = new_optimizer(part)
        scaler = LossScaler(ScalerConfig(init=1024.0), enabled=True)

        def one(number: int) -> Any:
            batches = micro_batches(world, number, 2)
            return train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=number)

        def weights() -> list[torch.Tensor]:
            return [shard.local(p.detach()).clone() for _, p in part.named_parameters()]

        def poison_and_sum() -> None:
            """One number of one gradient, of a matrix that a layout cuts or that one stage alone has."""
            parameter = next(p for name, p in part.named_parameters() if name.endswith("mlp.up.weight"))
            shard.local(parameter.grad)[0, 0] = math.inf
            type(part).sum_gradients(part)

        first, before = one(1), weights()
        with mock.patch.object(part, "sum_gradients", poison_and_sum if world.rank == 1 else part.sum_gradients):
            bad = one(2)
        same = all(torch.equal(old, new) for old, new in zip(before, weights(), strict=True))
        return first, bad, same, scaler.scale, one(3)

    for first, bad, same, scale, after in run_layout(layout, steps):
        assert first.updated and first.loss_scale == 1024.0
        assert not bad.updated and not math.isfinite(bad.grad_norm) and bad.loss_scale == 1024.0
        assert math.isfinite(bad.loss), "only the gradient tells"
        assert same, "the weights moved"
        assert scale == 512.0
        assert after.updated and after.loss_scale == 512.0


def test_without_scaling_a_loss_that_is_not_finite_on_one_rank_stops_all(run_layout) -> None:
    def steps(world: World) -> Any:
        part = build_part(world, Case())
        loss_sum = part.parts[-1].loss_sum
        real = loss_sum.forward
        loss_sum.forward = lambda *given: real(*given) * (1.0 if world.rank else math.inf)
        scaler = LossScaler(ScalerConfig(), enabled=False)
        batches = micro_batches(world, 1, 2)
        return train_step(part, new_optimizer(part), batches, world, scaler, clip=1.0, seed=1, step=1).updated

    assert run_layout(Layout(fsdp=2), steps) == [False, False]


# Weights and optimizer


@pytest.mark.parametrize("layout", [Layout(fsdp=4), Layout(dp=2, fsdp=2)], ids=str)
def test_each_rank_holds_its_slice_of_the_same_first_weights(run_layout, layout: Layout) -> None:
    case = Case(model={"hidden_size": 36, "num_heads": 3, "vocab_size": 101})
    wanted = {name: p.detach() for name, p in build_part(ONE, case).named_parameters()}

    def gathered(world: World) -> Any:
        part = build_part(world, case)
        assert part.parts[0].head.weight is part.parts[0].wte.weight
        held = sum(shard.local(p.detach()).numel() for _, p in part.named_parameters())
        return held, {name: p.detach().full_tensor().numpy() for name, p in part.named_parameters()}

    for held, found in run_layout(layout, gathered):
        assert list(found) == list(wanted)
        assert all((wanted[name].numpy() == value).all() for name, value in found.items())
        assert held < sum(w.numel() for w in wanted.values()) / layout.fsdp * 1.1


def test_moments_travel_by_name_and_training_goes_on_the_same(run_layout) -> None:
    def steps(world: World) -> Any:
        case = Case(2)
        whole = run_steps(world, case)
        part = build_part(world, case)
        optimizer = new_optimizer(part)
        scaler = LossScaler(ScalerConfig(), enabled=False)

        def one(number: int) -> Any:
            batches = micro_batches(world, number, 2)
            return train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=number)

        zeros = optim.moments(part, optimizer)
        assert all(shard.local(t).abs().max() == 0 for t in zeros.values() if shard.local(t).numel())
        for number in (1, 2, 3):
            one(number)
        saved = optim.moments(part, optimizer)
        assert all(
            t.placements == part.parts[0].get_parameter(n.partition(".")[2]).placements for n, t in saved.items()
        )
        optimizer = new_optimizer(part)
        optim.set_moments(part, optimizer, saved, updates=3)
        return [one(4), one(5)] == whole[3:]

    assert run_layout(Layout(fsdp=2), steps) == [True, True]
