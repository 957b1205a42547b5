"""The loss of each sample of a step and how varied its tokens are: all ranks of every layout read the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from steps import ONE, ROWS, Case, build_part, global_batch, layouts, micro_batches

from gptworks.config.derive import Layout
from gptworks.config.schema import ScalerConfig
from gptworks.data.loader import IGNORED
from gptworks.launch.world import World
from gptworks.model import NOT_SCORED
from gptworks.train import variety
from gptworks.train.precision import LossScaler
from gptworks.train.step import Gradients, backward

CASE = Case(accumulation=2)


def read(world: World, case: Case = CASE) -> Gradients:
    part = build_part(world, case)
    part.keep_sample_losses()
    scaler = LossScaler(ScalerConfig(), enabled=False)
    batches = micro_batches(world, 0, case.accumulation)
    backward(part, batches, world, scaler, seed=1, step=1)
    return backward(part, batches, world, scaler, seed=1, step=1)  # nothing is left of the step before


def of_samples(world: World) -> tuple[tuple[float, ...], tuple[float, ...]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variety, "_FEWEST", 4)  # these samples are short
        gradients = read(world)
    return gradients.sample_losses, gradients.sample_varieties


def by_their_definition() -> list[float]:
    """From the logits of the whole model, row by row."""
    part, whole = build_part(ONE, CASE), global_batch(0)
    with torch.no_grad():
        logits = part(whole.tokens)
    return [
        NOT_SCORED if (labels == IGNORED).all() else F.cross_entropy(row, labels, ignore_index=IGNORED).item()
        for row, labels in zip(logits, whole.labels, strict=True)
    ]


def test_they_are_means_over_the_scored_tokens_of_each_sample() -> None:
    expected = by_their_definition()
    assert expected[0] == NOT_SCORED and len(expected) == ROWS
    assert read(ONE).sample_losses == pytest.approx(expected, abs=2e-6)
    assert backward(
        build_part(ONE, CASE), micro_batches(ONE, 0, 2), ONE, LossScaler(ScalerConfig(), enabled=False), seed=1, step=1
    ).sample_losses == (), "only where they are asked for"  # fmt: skip


def test_asking_for_them_changes_no_bit_of_the_step() -> None:
    part = build_part(ONE, CASE)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    without = backward(part, micro_batches(ONE, 0, 2), ONE, scaler, seed=1, step=1)
    asked = read(ONE)
    assert asked.loss == without.loss
    again = build_part(ONE, CASE)
    again.keep_sample_losses()
    once = backward(again, micro_batches(ONE, 0, 2), ONE, scaler, seed=1, step=1)
    assert once.grad_norm == without.grad_norm


@pytest.mark.parametrize("layout", layouts("dp4", "fsdp2.tp2", "pp2.dp2", slow=("tp4", "pp2.tp2", "dp2.fsdp2")))
def test_all_ranks_of_every_layout_read_the_same(layout: Layout, run_layout: Callable[..., list[Any]]) -> None:
    first, *others = run_layout(layout, of_samples)
    assert others == [first] * (layout.world_size - 1), "to the last bit"
    losses, varieties = first
    assert losses == pytest.approx(by_their_definition(), abs=2e-6)
    assert varieties[:4] == (NOT_SCORED,) * 4 and min(varieties[4:]) > 0.8 and len(varieties) == ROWS
    assert varieties == of_samples(ONE)[1]
