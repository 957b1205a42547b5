"""Numbers that follow from others: exact, or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import BatchConfig, BatchPlan, TrainConfig, num_steps, solve_batch
from gptworks.errors import ConfigError

counts = st.integers(1, 64)


@given(micro=counts, accumulation=counts, data_parallel=counts, missing=st.sampled_from(["global", "micro", "acc", ""]))
def test_any_one_may_be_missing(micro: int, accumulation: int, data_parallel: int, missing: str) -> None:
    total = micro * accumulation * data_parallel
    batch = BatchConfig(
        global_size=0 if missing == "global" else total,
        micro_size=0 if missing == "micro" else micro,
        accumulation=0 if missing == "acc" else accumulation,
    )
    assert solve_batch(batch, data_parallel) == BatchPlan(total, micro, accumulation, data_parallel)


@given(total=st.integers(0, 200), micro=st.integers(0, 20), accumulation=st.integers(0, 20), data_parallel=counts)
def test_the_equation_holds_or_is_refused(total: int, micro: int, accumulation: int, data_parallel: int) -> None:
    batch = BatchConfig(global_size=total, micro_size=micro, accumulation=accumulation)
    divisor = (micro or 1) * (accumulation or 1) * data_parallel
    solvable = not total or (total == divisor if micro and accumulation else total % divisor == 0)
    if not solvable:
        with pytest.raises(ConfigError, match=f"batch.global_size: {total} is not "):
            solve_batch(batch, data_parallel)
        return
    plan = solve_batch(batch, data_parallel)
    assert plan.global_size == plan.micro_size * plan.accumulation * plan.data_parallel
    assert plan.data_parallel == data_parallel
    for given_number, solved in (
        (total, plan.global_size),
        (micro, plan.micro_size),
        (accumulation, plan.accumulation),
    ):
        assert solved == given_number or not given_number


def test_nothing_given_means_one_sample_per_rank() -> None:
    assert solve_batch(BatchConfig(), 3) == BatchPlan(3, 1, 1, 3)
    assert solve_batch(BatchConfig(global_size=12), 3) == BatchPlan(12, 4, 1, 3)


@pytest.mark.parametrize(
    ("batch", "data_parallel", "expected"),
    [
        (
            BatchConfig(global_size=10, micro_size=4),
            2,
            "10 is not a multiple of micro_size x data-parallel (4 x 2) = 8; needs batch.global_size = "
            "batch.micro_size x batch.accumulation x data-parallel. Nearest: global_size=8 or 16.",
        ),
        (
            BatchConfig(global_size=3, micro_size=8),
            1,
            "3 is not a multiple of micro_size x data-parallel (8 x 1) = 8; needs batch.global_size = "
            "batch.micro_size x batch.accumulation x data-parallel. Nearest: global_size=8.",
        ),
    ],
)
def test_refusal_names_the_nearest_that_fit(batch: BatchConfig, data_parallel: int, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(batch, data_parallel)
    assert caught.value.problems == [f"batch.global_size: {expected}"]


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (TrainConfig(steps=17), 17),
        (TrainConfig(epochs=1), 12),  # 100 samples in batches of 8: the last four wait for the next epoch
        (TrainConfig(epochs=2), 25),
        (TrainConfig(epochs=0.5), 6),
        (TrainConfig(epochs=0.001), 1),
        (TrainConfig(tokens=1), 1),
        (TrainConfig(tokens=8 * 32 * 5), 5),
        (TrainConfig(tokens=8 * 32 * 5 + 1), 6),
    ],
)
def test_last_step_from_steps_epochs_or_tokens(train: TrainConfig, expected: int) -> None:
    assert num_steps(train, samples_per_epoch=100, global_size=8, seq_len=32) == expected


@pytest.mark.parametrize(
    ("train", "expected"),
    [
        (TrainConfig(steps=17), 17),
        (TrainConfig(epochs=1), 10 + 7),  # 40 of 100 samples are done: 60 are left
        (TrainConfig(tokens=32 * 100), 10 + 8),
        (TrainConfig(epochs=0.2), 10),
        (TrainConfig(tokens=32), 10),
    ],
)
def test_the_last_step_after_steps_with_another_batch(train: TrainConfig, expected: int) -> None:
    assert num_steps(train, samples_per_epoch=100, global_size=8, seq_len=32, step=10, consumed=40) == expected


def test_an_end_must_be_given() -> None:
    with pytest.raises(ConfigError, match=r"train\.steps: how long to train is not said\. Set one of train\.steps"):
        num_steps(TrainConfig(), samples_per_epoch=100, global_size=8, seq_len=32)
