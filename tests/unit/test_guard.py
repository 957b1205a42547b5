"""When a step is bad: its loss, gradient norm and samples against those of the steps before."""

import math

import numpy as np
import pytest
import torch

from gptworks.config.schema import GuardConfig
from gptworks.model import IGNORED, NOT_SCORED
from gptworks.train.guard import Guard
from gptworks.train.variety import varieties


def guard(action: str = "skip", window: int = 8, **more: float) -> Guard:
    return Guard(GuardConfig(action=action, window=window, **more))  # type: ignore[arg-type]


def fed(
    watch: Guard, losses: list[float], norms: list[float] | None = None, samples: list[list[float]] | None = None
) -> Guard:
    for loss, norm, each in zip(
        losses, norms or [1.0] * len(losses), samples or [[]] * len(losses), strict=True
    ):  # fmt: skip
        watch.learn(loss, norm, each)
    return watch


def robust_z(value: float, last: np.ndarray) -> float:
    """As scipy.stats.median_abs_deviation(scale="normal") has it."""
    return (value - float(np.median(last))) / (1.4826 * float(np.median(np.abs(last - np.median(last)))))


def test_deviations_are_those_of_the_last_steps() -> None:
    draws = np.random.default_rng(3)
    losses, norms = draws.normal(3.0, 0.2, 20).tolist(), draws.lognormal(0.0, 0.3, 20).tolist()
    verdict = fed(guard(), losses, norms).judge(3.3, 1.9)
    last, logs = np.array(losses[-8:]), np.log(norms[-8:])
    assert verdict.rule == ""
    assert verdict.deviations == pytest.approx(
        {"loss": robust_z(3.3, last), "grad_norm": robust_z(math.log(1.9), logs)}
    )


def test_the_samples_of_a_step_are_compared_with_each_other() -> None:
    """While the loss falls, what is far from the others stays as far."""
    draws = np.random.default_rng(4)
    samples = [draws.normal(9.0 - 0.1 * step, 0.3, 16) for step in range(40)]
    watch = fed(guard(), [0.0] * 40, samples=[each.tolist() for each in samples])
    highs = np.array([each.max() - np.median(each) for each in samples[-8:]])
    lows = np.array([np.median(each) - each.min() for each in samples[-8:]])
    now = draws.normal(5.0, 0.3, 15).tolist()
    healthy = watch.judge(0.0, 1.0, [*now, 5.0])
    assert healthy.rule == "" and set(healthy.deviations) == {"loss", "grad_norm", "sample_high", "sample_low"}
    high, low = watch.judge(0.0, 1.0, [*now, 12.0]), watch.judge(0.0, 1.0, [*now, 0.01])
    assert high.rule == "sample_high"
    assert high.deviations["sample_high"] == pytest.approx(robust_z(12.0 - float(np.median([*now, 12.0])), highs))
    assert low.rule == "sample_low"
    assert low.deviations["sample_low"] == pytest.approx(robust_z(float(np.median([*now, 0.01])) - 0.01, lows))
    assert "below those beside it" in str(low)


def test_samples_of_which_nothing_is_scored_are_not_compared() -> None:
    watch = fed(guard(), [3.0] * 8, samples=[[2.9, 3.0, 3.1, -1.0]] * 8)
    assert watch.judge(3.0, 1.0, [2.9, 3.0, 3.1, -1.0]).rule == ""
    assert watch.judge(3.0, 1.0, [2.9, -1.0, -1.0, -1.0]).deviations.keys() == {"loss", "grad_norm"}
    assert fed(guard(), [3.0] * 8, samples=[[3.0]] * 8).judge(3.0, 1.0, [9.0]).rule == "", "nothing is beside it"


def test_a_poisoned_step_does_not_enter_the_window() -> None:
    """Not even one of the first steps, before anything is judged, hides those that come after it."""
    steps = [[2.9, 3.0, 3.1, 3.2]] * 7
    for first in ([2.9, 3.0, 3.1, 30.0], [2.9, 3.0, 3.1, 3.2]):
        watch = fed(guard(), [3.0] * 8, samples=[first, *steps])
        assert watch.judge(3.0, 1.0, [2.9, 3.0, 3.1, 9.0]).rule == "sample_high"
        assert watch.judge(3.0, 1.0, [2.9, 3.0, 3.1, 9.0]).rule == "sample_high", "judging is not learning"


@pytest.mark.parametrize(
    ("loss", "norm", "rule"),
    [
        (3.0, 1.0, ""),
        (0.1, 1e-6, ""),  # better than ever is not bad
        (3.17, 1.0, ""),
        (3.19, 1.0, "loss"),  # 6 times 1 % of the usual loss, the least deviation
        (3.0, math.exp(1.99), ""),
        (3.0, math.exp(2.01), "grad_norm"),  # 8 times 0.25
        (9.0, 90.0, "loss"),
        (math.nan, 1.0, "nonfinite"),
        (3.0, math.inf, "nonfinite"),
    ],
)
def test_which_rule_a_step_breaks(loss: float, norm: float, rule: str) -> None:
    assert fed(guard(), [3.0] * 8).judge(loss, norm).rule == rule


