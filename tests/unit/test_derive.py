"""Numbers that follow from others: exact, or refused."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gptworks.config import (
    BatchConfig,
    BatchPlan,
    EvaluateConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    load,
    num_steps,
    plan_batch,
    presets,
    solve_batch,
)
from gptworks.config.derive import evaluate_every
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
    assume(total or micro or accumulation)
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


def test_a_global_batch_alone_is_one_micro_batch_per_rank() -> None:
    assert solve_batch(BatchConfig(global_size=12), 3) == BatchPlan(12, 4, 1, 3)
    plan = plan_batch(BatchConfig(global_size=12), ModelConfig(), 1024, ParallelConfig(dp=3))
    assert plan == BatchPlan(12, 4, 1, 3)


# By hand: GPT-3's table 2.1 has 0.5M tokens up to 760M parameters, 1M for 1.3B and 2.7B, 2M for 6.7B and 13B, 3.2M for
# 175B; nanoGPT's shakespeare_char (6 x 384, 256 tokens) has 64 samples; the quickstart 16 of 128.
SHAKESPEARE_CHAR = {"num_layers": 6, "hidden_size": 384, "num_heads": 6, "vocab_size": 65, "max_positions": 256}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("tiny", BatchPlan(16, 16, 1, 1)),
        ("tiny-4k", BatchPlan(16, 16, 1, 1)),
        (SHAKESPEARE_CHAR, BatchPlan(64, 32, 2, 1)),
        ("gpt2", BatchPlan(512, 4, 128, 1)),
        ("345M", BatchPlan(512, 4, 128, 1)),
        ("1.3B", BatchPlan(1024, 2, 512, 1)),
        ("2.7B", BatchPlan(1024, 1, 1024, 1)),
        ("13B", BatchPlan(2048, 1, 2048, 1)),
        ("175B", BatchPlan(3072, 1, 3072, 1)),
    ],
)
def test_nothing_given_means_a_batch_that_suits_the_model(model: str | dict[str, int], expected: BatchPlan) -> None:
    shape = presets.model_config(model) if isinstance(model, str) else ModelConfig(**model)
    assert plan_batch(BatchConfig(), shape, shape.max_positions, ParallelConfig()) == expected


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_the_usual_batch_is_shared_out_among_any_number_of_replicas(dp: int, pp: int) -> None:
    plan = plan_batch(BatchConfig(), presets.model_config("tiny"), 128, ParallelConfig(dp=dp, pp=pp))
    assert 16 <= plan.global_size < 16 + dp * pp and plan.global_size % (dp * pp) == 0
    assert plan.global_size == plan.micro_size * plan.accumulation * dp
    assert plan.accumulation >= pp


@pytest.mark.parametrize(
    ("schedule", "pp", "global_size", "dp", "expected"),
    [
        ("1f1b", 2, 64, 1, (4, 16)),  # as large as the hidden states of 4 x 1,024 x 1,024 numbers allow
        ("1f1b", 4, 16, 1, (1, 16)),  # four micro-batches for each stage
        ("1f1b", 4, 8, 2, (1, 4)),  # no more than one sample for each stage
        ("interleaved", 2, 12, 1, (1, 12)),
        ("interleaved", 4, 8, 1, (1, 8)),
    ],
)
def test_a_pipeline_gets_micro_batches(
    schedule: str, pp: int, global_size: int, dp: int, expected: tuple[int, int]
) -> None:
    parallel = ParallelConfig(pp=pp, dp=dp, schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    model = ModelConfig(hidden_size=1024, num_heads=16, num_layers=24)
    plan = plan_batch(BatchConfig(global_size=global_size), model, 1024, parallel)
    assert (plan.micro_size, plan.accumulation) == expected


def test_what_is_said_of_a_pipeline_stays() -> None:
    said = BatchConfig(global_size=16, micro_size=8)
    assert plan_batch(said, ModelConfig(), 1024, ParallelConfig(pp=2)) == BatchPlan(16, 8, 2, 1)
    few = BatchConfig(global_size=3)
    with pytest.raises(ConfigError, match="1 micro-batches per step and data-parallel rank are fewer than the 4"):
        load(preset="tiny", overrides=["parallel.pp=4", f"batch.global_size={few.global_size}"])


def test_evaluation_is_a_tenth_of_the_run_where_nobody_says() -> None:
    assert [evaluate_every(EvaluateConfig(), steps, 10) for steps in (5, 40, 1999)] == [10, 10, 199]
    assert evaluate_every(EvaluateConfig(), 40, 1) == 4
    assert evaluate_every(EvaluateConfig(every=7), 1999, 10) == 7
    assert evaluate_every(EvaluateConfig(every=0), 1999, 10) == 0


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
