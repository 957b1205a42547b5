"""Learning rates against the formulas of the systems they come from, each written here again in its own words."""

import math

import pytest

from gptworks.config.schema import OptimConfig
from gptworks.train import schedule

MAX, MIN, WARMUP, DECAY, LAST = 6e-4, 6e-5, 30, 200, 260


def rates(**settings: object) -> list[float]:
    """Of updates 1 to LAST."""
    cfg = OptimConfig.model_validate(
        {"lr": MAX, "min_lr": MIN, "warmup_steps": WARMUP, "decay_steps": DECAY, **settings}
    )
    return [schedule.lr_at(step, cfg, LAST) for step in range(1, LAST + 1)]


def paddle(t: int, warmup: float = WARMUP, highest: float = MAX, lowest: float = MIN) -> float:
    """CosineAnnealingWithWarmupDecay; the scheduler shows t = 1 at the first update."""
    if warmup > 0 and t <= warmup:
        return highest * t / warmup
    if t > DECAY:
        return lowest
    ratio = (t - warmup) / (DECAY - warmup)
    return lowest + (math.cos(math.pi * ratio) + 1.0) * 0.5 * (highest - lowest)


def oneflow(t: int) -> float:
    """Linear warmup below `warmup_batches`, then a cosine that has been running since step 0; t = 0 at first."""
    if t < WARMUP:
        return MAX * t / WARMUP
    alpha = MIN / MAX
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(t, DECAY) / DECAY))
    return MAX * ((1.0 - alpha) * cosine + alpha)


def megatron(t: int, style: str) -> float:
    """AnnealingLR."""
    if t <= WARMUP:
        return MAX * t / WARMUP
    if style == "constant":
        return MAX
    if t > DECAY:
        return MIN
    ratio = (t - WARMUP) / (DECAY - WARMUP)
    coefficient = 1.0 - ratio if style == "linear" else 0.5 * (math.cos(math.pi * ratio) + 1.0)
    return MIN + coefficient * (MAX - MIN)


def mindformers(t: int) -> float:
    """Polynomial decay of power 1 after a warmup."""
    if t < WARMUP:
        return MAX * t / WARMUP
    return (MAX - MIN) * (1 - (min(t, DECAY) - WARMUP) / (DECAY - WARMUP)) + MIN


def test_paddle_cosine() -> None:
    assert rates() == pytest.approx([paddle(t) for t in range(1, LAST + 1)], rel=1e-12)


def test_paddle_warmup_may_be_a_fraction() -> None:
    """warmup_rate x decay_steps is kept as it is, not rounded."""
    expected = [paddle(t, warmup=12.6) for t in range(1, LAST + 1)]
    assert rates(warmup_steps=12.6) == pytest.approx(expected, rel=1e-12)
    assert rates(warmup_steps=13) != pytest.approx(expected, rel=1e-3)


def test_paddle_rises_when_the_two_rates_are_swapped() -> None:
    swapped = rates(lr=1e-5, min_lr=5e-5, allow_rising_lr=True)
    assert swapped == pytest.approx([paddle(t, highest=1e-5, lowest=5e-5) for t in range(1, LAST + 1)], rel=1e-12)
    assert swapped[WARMUP - 1] == pytest.approx(1e-5) and swapped[-1] == 5e-5
    assert swapped[(WARMUP + DECAY) // 2 - 1] == pytest.approx(3e-5)


def test_oneflow_cosine() -> None:
    got = rates(warmup_from=0, cosine_clock="from_start")
    assert got == pytest.approx([oneflow(t) for t in range(LAST)], rel=1e-12)
    assert got[0] == 0.0
    assert max(got) < MAX, "the cosine has begun before the warmup ends"


@pytest.mark.parametrize("style", ["cosine", "linear", "constant"])
def test_megatron_styles(style: str) -> None:
    assert rates(schedule=style) == pytest.approx([megatron(t, style) for t in range(1, LAST + 1)], rel=1e-12)


def test_mindformers_polynomial() -> None:
    got = rates(schedule="linear", warmup_from=0)
    assert got == pytest.approx([mindformers(t) for t in range(LAST)], rel=1e-12)


def test_warmup_stable_decay() -> None:
    got = rates(schedule="wsd", cooldown_steps=50)
    warm = [MAX * t / WARMUP for t in range(1, WARMUP + 1)]
    stable = [MAX] * (DECAY - 50 - WARMUP)
    down = [MIN + (MAX - MIN) * (DECAY - t) / 50 for t in range(DECAY - 49, DECAY + 1)]
    assert got == pytest.approx([*warm, *stable, *down, *[MIN] * (LAST - DECAY)], rel=1e-12)


def test_wsd_cools_down_over_a_fifth_unless_told() -> None:
    assert rates(schedule="wsd") == rates(schedule="wsd", cooldown_steps=DECAY // 5)
    assert rates(schedule="wsd") != rates(schedule="wsd", cooldown_steps=DECAY // 4)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_without_decay_steps_the_last_step_has_the_lowest_rate(shape: str) -> None:
    got = rates(schedule=shape, decay_steps=0)
    assert got[-1] == MIN < got[-2]
    assert got == rates(schedule=shape, decay_steps=LAST)


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
def test_without_warmup_the_first_rate_is_near_the_highest(shape: str) -> None:
    got = rates(schedule=shape, warmup_steps=0)
    assert 0.99 * MAX < got[0] <= MAX == pytest.approx(max(got), rel=0.01)
    assert got == sorted(got, reverse=True)
    assert rates(schedule=shape, warmup_steps=0, warmup_from=0)[0] == MAX


def test_a_warmup_as_long_as_the_training_ends_at_the_top() -> None:
    got = rates(warmup_steps=DECAY)
    assert got[DECAY - 1] == MAX and got[DECAY] == MIN


def test_logged_rates_of_the_paddlenlp_document() -> None:
    """Steps 1471 to 1475 of its log (warmup 3200, highest 1e-4); Paddle logs the rate of the next update."""
    cfg = OptimConfig(lr=1e-4, min_lr=1e-5, warmup_steps=3200, decay_steps=320000)
    logged = [f"{schedule.lr_at(step + 1, cfg, 500000):.5e}" for step in range(1471, 1476)]
    assert logged == ["4.60000e-05", "4.60313e-05", "4.60625e-05", "4.60938e-05", "4.61250e-05"]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize("warmup", [0, 30, 36.5])
@pytest.mark.parametrize("clock", ["after_warmup", "from_start"])
def test_the_highest_rate_so_far(kind: str, warmup: float, clock: str) -> None:
    settings = {"lr": MAX, "min_lr": MIN, "warmup_steps": warmup, "decay_steps": DECAY, "schedule": kind}
    for warmup_from in (0, 1):
        cfg = OptimConfig.model_validate({**settings, "cosine_clock": clock, "warmup_from": warmup_from})
        found = rates(**{**settings, "cosine_clock": clock, "warmup_from": warmup_from})
        for step in (1, 2, 29, 30, 31, 32, 36, 37, 38, 39, 100, LAST):
            assert schedule.highest_until(step, cfg, LAST) == max(found[:step]), (step, warmup_from)
