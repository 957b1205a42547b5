"""What plan/memory.py says of a step is what the tensors of a real step take, counted operator by operator."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import (
    InitConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ScalerConfig,
)
from gptworks.data.loader import Batch
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build
from gptworks.plan import activations
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import Ledger
from gptworks.plan.memory import RankMemory, rank_memories
from gptworks.plan.schedule import order
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.simulate.tracker import Tracker
from gptworks.train import optim
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.step import train_step

LENGTH = 64
SHAPE = {"num_layers": 3, "hidden_size": 128, "num_heads": 4, "vocab_size": 500, "max_positions": LENGTH}


def shape(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | changes)


def predict(
    model: ModelConfig | None = None,
    rows: int = 4,
    accumulation: int = 1,
    *,
    compute: str = "fp32",
    recompute: str = "none",
    kernels: str = "cpu",
    **parallel: Any,
) -> list[RankMemory]:
    known = ParallelConfig(**parallel)
    data = known.dp * known.fsdp  # type: ignore[operator]
    batch = BatchPlan(rows * accumulation * data, rows, accumulation, data)
    precision = PrecisionConfig.model_validate({"compute": compute})
    model = model or shape()
    workload = Workload(model, LENGTH, precision, kernels=kernels)
    return rank_memories(workload, LayoutChoice(known, batch, recompute))


def most_bytes(model: ModelConfig, rows: int, accumulation: int, compute: str, recompute: str) -> int:
    """Of the second step: Adam's moments are there from the end of the first."""
    world = World(torch.device("cpu"))
    weights = FreshWeights(InitConfig(), model.num_layers, seed=1)
    with Tracker() as tracker:
        part = build(model, world, DTYPES[compute], weights, recompute_mode=recompute).train()
        optimizer = optim.build(part, OptimConfig())
        scaler = LossScaler(ScalerConfig(), enabled=False)
        windows = torch.randint(0, model.vocab_size, (accumulation, rows, LENGTH + 1))
        batches = [
            Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None, None, torch.arange(rows)) for one in windows
        ]
        for step in (1, 2):
            tracker.peak = 0
            train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step)
    return tracker.peak


DROPOUT = {"dropout_embed": 0.1, "dropout_hidden": 0.1}
MATH = {"attention": "math"}
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "ffn_size": 344}
GROUPED = LLAMA | {"num_kv_heads": 2}
QWEN3 = GROUPED | {"qk_norm": True, "head_size": 48}
CASES: list[tuple[dict[str, Any], int, str, str]] = [
    ({}, 1, "fp32", "none"),
    ({}, 3, "fp32", "none"),
    ({}, 2, "bf16", "none"),
    ({}, 1, "fp32", "full"),
    ({}, 2, "bf16", "full"),
    ({}, 1, "fp32", "full_attn"),
    ({}, 1, "bf16", "full_attn"),
    ({}, 1, "fp32", "core_attn"),
    (MATH, 1, "fp32", "none"),
    (MATH, 1, "bf16", "none"),
    (MATH, 1, "bf16", "core_attn"),
    (DROPOUT, 2, "fp32", "none"),
    (DROPOUT, 1, "bf16", "full"),
    (DROPOUT | {"dropout_attention": 0.1}, 1, "fp32", "none"),
    (DROPOUT | {"dropout_attention": 0.1}, 1, "bf16", "full_attn"),
    ({"tied": False}, 2, "fp32", "none"),
    ({"gelu": "sigmoid"}, 1, "fp32", "none"),
    ({"gelu": "erf", "ffn_size": 300}, 1, "fp32", "none"),
    ({"vocab_size": 4000, "num_layers": 1}, 2, "fp32", "none"),
    ({"vocab_size": 4000, "num_layers": 1}, 1, "bf16", "full"),
    (LLAMA, 1, "fp32", "none"),
    (LLAMA | {"sliding_window": 16}, 1, "fp32", "none"),
    (LLAMA | {"num_kv_heads": 1}, 2, "bf16", "none"),
    (GROUPED, 1, "bf16", "full"),
    (GROUPED, 1, "fp32", "full_attn"),
    (GROUPED, 1, "fp32", "core_attn"),
    (GROUPED | MATH, 1, "fp32", "none"),
    (GROUPED | {"dropout_attention": 0.1}, 1, "fp32", "none"),
    (QWEN3, 1, "fp32", "none"),
    (QWEN3, 1, "bf16", "none"),
    ({"num_kv_heads": 2}, 1, "fp32", "none"),
    ({"norm": "rmsnorm"}, 1, "fp32", "none"),
    ({"mlp": "swiglu"}, 1, "fp32", "none"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "accumulation", "compute", "recompute"), CASES)
