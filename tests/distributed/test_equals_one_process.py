"""Whatever the layout and the options of a run, it learns what one process learns: the one place where that is proved.

The losses, gradient norms and updates of `train_step` on every rank are those of `train_step` alone. Labels are masked,
so that ranks and micro-batches score different numbers of tokens. All cases of a layout are trained in one launch.
test_layouts.py looks closer, at one case: at every gradient, at the first weights and at the order of the samples.
"""

from typing import Any, get_args

import pytest
from steps import ONE, Case, assert_equal_to_one_process, micro_batches, run_steps

from gptworks.config.derive import Layout
from gptworks.config.schema import ParallelConfig
from gptworks.launch.world import World

# Pipelines

ONE_F_ONE_B = {"schedule": "1f1b"}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
ONE_STAGE, TWO_STAGES = {"schedule": "zero_bubble"}, {"schedule": "zero_bubble", "virtual_stages": 2}
SCHEDULES: list[dict[str, Any]] = [{"schedule": "gpipe"}, ONE_F_ONE_B, INTERLEAVED, ONE_STAGE, TWO_STAGES]


def piped(
    parallel: dict[str, Any], accumulation: int = 4, *, build: dict[str, Any] | None = None, **model: Any
) -> Case:
    tiny = {"num_layers": 4, "hidden_size": 16, "num_heads": 2}
    return Case(accumulation, model=tiny | model, parallel=parallel, build=build or {}, steps=3)


OPTIONS_OF_A_PIPELINE = [
    *(piped(schedule, tied=False) for schedule in (ONE_F_ONE_B, TWO_STAGES)),
    *(piped(schedule, num_layers=5) for schedule in (INTERLEAVED, TWO_STAGES)),  # which the stages do not divide
    piped(INTERLEAVED, build={"recompute_mode": "full_attn"}),
    piped(TWO_STAGES, build={"recompute_mode": "full"}),
]
# With ranks between the first and the last, more micro-batches than they need and just enough.
ON_FOUR = [piped(ONE_F_ONE_B, 8, num_layers=5), piped(INTERLEAVED, 8, num_layers=8), piped(ONE_STAGE, 4)]
CUT = [piped(schedule) for schedule in (INTERLEAVED, ONE_STAGE, TWO_STAGES)]
SHARDED = [
    *(piped({**schedule, "zero": zero}) for schedule in (ONE_STAGE, TWO_STAGES) for zero in (1, 2, 3)),
    piped({**TWO_STAGES, "zero": 3, "offload": True}),
]
OFFLOADED = [piped({"zero": zero, "offload": True}) for zero in (2, 3)]

# Replicas and shards

REPLICAS = [Case(4, parallel={"zero": 0}, steps=3), Case(1, parallel={"zero": 0}, steps=3)]
STAGES = [*(Case(4, parallel={"zero": zero}, steps=3) for zero in range(4)), Case(1, parallel={"zero": 3}, steps=3)]
CLIPPED = Case(2, clip=0.05)  # below every norm of these steps
OPTIONS_OF_A_MODEL = [
    Case(model={"tied": False}),
    CLIPPED,
    Case(2, clip=0.0),
    Case(1, model={"hidden_size": 36, "num_heads": 3, "vocab_size": 101}),  # nothing divides evenly
]

# Cut matrices

SEQUENCE = [Case(2, parallel={"sequence": sequence}, steps=3) for sequence in (True, False)]

slow = pytest.mark.slow
CASES = [
    pytest.param("dp2", REPLICAS, id="dp2"),
    pytest.param("fsdp2", STAGES, id="fsdp2"),
    pytest.param("tp2", SEQUENCE, id="tp2"),
    pytest.param("pp2", [piped(schedule) for schedule in SCHEDULES], id="pp2"),
    pytest.param("dp2", OPTIONS_OF_A_MODEL, id="dp2-options", marks=slow),
    pytest.param("fsdp2", OPTIONS_OF_A_MODEL, id="fsdp2-options", marks=slow),
    pytest.param("dp2.fsdp2", STAGES, id="dp2.fsdp2", marks=slow),
    pytest.param("pp2", OPTIONS_OF_A_PIPELINE, id="pp2-options", marks=slow),
    pytest.param("pp4", ON_FOUR, id="pp4", marks=slow),
    pytest.param("pp2.tp2", CUT, id="pp2.tp2", marks=slow),
    pytest.param("pp2.fsdp2", SHARDED, id="pp2.fsdp2", marks=slow),
    pytest.param("fsdp2.tp2", OFFLOADED, id="fsdp2.tp2", marks=slow),
]


@pytest.mark.parametrize(("layout", "cases"), CASES)
def test_a_layout_learns_what_one_process_learns(run_layout, layout: str, cases: list[Case]) -> None:
    ranks = run_layout(Layout.parse(layout), lambda world: [run_steps(world, case) for case in cases])
    for number, case in enumerate(cases):
        alone = Case(case.accumulation, model=case.model, clip=case.clip, steps=case.steps)
        assert_equal_to_one_process([found[number] for found in ranks], run_steps(ONE, alone), (layout, case))


@pytest.mark.parametrize("layout", ["dp2", "fsdp2", "dp2.fsdp2"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_ranks_score_different_numbers_of_tokens(layout: str, accumulation: int) -> None:
    """Equal counts would not tell a sum from a mean of means."""
    worlds = [World(ONE.device, Layout.parse(layout), rank) for rank in (0, 1)]
    assert len({sum(b.num_scored for b in micro_batches(world, 1, accumulation)) for world in worlds}) == 2


def test_every_schedule_is_among_them() -> None:
    offered = get_args(ParallelConfig.model_fields["schedule"].annotation)
    assert {case["schedule"] for case in SCHEDULES} == set(offered)


def test_the_small_clip_clips() -> None:
    assert all(report.grad_norm > CLIPPED.clip for report in run_steps(ONE, CLIPPED))