def test_nothing_is_judged_before_the_window_is_full_but_what_is_not_finite() -> None:
    watch = fed(guard(), [3.0] * 7)
    assert watch.judge(90.0, 90.0).rule == ""
    assert watch.judge(math.nan, 1.0).rule == "nonfinite"


def test_a_threshold_of_0_does_not_judge() -> None:
    watch = fed(guard(loss_z=0.0), [3.0] * 8)
    assert watch.judge(90.0, 1.0).rule == ""
    assert watch.judge(90.0, 9.0).rule == "grad_norm"


def test_off_remembers_nothing() -> None:
    watch = fed(guard("off"), [3.0] * 8)
    assert watch.judge(90.0, 90.0).rule == ""
    assert watch.state() == {}
    assert watch.judge(math.inf, 1.0).rule == "nonfinite", "that has always been looked at"


def test_a_spike_that_was_only_warned_of_does_not_hide_the_next_one() -> None:
    watch = fed(guard("warn"), [3.0] * 8)
    watch.learn(900.0, 900.0)
    assert watch.judge(9.0, 9.0).rule == "loss"


def test_what_it_remembers_is_exact() -> None:
    draws = np.random.default_rng(5)
    losses, norms = draws.normal(3, 0.1, 30).tolist(), draws.lognormal(0, 0.2, 30).tolist()
    first = fed(guard(), losses, norms)
    again = Guard(first.cfg, first.state())
    assert again.judge(3.2, 1.3) == first.judge(3.2, 1.3)
    longer = Guard(GuardConfig(action="skip", window=16), first.state())
    assert longer.judge(90.0, 90.0).rule == "", "half of the longer window is not known yet"
    shorter = Guard(GuardConfig(action="skip", window=4), first.state())
    assert shorter.judge(3.2, 1.3) == fed(guard(window=4), losses, norms).judge(3.2, 1.3)


def by_counting(sample: list[int]) -> float:
    _, counts = np.unique(sample, return_counts=True)
    shares = counts / len(sample)
    return float(-(shares * np.log(shares)).sum() / math.log(len(sample)))


def test_how_varied_the_tokens_of_a_sample_are() -> None:
    draws = np.random.default_rng(6)
    samples = [np.full(64, 7), np.tile([3, 4], 32), np.arange(64), draws.integers(0, 20, 64), draws.zipf(1.5, 64) % 99]
    found = varieties(torch.tensor(np.array(samples)))
    assert found.tolist() == pytest.approx([by_counting(sample.tolist()) for sample in samples])
    assert found[:3].tolist() == pytest.approx([0.0, math.log(2) / math.log(64), 1.0])


def test_only_what_is_scored_counts_and_a_short_answer_is_not_judged() -> None:
    labels = torch.full((3, 64), IGNORED)
    labels[0, 20:] = torch.tensor([5, 6, 6, 9] * 11)
    labels[1, 33:] = 5  # 31 tokens
    assert varieties(labels).tolist() == pytest.approx([by_counting([5, 6, 6, 9] * 11), NOT_SCORED, NOT_SCORED])


def test_a_sample_that_repeats_itself() -> None:
    """By its share of the usual, whatever its loss; and not while the usual is not known."""
    watch = guard()
    for _ in range(7):
        watch.learn(3.0, 1.0, [3.0] * 4, [0.7, 0.8, 0.9, NOT_SCORED])
    assert watch.judge(3.0, 1.0, [3.0] * 4, [0.8, 0.8, 0.8, 0.0]).rule == ""
    watch.learn(3.0, 1.0, [3.0] * 4, [0.8, 0.8, 0.8, 0.0])
    assert watch.judge(3.0, 1.0, [3.0] * 4, [0.8, 0.8, 0.21, NOT_SCORED]).rule == "", "a quarter, and a little"
    verdict = watch.judge(3.0, 1.0, [3.0] * 4, [0.8, 0.8, 0.16, NOT_SCORED])
    assert verdict.rule == "variety" and verdict.share_of_variety == pytest.approx(0.2)
    assert "20% of the usual variety" in str(verdict)
    assert watch.judge(3.0, 1.0, [3.0] * 4, [0.0] * 4).rule == "variety", "all of them do"
    assert watch.judge(3.0, 1.0, [3.0] * 4, [NOT_SCORED] * 4).share_of_variety is None
    again = Guard(watch.cfg, watch.state())
    assert again.judge(3.0, 1.0, [3.0] * 4, [0.8, 0.8, 0.16, 0.8]).rule == "variety"
    not_asked = Guard(GuardConfig(action="skip", window=8, variety=0.0), watch.state())
    assert not_asked.judge(3.0, 1.0, [3.0] * 4, [0.0] * 4).rule == ""
