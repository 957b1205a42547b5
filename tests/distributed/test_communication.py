"""What a step really sends, counted operator by operator, is what plan/communication.py says, to the byte."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo  # here, so that forked ranks need not import it one by one
from steps import LENGTH, ROWS, Case, build_part, micro_batches, new_optimizer, shape

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig, ScalerConfig
from gptworks.launch.world import World
from gptworks.parallel import pipeline  # noqa: F401  as above
from gptworks.parallel.comm_counter import CommCounter
from gptworks.plan import communication
from gptworks.plan.communication import Term
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.step import train_step

Bytes = dict[tuple[str, str], int]

# (layout, number of micro-batches, what else is said of the layout)
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("dp2", 2, {}),
    ("fsdp2", 4, {"zero": 0}),
    ("fsdp2", 4, {"zero": 1}),
    ("fsdp2", 4, {"zero": 2}),
    ("fsdp2", 4, {"zero": 3}),
    ("tp2", 2, {"sequence": True}),
    ("tp2", 2, {"sequence": False}),
    ("pp2", 4, {}),
    ("pp2", 4, {"schedule": "interleaved", "virtual_stages": 2}),
]
COMBINED: list[tuple[str, int, dict[str, Any]]] = [
    ("dp2.fsdp2", 2, {"zero": 2}),
    ("fsdp2.tp2", 2, {"zero": 3}),
    ("pp2.fsdp2", 4, {}),
    ("pp2.fsdp2", 4, {"zero": 2}),
    ("pp2.fsdp2", 4, {"zero": 3}),
    ("pp2.tp2", 4, {}),
]


def counted(world: World, case: Case) -> tuple[Layout, Bytes]:
    """Of the second step: in the first the stages of a pipeline get to know each other's shapes."""
    part = build_part(world, case)
    optimizer = new_optimizer(part)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    for step in (1, 2):
        traffic = CommCounter(world)
        batches = micro_batches(world, step, case.accumulation)
        with traffic:
            report = train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step)
        assert report.updated
    return world.coords, dict(traffic.bytes)


def terms(model: ModelConfig, layout: Layout, case: Case, place: Layout) -> list[Term]:
    parallel = ParallelConfig(**vars(layout) | case.parallel)
    rows = ROWS // (case.accumulation * layout.data_parallel)
    batch = BatchPlan(ROWS, rows, case.accumulation, layout.data_parallel)
    names = {dtype: name for name, dtype in DTYPES.items()}
    precision = PrecisionConfig.model_validate({"compute": names[case.compute]})
    return communication.per_step(Workload(model, LENGTH, precision), LayoutChoice(parallel, batch), place)


def assert_as_the_formula_says(run_layout: Any, layout: Layout, cases: list[Case]) -> None:
    for found in run_layout(layout, lambda world: [counted(world, case) for case in cases]):
        for case, (place, counts) in zip(cases, found, strict=True):
            expected = terms(shape(**case.model), layout, case, place)
            assert counts == communication.totals(expected), f"{layout} at {place!r}, {case.parallel}"
            # Were any one of the messages left out of the formula, or said twice, that would be seen.
            for term in expected:
                without = [other for other in expected if other is not term]
                assert counts != communication.totals(without) and counts != communication.totals([*expected, term])


@pytest.mark.parametrize("name", ["dp2", "fsdp2", "tp2", "pp2"])
def test_bytes_of_a_step(run_layout, name: str) -> None:
    """Five layers, so that stages and blocks differ in number; a vocabulary that two does not divide."""
    cases = [Case(micro, {"num_layers": 5}, parallel) for layout, micro, parallel in CASES if layout == name]
    cases += [replace(cases[0], compute=torch.bfloat16), replace(cases[0], model={"num_layers": 5, "tied": False})]
    assert_as_the_formula_says(run_layout, Layout.parse(name), cases)


@pytest.mark.slow
@pytest.mark.parametrize("name", dict.fromkeys(layout for layout, _, _ in COMBINED))
def test_bytes_of_a_step_in_two_directions(run_layout, name: str) -> None:
    cases = [Case(micro, {"num_layers": 3}, parallel) for layout, micro, parallel in COMBINED if layout == name]
    assert_as_the_formula_says(run_layout, Layout.parse(name), cases)
