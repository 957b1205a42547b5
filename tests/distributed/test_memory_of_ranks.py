"""What plan/memory.py says of a rank is what the tensors of its real step take."""

from typing import Any

import pytest
import torch
import torch._dynamo  # here, so that forked ranks need not import it one by one
from steps import new_optimizer

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import InitConfig, ModelConfig, ParallelConfig, PrecisionConfig, ScalerConfig
from gptworks.data.loader import Batch
from gptworks.launch.world import World
from gptworks.parallel import pipeline  # noqa: F401  as above
from gptworks.parallel.build import FreshWeights, build
from gptworks.plan.memory import rank_memories
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.simulate.tracker import Tracker
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.step import train_step

LENGTH = 64
MODEL = ModelConfig(num_layers=4, hidden_size=128, num_heads=4, vocab_size=500, max_positions=LENGTH)

# (micro-batches, rows of each, compute, recompute, what else is said of the layout)
CASES: dict[str, list[tuple[int, int, str, str, dict[str, Any]]]] = {
    "fsdp2": [
        (3, 4, "fp32", "none", {"zero": 1}),
        (3, 4, "bf16", "none", {"zero": 2}),
        (1, 4, "bf16", "none", {"zero": 3}),
        (2, 1, "fp32", "full", {"zero": 3}),
    ],
    "tp2": [(1, 8, "fp32", "none", {}), (1, 4, "bf16", "full", {}), (2, 4, "fp32", "none", {"sequence": False})],
    "pp2": [
        (4, 4, "fp32", "none", {}),
        (4, 4, "bf16", "none", {}),
        (4, 4, "fp32", "none", {"schedule": "gpipe"}),
        (4, 4, "fp32", "none", {"schedule": "interleaved", "virtual_stages": 2}),
        (4, 4, "fp32", "none", {"schedule": "zero_bubble"}),
    ],
}


def most_bytes(world: World, accumulation: int, rows: int, compute: str, recompute: str, said: dict[str, Any]) -> int:
    """Of the second step, in which a rank knows its neighbours' shapes and Adam's moments exist."""
    parallel = ParallelConfig(**vars(world.layout) | said)
    weights = FreshWeights(InitConfig(), MODEL.num_layers, seed=1)
    with Tracker() as tracker:
        part = build(MODEL, world, DTYPES[compute], weights, parallel=parallel, recompute_mode=recompute).train()
        optimizer = new_optimizer(part)
        scaler = LossScaler(ScalerConfig(), enabled=False)
        windows = torch.randint(0, MODEL.vocab_size, (accumulation, rows, LENGTH + 1))
        batches = [
            Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None, None, torch.arange(rows)) for one in windows
        ]
        for step in (1, 2):
            tracker.peak = 0
            train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step)
    return tracker.peak


@pytest.mark.parametrize("name", CASES)
def test_a_real_step_of_a_rank_holds_what_is_predicted(run_layout, name: str) -> None:
    layout, cases = Layout.parse(name), CASES[name]
    measured = run_layout(layout, lambda world: (world.coords.pp, [most_bytes(world, *case) for case in cases]))
    for number, (accumulation, rows, compute, recompute, said) in enumerate(cases):
        batch = BatchPlan(rows * accumulation * layout.data_parallel, rows, accumulation, layout.data_parallel)
        workload = Workload(MODEL, LENGTH, PrecisionConfig.model_validate({"compute": compute}), kernels="cpu")
        choice = LayoutChoice(ParallelConfig(**vars(layout) | said), batch, recompute)
        expected = rank_memories(workload, choice)
        for rank in expected:
            most = max(peaks[number] for pp, peaks in measured if pp == rank.pp_rank)
            assert rank.peak == pytest.approx(most, rel=0.03), f"{cases[number]}, pipeline rank {rank.pp_rank}"