def test_a_real_step_holds_what_is_predicted(
    changes: dict[str, Any], accumulation: int, compute: str, recompute: str
) -> None:
    model = shape(**changes)
    (found,) = predict(model, accumulation=accumulation, compute=compute, recompute=recompute)
    measured = most_bytes(model, 4, accumulation, compute, recompute)
    static = found.parameters + found.optimizer
    # Of what a step adds, not only of the whole; the worst case is attention recomputed under dropout.
    assert found.peak - static == pytest.approx(measured - static, rel=0.03)


def test_one_row_needs_no_copies_of_the_heads() -> None:
    model = shape(**MATH)
    (found,) = predict(model, rows=1)
    assert found.peak == pytest.approx(most_bytes(model, 1, 1, "fp32", "none"), rel=0.005)


# By hand

R, D, F, N = 4 * LENGTH, 128, 512, 4  # tokens, hidden, inner, heads


def block(**changes: Any) -> activations.Passes:
    matrices = (("qkv", 3 * D * D), ("out", D * D), ("up", D * F), ("down", D * F))
    known = {"rows": 4, "length": LENGTH, "hidden": D, "ffn": F, "heads": N, "matrices": matrices}
    return activations.block(BlockShape(**known | changes))


def test_what_a_block_keeps_counted_by_hand() -> None:
    # In fp32: inputs of both norms and their outputs, queries, keys, values, what the heads give; the inner layer
    # before and after GELU. Mean and deviation of two norms, logsumexp of each head.
    assert block().kept.activations == R * 4 * ((2 + 2 + 3 + 1) * D + 2 * F) + R * 4 * (2 * 2 + N)
    # In bf16 the norms keep fp32 copies of their inputs, and every matrix its bf16 cast.
    weights = 4 * D * D + 2 * D * F
    narrow = R * (2 * 4 * D + 2 * (2 + 3 + 1) * D + 2 * 2 * F) + R * 4 * (2 * 2 + N) + 2 * weights
    assert block(compute=2).kept.activations == narrow
    # Where FSDP has cast them before it gathered them, there are none of their own.
    assert block(compute=2, casts=False).kept.activations == narrow - 2 * weights
    assert block(recompute="full").kept.activations == R * D * 4
    # Dropout on a CPU keeps a factor for each number, on CUDA a byte.
    assert block(dropout=True).kept.activations == block().kept.activations + 2 * R * D * 4
    assert block(dropout=True, cpu=False).kept.activations == block().kept.activations + 2 * R * D


def test_the_peak_of_a_small_step_by_hand() -> None:
    """A large vocabulary: the peak is in the loss. Parameters, two moments; the blocks; input, mean and deviation of
    the last norm and what it gives; gradients of it and of the head; logits; tokens and labels."""
    model = shape(vocab_size=4000)
    (found,) = predict(model)
    parameters = (4000 + LENGTH) * D + 2 * D + 3 * (12 * D * D + 13 * D)
    kept = 3 * block().kept.activations
    loss = R * 4 * (3 * D + 2) + 4000 * D * 4 + R * 4000 * 4
    assert found.moment == "loss" and found.in_flight == 1
    assert (found.parameters, found.optimizer, found.gradients) == (4 * parameters, 8 * parameters, 0)
    assert found.peak == 12 * parameters + kept + loss + 2 * 8 * R


# What must hold of any formula


def test_recomputation_keeps_less() -> None:
    of = {mode: predict(recompute=mode)[0].peak for mode in ("none", "core_attn", "full_attn", "full")}
    assert of["none"] > of["core_attn"] > of["full_attn"] > of["full"]


