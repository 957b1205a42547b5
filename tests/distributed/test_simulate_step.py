"""The simulator against what it simulates: bytes of a real step, messages of the formulas, FLOPs of theory."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch._dynamo  # here, so that forked ranks need not import it one by one

from gptworks.config.checks import fit_layout
from gptworks.config.derive import BatchPlan, Layout, solve_batch
from gptworks.config.load import load
from gptworks.config.schema import RunConfig, ScalerConfig
from gptworks.data.loader import Batch
from gptworks.errors import ConfigError, UsageError
from gptworks.launch.world import World
from gptworks.parallel import pipeline  # noqa: F401  as above
from gptworks.parallel.build import FreshWeights
from gptworks.plan import communication, sizes
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.simulate.step import Simulated, describe, simulate, simulate_all, watch_step
from gptworks.simulate.tracker import KINDS, Tracker
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.run import build_part
from gptworks.train.step import train_step

LENGTH, VOCAB = 16, 97
MODEL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": VOCAB, "max_positions": LENGTH}


def config(layout: str = "1", micro: int = 2, **changes: Any) -> RunConfig:
    """`changes`: section__key=value."""
    named: dict[str, Any] = {f"model.{key}": value for key, value in MODEL.items()}
    named |= {f"parallel.{axis}": size for axis, size in vars(Layout.parse(layout)).items()}
    named |= {"data.seq_len": LENGTH, "batch.micro_size": 2, "batch.accumulation": micro, "train.steps": 10}
    named |= {key.replace("__", "."): value for key, value in changes.items()}
    return load(overrides=[f"{key}={str(value).lower()}" for key, value in named.items()])


def real_batches(cfg: RunConfig, number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    rows = cfg.batch.micro_size

    def draw(highest: int) -> torch.Tensor:
        return torch.randint(0, highest, (rows, LENGTH), generator=generator)

    positions = draw(LENGTH) if cfg.data.reset_positions else None
    return [
        Batch(draw(VOCAB), draw(VOCAB), positions, draw(2) if cfg.data.reset_attention else None, torch.arange(rows))
        for _ in range(number)
    ]


def really(cfg: RunConfig, world: World) -> tuple[Tracker, dict[tuple[str, str], int], int]:
    """The second of two steps: in the first the stages of a pipeline tell each other their shapes."""
    parallel = fit_layout(cfg, world.layout)
    part = build_part(cfg, world, parallel, FreshWeights(cfg.init, cfg.model.num_layers, seed=1)).train()
    batches = real_batches(cfg, solve_batch(cfg.batch, world.data_parallel).accumulation)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    if world.layout.pp > 1:
        train_step(part, optim.build(part, cfg.optim), batches, world, scaler, clip=1.0, seed=1, step=1)
    seen = watch_step(part, cfg, world, batches)
    return seen.tracker, seen.communication, seen.flops.total


def as_seen(tracker: Tracker) -> dict[str, Any]:
    return {"peak": tracker.peak, "moment": tracker.moment, **tracker.at_peak()}


def as_simulated(found: Simulated) -> dict[str, Any]:
    kinds = dict(
        zip(KINDS, (found.parameters, found.gradients, found.optimizer, found.gathered, found.rest), strict=True)
    )
    return {"peak": found.peak, "moment": found.moment, **kinds}


ONE_PROCESS = [
    {},
    {"precision__compute": "bf16", "micro": 3, "model__vocab_size": 503},
    {"train__recompute": "full"},
    {"train__recompute": "full_attn", "precision__compute": "bf16", "micro": 1},
    {"train__recompute": "core_attn", "model__attention": "math"},
    {"model__dropout_hidden": 0.1, "model__dropout_embed": 0.1, "model__dropout_attention": 0.1},
    {"data__reset_attention": True, "data__reset_positions": True, "model__tied": False, "model__gelu": "erf"},
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ONE_PROCESS, ids=str)
def test_peak_of_fake_tensors_is_that_of_real_ones_to_the_byte(changes: dict[str, Any]) -> None:
    cfg = config(**changes)
    world = World(torch.device("cpu"))
    tracker, _, flops = really(cfg, world)
    found = simulate(cfg, 1, 0, micro_batches=cfg.batch.accumulation)
    assert as_simulated(found) == as_seen(tracker)
    assert found.flops == flops
    assert found.parameters == 4 * sizes.num_parameters(cfg.model)
    assert found.optimizer >= 2 * found.parameters
    assert (found.gradients > 0) == (found.accumulation > 1 or found.moment != "loss")
    assert found.rest > 0 and found.gathered == 0
    assert sum(group.bytes for group in found.largest) == found.peak


def test_the_peak_knows_what_is_recomputed_and_kept() -> None:
    """With many tokens activations are most of it, and the modes of recomputation come in their order."""
    long = {"model__max_positions": 256, "data__seq_len": 256, "batch__micro_size": 4, "model__attention": "math"}
    rest = {mode: simulate(config(train__recompute=mode, **long), 1, 0).rest for mode in ("none", "full_attn", "full")}
    assert rest["full"] < rest["full_attn"] < rest["none"]


# (layout, number of micro-batches, what else is said)
REAL: list[tuple[str, int, dict[str, Any]]] = [
    ("dp2", 2, {}),
    ("fsdp2", 2, {"parallel__zero": 1, "precision__compute": "bf16"}),
    ("fsdp2", 2, {"parallel__zero": 2}),
    ("fsdp2", 2, {"parallel__zero": 3}),
    ("tp2", 2, {"parallel__sequence": True, "precision__compute": "bf16"}),
    ("tp2", 2, {"parallel__sequence": False}),
    ("pp2", 4, {}),
    ("pp2", 2, {"parallel__schedule": "gpipe"}),
    ("pp2", 4, {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2, "model__num_layers": 5}),
    ("pp2", 4, {"parallel__schedule": "zero_bubble"}),
]
LLAMA = {
    "model__norm": "rmsnorm",
    "model__positions": "rope",
    "model__mlp": "swiglu",
    "model__bias": "none",
    "model__num_kv_heads": 2,
    "model__tied": False,
}
VIRTUAL = {"model__num_layers": 4, "parallel__schedule": "zero_bubble", "parallel__virtual_stages": 2}
IMAGINED: list[tuple[str, int, dict[str, Any]]] = [
    ("fsdp2", 2, {"parallel__zero": 0}),
    ("dp2.fsdp4", 3, {"parallel__zero": 2}),
    ("fsdp2.tp2", 2, {"parallel__zero": 3, "precision__compute": "bf16"}),
    ("pp4.tp2", 5, {"model__num_layers": 5, "model__tied": False}),
    ("pp2.fsdp2", 3, {"parallel__zero": 1}),
    ("pp2.fsdp2", 3, {"parallel__zero": 2}),
    ("pp2.fsdp2", 3, {"parallel__zero": 3}),
    ("pp2.dp2.fsdp2.tp2", 2, {"precision__compute": "bf16"}),
    ("pp2.tp2", 4, VIRTUAL),
    ("tp2", 2, LLAMA | {"model__qk_norm": True, "parallel__sequence": False}),
    ("pp2.fsdp2.tp2", 2, LLAMA | {"model__qk_norm": True, "parallel__sequence": True, "precision__compute": "bf16"}),
    (
        "pp2.tp2",
        4,
        LLAMA | {"model__num_layers": 4, "parallel__schedule": "zero_bubble", "parallel__virtual_stages": 2},
    ),
]


def formula(cfg: RunConfig, layout: Layout, rank: int, micro: int) -> dict[tuple[str, str], int]:
    parallel = fit_layout(cfg, layout)
    batch = BatchPlan(0, cfg.batch.micro_size, micro, layout.data_parallel)
    place = World(torch.device("cpu"), layout, rank).coords
    terms = communication.per_step(Workload.from_config(cfg, "cpu"), LayoutChoice(parallel, batch), place)
    return communication.totals(terms)


@pytest.mark.parametrize(("name", "micro", "changes"), IMAGINED, ids=str)
def test_messages_are_those_of_the_formulas(name: str, micro: int, changes: dict[str, Any]) -> None:
    layout, cfg = Layout.parse(name), config(name, micro, **changes)
    last = layout.world_size - 1
    found = simulate(cfg, layout.world_size, last, micro_batches=micro)
    assert found.communication == formula(cfg, layout, last, micro)
    assert found.messages.keys() == found.communication.keys()


@pytest.mark.parametrize(
    "name",
    [
        name if name == "tp2" else pytest.param(name, marks=pytest.mark.slow)
        for name in dict.fromkeys(layout for layout, _, _ in REAL)
    ],
)
def test_an_imagined_rank_is_like_a_real_one(run_layout, name: str) -> None:
    """The peak of each rank of a real world, what it was made of and what was sent, to the byte."""
    layout = Layout.parse(name)
    cases = [config(name, micro, **changes) for given, micro, changes in REAL if given == name]

    def on_rank(world: World) -> list[Any]:
        found = [really(cfg, world) for cfg in cases]
        return [(as_seen(tracker), sent, flops) for tracker, sent, flops in found]

    # A thread of gloo gives back what it has sent a moment after the message has arrived, too late on a busy
    # machine: a peak is the smallest of some tries. What the step itself holds it holds in each of them.
    tries = [run_layout(layout, on_rank)]
    for rank in range(layout.world_size):
        for number, cfg in enumerate(cases):
            found = simulate(cfg, layout.world_size, rank, micro_batches=cfg.batch.accumulation)
            while tries[-1][rank][number][0] != as_simulated(found) and len(tries) < 4:
                tries.append(run_layout(layout, on_rank))
            seen, sent, flops = min((results[rank][number] for results in tries), key=lambda result: result[0]["peak"])
            assert (as_simulated(found), found.communication, found.flops) == (seen, sent, flops), f"{cfg.parallel}"
            assert sent == formula(cfg, layout, rank, found.micro_batches)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("1", {}),
        ("fsdp2", {"parallel__zero": 1}),
        ("pp2", {}),
        ("pp2", {"parallel__schedule": "interleaved", "parallel__virtual_stages": 2, "model__num_layers": 4}),
        ("pp2", {"parallel__schedule": "zero_bubble"}),
        ("pp2.fsdp2", {}),
    ],
    ids=str,
)
def test_few_micro_batches_have_the_peak_of_many(name: str, changes: dict[str, Any]) -> None:
    """What each further one adds is known: its tokens, and where a schedule waits for messages last, what it sent."""
    cfg, layout = config(name, 6, **changes), Layout.parse(name)
    few, many = simulate(cfg, layout.world_size, 0), simulate(cfg, layout.world_size, 0, 6)
    assert few.micro_batches < many.micro_batches == few.accumulation == 6
    assert (few.left_out > 0) == (layout.pp > 1) and many.left_out == 0
    labels = 8 * cfg.batch.micro_size * LENGTH  # those of a batch, which lie there before the step; and its loss
    assert abs(many.peak - few.peak) <= (many.micro_batches - few.micro_batches) * (labels + 16)
    assert few.flops_per_step == many.flops


def test_flops_are_those_of_theory() -> None:
    tokens = 2 * 2 * LENGTH
    cfg = config()
    whole = sizes.flops_per_token(cfg.model, LENGTH) * tokens
    assert simulate(cfg, 1, 0, 2).flops == whole
    # A second forward pass of the blocks, up to what the backward pass needs: not the last product of each.
    h, f, layers = cfg.model.hidden_size, cfg.model.ffn_size, cfg.model.num_layers
    forward = layers * (2 * (4 * h * h + h * f) + 2 * h * LENGTH)
    assert simulate(config(train__recompute="full"), 1, 0, 2).flops == whole + forward * tokens
    # Written out, attention computes what is masked away too.
    assert simulate(config(model__attention="math"), 1, 0, 2).flops == whole + 3 * layers * 2 * h * LENGTH * tokens


def test_flops_of_grouped_queries_and_a_gate_are_those_of_theory() -> None:
    cfg = config(**LLAMA)
    assert simulate(cfg, 1, 0, 2).flops == sizes.flops_per_token(cfg.model, LENGTH) * 2 * 2 * LENGTH
    gpt2, llama = config().model, cfg.model
    h, f = llama.hidden_size, llama.ffn_size
    kv = llama.num_kv_heads * llama.head_size
    more = f * h - 2 * (h - kv) * h  # the gate, less what keys and values of fewer heads save
    difference = sizes.flops_per_token(llama, LENGTH) - sizes.flops_per_token(gpt2, LENGTH)
    assert difference == 6 * llama.num_layers * more
    # A window of w tokens: the first see fewer.
    w = LENGTH // 4
    seen = sum(min(t + 0.5, w) for t in range(LENGTH)) / LENGTH  # of itself, half
    windowed = sizes.flops_per_token(llama.model_copy(update={"sliding_window": w}), LENGTH)
    saved = 3 * llama.num_layers * 4 * h * (LENGTH / 2 - seen)
    assert sizes.flops_per_token(llama, LENGTH) - windowed == pytest.approx(saved)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dp2", "pp2.tp2"])
def test_ranks_share_the_flops(name: str) -> None:
    """All of them together do what one process would do of their batch: nothing is computed twice."""
    layout = Layout.parse(name)
    cfg = config(name, 2, model__vocab_size=96)
    found = sum(simulate(cfg, layout.world_size, rank, 2).flops for rank in range(layout.world_size))
    tokens = 2 * 2 * LENGTH * layout.data_parallel
    assert found == sizes.flops_per_token(cfg.model, LENGTH) * tokens


GPT3 = {
    "model.max_positions": 2048,
    "data.seq_len": 2048,
    "batch.global_size": 1536,
    "batch.micro_size": 1,
    "precision.compute": "bf16",
    "parallel.pp": 16,
    "parallel.fsdp": 8,
    "parallel.tp": 8,
    "train.steps": 1,
}


@pytest.mark.slow
def test_gpt3_on_1024_ranks() -> None:
    """One rank of tp8 x pp16 x fsdp8, with 16 of its 96 layers so that the test is short: one a stage."""
    cfg = load(preset="175B", overrides=[f"{key}={value}" for key, value in GPT3.items()] + ["model.num_layers=16"])
    found = simulate(cfg, 1024, 0)
    assert (found.micro_batches, found.accumulation) == (18, 192)
    h = 12288
    layer = 12 * h * h // 8 + (3 * h + 4 * h) // 8 + (2 + 4) * h
    here = layer + (51200 // 8 + 2048) * h
    assert found.parameters == here // 8 * 4
    assert found.gathered == layer * 2 + (51200 // 8 + 2048) * h * 4
    # 16 micro-batches under way; of each at least what both pairs of matrices take in, in bf16, of some tokens.
    assert found.rest > 16 * 2 * 2 * 2048 * h // 8
    assert found.peak < 40 * 2**30
    assert found.seconds < 60
    batch = BatchPlan(0, 1, 18, 8)
    choice = LayoutChoice(fit_layout(cfg, found.layout), batch)
    terms = communication.per_step(Workload.from_config(cfg, "cpu"), choice)
    assert found.communication == communication.totals(terms)


@pytest.mark.slow
def test_each_kind_of_pipeline_rank_once() -> None:
    changes = {"parallel__schedule": "gpipe", "model__num_layers": 4}
    found = simulate_all(config("pp4", 4, **changes), 4)
    assert [one.pp_ranks for one in found] == [range(1), range(1, 3), range(3, 4)]
    assert [one.rank for one in found] == [0, 1, 3]
    found = simulate_all(config("pp4", 8, model__num_layers=4), 4)
    assert [one.pp_ranks for one in found] == [range(rank, rank + 1) for rank in range(4)]
    assert found[1].rest > found[2].rest, "an earlier stage has more micro-batches under way"
    told = describe(found)
    assert "micro-batches    6 of 8" in told and "pp send" in told and f"{found[0].peak / 2**30:.2f}" in told
    parsed = found[0].as_json()
    assert parsed["bytes"]["peak"] == found[0].peak == sum(parsed["bytes"].values()) - parsed["bytes"]["peak"]
    assert parsed["communication"]["pp.send"] == found[0].communication["pp", "send"]


def test_what_cannot_run_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="8 ranks, but the world has 6"):
        simulate(config("pp4.tp2", 4, model__num_layers=4), 6, 0)
    with pytest.raises(UsageError, match="rank 8 of a world of 8"):
        simulate(config("pp4.tp2", 4, model__num_layers=4), 8, 8)
    with pytest.raises(ConfigError, match="3 micro-batches"):
        simulate(config("pp4.tp2", 4, model__num_layers=4), 8, 0, micro_batches=3)
    # Nothing of the imagined world is left: another can be imagined.
    assert simulate(config("pp4.tp2", 4, model__num_layers=4), 8, 7).rank == 7
    assert not torch.distributed.is_initialized()


# The tracker itself


def test_tracker_counts_storages_once_and_until_they_are_freed() -> None:
    with Tracker() as tracker:
        a = torch.zeros(1000)
        view = a.view(10, 100)[2:]
        assert tracker.live == 4000
        del a
        assert tracker.live == 4000, "the view holds it"
        b = view + 1
        assert (tracker.live, tracker.peak) == (4000 + 3200, 7200)
        del view, b
        assert (tracker.live, tracker.peak) == (0, 7200)
        storage = torch.empty(10).untyped_storage()
        storage.resize_(4000)
        assert tracker.live == 4000
        storage.resize_(0)
        assert tracker.live == 0 and tracker.peak == 7200
    resize = torch.UntypedStorage.resize_
    assert "tracker" not in resize.__qualname__.lower(), "torch is as before"


def test_tracker_tells_kinds_and_moments() -> None:
    weight = torch.nn.Parameter(torch.zeros(64, 64))
    with Tracker() as tracker:
        tracker.tell("parameter", [weight])
        (torch.ones(8, 64) @ weight).sum().backward()
        tracker.tell("gradient", [weight.grad])
    kinds = Counter(tracker.at_peak())
    assert kinds["parameter"] == kinds["gradient"] == 4 * 64 * 64
    assert tracker.moment == "backward"
    assert sum(kinds.values()) == tracker.peak
    assert {group.kind for group in tracker.groups_at_peak()} == {"parameter", "gradient", "other"}