def test_each_stage_of_sharding_holds_less() -> None:
    peaks = [predict(rows=1, accumulation=2, compute="bf16", fsdp=4, zero=zero)[0] for zero in (0, 1, 2, 3)]
    assert sorted((found.peak for found in peaks), reverse=True) == [found.peak for found in peaks]
    assert [found.parameters * 4 for found in peaks[1:]] == [peaks[0].parameters] * 3


def test_more_shards_hold_less() -> None:
    peaks = [predict(rows=1, fsdp=shards)[0].peak for shards in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)


def test_later_stages_keep_fewer_micro_batches() -> None:
    found = predict(shape(num_layers=8), accumulation=8, pp=4)
    assert [rank.in_flight for rank in found] == [4, 3, 2, 1]
    kept = [rank.activations for rank in found]
    assert kept[1] > kept[2] > kept[3] and [rank.layers for rank in found] == [2, 2, 2, 2]
    everything = predict(shape(num_layers=8), accumulation=8, pp=4, schedule="gpipe")
    assert [rank.in_flight for rank in everything] == [8] * 4
    assert all(more.peak > fewer.peak for more, fewer in zip(everything, found, strict=True))


def test_splitting_the_sequence_holds_less_than_tensor_parallelism_alone() -> None:
    whole, halves = predict()[0], predict(tp=2, sequence=False)[0]
    split = predict(tp=2, sequence=True)[0]
    assert whole.peak > halves.peak > split.peak


def test_the_number_of_micro_batches_does_not_change_1f1b_and_is_quick() -> None:
    few, many = (predict(shape(num_layers=8), accumulation=number, pp=4) for number in (8, 800))
    tokens = 2 * 8 * R * (800 - 8)
    assert [rank.peak + tokens for rank in few] == [rank.peak for rank in many]


def test_offloaded_shards_are_not_on_the_device() -> None:
    (here,) = predict(fsdp=2, kernels="cuda")
    (away,) = predict(fsdp=2, kernels="cuda", offload=True)
    assert (away.parameters, away.optimizer) == (0, 0) and away.peak < here.peak


def test_the_parts_add_up_to_the_peak() -> None:
    for found in predict(shape(num_layers=8), accumulation=8, pp=4, tp=2, compute="bf16"):
        parts = (found.parameters, found.gradients, found.optimizer)
        rest = (found.activations, found.temporaries, found.communication)
        assert found.peak == sum(parts) + sum(rest) and min(*parts, *rest) >= 0


# Schedules

NAMES = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


@pytest.mark.parametrize(("schedule", "virtual"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 2)])
def test_the_order_of_passes_is_that_of_torch(schedule: str, virtual: int) -> None:
    from torch.distributed.pipelining import schedules

    def torchs(rank: int) -> list[tuple[str, int]]:
        fake: Any = type("Schedule", (), {})()
        fake.pp_group_size, fake.n_local_stages, fake._n_microbatches = 4, virtual, 8
        fake.number_of_rounds, fake.microbatches_per_round = 2, 4
        kind = {
            "interleaved": schedules.ScheduleInterleaved1F1B,
            "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        }
        actions = kind[schedule]._calculate_single_rank_operations(fake, rank)
        return [(NAMES[a.computation_type.name], a.stage_index) for a in actions if a is not None]

    for rank in range(4):
        ours = list(order(schedule, 4, virtual, rank, 8))
        assert len(ours) == 8 * virtual * (3 if schedule == "zero_bubble" else 2)
        if virtual > 1:
            assert ours == torchs(rank)


# The ledger


def test_a_ledger_remembers_its_highest_moment() -> None:
    ledger = Ledger()
    ledger.keep(a=10)
    most = ledger.highest(lambda book: (book.use(b=5), book.drop("b"), book.grow(c=2)))
    assert (most.activations, most.temporaries, most.gradients) == (10, 5, 0)
    assert ledger.now == 12 and ledger.snapshot().gradients == 2


def test_planning_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from gptworks.config.derive import BatchPlan\n"
        "from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig\n"
        "from gptworks.plan.memory import rank_memories\n"
        "from gptworks.plan.workload import LayoutChoice, Workload\n"
        "rank_memories(Workload(ModelConfig(), 128), LayoutChoice(ParallelConfig(), BatchPlan(4, 4, 1, 1)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
