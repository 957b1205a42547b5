"""The search over layouts, against the checks of the configuration itself; and what makes a layout fit."""

from collections import Counter
from itertools import product
from typing import Any

import pytest

from gptworks.config import load
from gptworks.config.derive import Layout, layouts, solve_batch
from gptworks.config.schema import RunConfig
from gptworks.errors import ConfigError
from gptworks.plan import changes
from gptworks.plan.budget import MemoryBudget
from gptworks.plan.devices import Device, custom_device, device, link
from gptworks.plan.memory import RankMemory, rank_memories, state_memory
from gptworks.plan.rejections import Reason, Rejected, grouped
from gptworks.plan.search import Search, SearchResult, fewest_devices, search, usual_batch
from gptworks.plan.sizes import num_parameters
from gptworks.plan.workload import LayoutChoice, Workload

SMALL = ["model.num_layers=4", "model.hidden_size=64", "model.num_heads=4", "model.vocab_size=512"]
SMALL += ["model.max_positions=64", "precision.compute=fp16"]


def small(*more: str) -> RunConfig:
    return load(overrides=[*SMALL, *more])


def workload_of(cfg: RunConfig) -> Workload:
    return Workload.from_config(cfg, "cuda")


def card(gib: float) -> Device:
    return custom_device(memory=gib * 2**30, tflops=100, reserved=0)


def searched(cfg: RunConfig, on: Device, devices: int, global_size: int, **fixed: Any) -> SearchResult:
    return search(workload_of(cfg), on, link(of=on), devices, global_size, fixed=fixed.get("fixed"))


def overrides(choice: LayoutChoice) -> list[str]:
    return [f"{key}={value}" for key, value in choice.settings().items()]


# Search


def test_all_that_a_run_would_take_and_nothing_else_is_found() -> None:
    """Every combination is offered to the loader; it and the search agree on which there are."""
    cfg, on, devices, total = small(), card(1), 8, 16
    found = searched(cfg, on, devices, total)
    mine = {tuple(sorted(overrides(fit.choice))) for fit in found.fits}
    assert len(mine) == len(found.fits), "no layout twice"
    assert {fit.choice.recompute for fit in found.fits} == {"none"}, "with so much budget nothing is computed twice"
    slower = [each for each in found.rejected if each.reason is Reason.NEEDLESS and each.about == ("none",)]
    assert len(slower) == 2 * len(found.fits), "full_attn and full"
    accepted = set()
    for layout, zero, (schedule, virtual), micro in product(
        layouts(devices), range(4), [("1f1b", 1), *(("interleaved", v) for v in (2, 4))], (1, 2, 4, 8, 16)
    ):
        if (zero == 0) != (layout.fsdp == 1):
            continue  # without a stage fsdp is one more dp
        if layout.pp == 1 and virtual > 1:
            continue
        said = [f"parallel.{axis}={size}" for axis, size in vars(layout).items()]
        said += [f"parallel.zero={zero}", f"batch.global_size={total}", f"batch.micro_size={micro}"]
        said += ["train.recompute=none"]
        if layout.pp > 1:
            said += [f"parallel.schedule={schedule}", f"parallel.virtual_stages={virtual}"]
        try:
            taken = small(*said)
        except ConfigError:
            continue
        plan = solve_batch(taken.batch, layout.data_parallel)
        accepted.add(tuple(sorted([*said, f"batch.accumulation={plan.accumulation}"])))
    assert mine == accepted


def test_what_is_found_fits_is_in_order_and_keeps_the_batch() -> None:
    cfg, on = load(preset="1.3B", overrides=["precision.compute=bf16"]), device("a100-40g")
    found = searched(cfg, on, 8, 512)
    assert found.fits and found.rejected
    speeds = [fit.tokens_per_second for fit in found.fits]
    assert speeds == sorted(speeds, reverse=True)
    workload = workload_of(cfg)
    for fit in found.fits[:20]:
        assert max(each.peak for each in rank_memories(workload, fit.choice)) <= on.capacity
        batch = fit.choice.batch
        assert batch.global_size == 512 == batch.micro_size * batch.accumulation * batch.data_parallel
        assert fit.choice.layout.world_size == 8
        load(preset="1.3B", overrides=["precision.compute=bf16", *overrides(fit.choice)])
    for rejected in found.rejected:
        assert rejected.text
        assert rejected.needed is None or rejected.needed > on.capacity


def test_rejections_are_grouped_by_their_kind_and_not_by_their_words() -> None:
    rejected = [
        Rejected("a", Reason.MEMORY, "33.19 GiB, 2.37 GiB more than v100-32g has", needed=2),
        Rejected("b", Reason.NEEDLESS, "fits with recompute none already", ("none",)),
        Rejected("c", Reason.MEMORY, "30.87 GiB, 51.3 MiB more than v100-32g has", needed=1),
        Rejected("d", Reason.NEEDLESS, "fits with recompute full already", ("full",)),
        Rejected("e", Reason.STATES, "33.19 GiB, 2.37 GiB more than v100-32g has", needed=2),
    ]
    groups = grouped(rejected)
    assert [[each.layout for each in group.members] for group in groups] == [["a", "c"], ["b"], ["d"], ["e"]]
    assert groups[0].text == ".. GiB, .. more than v100-32g has" and not groups[0].is_one_sentence
    assert groups[2].text == "fits with recompute full already" and groups[2].is_one_sentence
    assert [each.at_least for each in rejected] == [False, False, False, False, True]


def test_each_rejected_layout_has_its_reason() -> None:
    found = searched(small("model.num_heads=2"), card(1), 8, 16)
    reasons = {each.layout: each.text for each in found.rejected}
    assert "does not divide model.num_heads (2)" in reasons["tp8"]
    assert "8 pipeline stages, but the model has 4 layers" in reasons["pp8"]
    assert "needs a multiple" not in reasons
    assert any("micro-batches per step" in reason and "pp4" in what for what, reason in reasons.items())
    odd = searched(small(), card(1), 8, 12)
    assert (
        "batch.global_size 12 is not a multiple of 8 data-parallel ranks"
        in {each.layout: each.text for each in odd.rejected}["dp8"]
    )


def test_what_is_fixed_stays() -> None:
    fixed = {"parallel.tp": 2, "train.recompute": "full", "batch.micro_size": 2, "parallel.zero": 1}
    found = searched(small(), card(1), 8, 16, fixed=fixed)
    assert found.fits
    for fit in found.fits:
        settings = fit.choice.settings()
        assert {key: settings[key] for key in fixed} == fixed


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "batch"), [(6, 64), (3, 64), (4.5, 8)])
def test_what_is_said_of_those_at_the_border_is_true_of_all(gib: float, batch: int) -> None:
    """Every layout, micro-batch and recomputation is computed by itself and compared."""
    cfg = load(preset="345M", overrides=["precision.compute=bf16"])
    workload, on = workload_of(cfg), card(gib)
    found = searched(cfg, on, 4, batch)
    fitting = {str(fit.choice) for fit in found.fits}
    told = {each.layout: each.text for each in found.rejected}
    outcomes: Counter[bool] = Counter()
    looking = Search(workload, on, link(of=on), batch)
    for parallel in looking._parallels(4):
        for plan in looking.batches(parallel):
            for mode in ("none", "full_attn", "full"):
                choice = LayoutChoice(parallel, plan, mode)
                fits = max(each.peak for each in rank_memories(workload, choice)) <= on.capacity
                reason = told.get(str(choice), "as a whole" if str(choice) not in fitting else "")
                assert fits is (str(choice) in fitting or "already" in reason), (str(choice), reason)
                outcomes[fits] += 1
    assert outcomes[True] > 30 and outcomes[False] > 30


def test_a_batch_in_one_piece_is_found_where_smaller_micro_batches_do_not_fit() -> None:
    """As FleetX published 6.7B. Zero 1 keeps whole gradients between micro-batches, and none where there is one."""
    cfg = load(preset="6.7B", overrides=["precision.compute=bf16"])
    found = searched(cfg, device("a100-40g"), 16, 128, fixed={"parallel.fsdp": 16, "parallel.zero": 1})
    assert [fit.choice.batch.micro_size for fit in found.fits] == [8]


@pytest.mark.slow
def test_compiled_blocks_are_planned_as_such() -> None:
    one = load(preset="1.3B", overrides=["precision.compute=bf16"])
    two = load(preset="1.3B", overrides=["precision.compute=bf16", "train.compile=true"])
    speeds = [searched(cfg, device("a100-80g"), 8, 64).fits[0].tokens_per_second for cfg in (one, two)]
    assert speeds[1] > speeds[0]


@pytest.mark.slow
def test_thousands_of_layouts_are_looked_at() -> None:
    """How long that takes: benchmarks/startup.py."""
    cfg = load(preset="175B", overrides=["precision.compute=bf16", "model.max_positions=2048", "data.seq_len=2048"])
    found = searched(cfg, device("a100-80g"), 128, 1536)
    assert found.looked_at > 1000
    assert found.fits


def test_nothing_found_says_what_would_be_needed() -> None:
    cfg, on = load(preset="6.7B", overrides=["precision.compute=fp16"]), device("v100-32g")
    found = searched(cfg, on, 2, 64)
    assert not found.fits
    assert found.nearest is not None and found.nearest.needed is not None
    assert found.nearest.needed == min(each.needed for each in found.rejected if each.needed is not None)
    enough = fewest_devices(workload_of(cfg), lambda devices: (on, link(of=on)), 2, 64)
    assert enough is not None and enough > 2
    assert searched(cfg, on, enough, 64).fits
    for fewer in range(3, min(enough, 9)):
        assert not searched(cfg, on, fewer, 64).fits


def test_devices_that_do_not_help() -> None:
    """A card that has no budget for one layer's activations."""
    cfg = load(preset="6.7B", overrides=["precision.compute=fp16"])
    on = card(0.01)
    assert fewest_devices(workload_of(cfg), lambda devices: (on, link(of=on)), 8, 64) is None


@pytest.mark.slow
def test_so_many_devices_are_enough_for_what_is_fixed_too() -> None:
    """Activations of a fixed micro-batch: more devices do not make them smaller, or only with more tp."""
    cfg, on = load(preset="6.7B", overrides=["precision.compute=fp16"]), device("v100-32g")
    hardware = lambda devices: (on, link(of=on))  # noqa: E731
    fixed = {"batch.micro_size": 64, "train.recompute": "none"}
    assert fewest_devices(workload_of(cfg), hardware, 16, 2048) is not None
    assert fewest_devices(workload_of(cfg), hardware, 16, 2048, fixed=fixed) is None
    fixed = {"batch.micro_size": 16, "parallel.tp": 4, "train.recompute": "none"}
    enough = fewest_devices(workload_of(cfg), hardware, 4, 512, fixed=fixed)
    assert enough is not None and searched(cfg, on, enough, 512, fixed=fixed).fits
    assert enough == 16 and not searched(cfg, on, 8, 512, fixed=fixed).fits


@pytest.mark.parametrize(
    "said", [["parallel.dp=8"], ["parallel.fsdp=8"], ["parallel.fsdp=8", "parallel.zero=1"], ["parallel.pp=8"]]
)
def test_what_is_too_large_without_activations_is_named_truly(said: list[str]) -> None:
    """Weights, gradients and moments: as the table of the same layout has them when it updates."""
    cfg = load(preset="1.3B", overrides=["precision.compute=bf16", "batch.accumulation=8", *said])
    choice, workload = LayoutChoice.from_config(cfg, 8), workload_of(cfg)
    memories = rank_memories(workload, choice)
    least = state_memory(workload, choice.parallel)
    assert least == max(2 * each.parameters + each.optimizer for each in memories)
    assert all(each.peak >= 2 * each.parameters + each.optimizer for each in memories)
    if "parallel.pp=8" not in said:  # whose first stage has the embeddings besides
        assert least == pytest.approx(
            16 * num_parameters(workload.model) / (1 if "parallel.dp=8" in said else 8), rel=1e-3
        )
    found = search(workload, card(0.5), link(of=card(0.5)), 8, 64, fixed={"parallel.dp": 8})
    assert found.rejected[0].text.startswith("weights, gradients and Adam's moments alone are 19.")


def test_the_nearest_is_one_whose_weights_fit() -> None:
    """Its activations are the trouble; what is too large without any is further away, though that is less so far."""
    cfg, on = load(preset="1.3B", overrides=["precision.compute=fp16"]), device("v100-16g")
    found = searched(cfg, on, 2, 64, fixed={"batch.micro_size": 32, "train.recompute": "none"})
    assert not found.fits and found.nearest is not None
    assert any(each.at_least for each in found.rejected)
    assert not found.nearest.at_least


def test_an_accumulation_that_is_asked_for_makes_the_micro_batch() -> None:
    """Also one that is no power of two, or larger than a search would try."""
    found = searched(small(), card(8), 2, 96, fixed={"batch.accumulation": 2, "parallel.dp": 2})
    assert {fit.choice.batch.micro_size for fit in found.fits} == {24}
    found = searched(small(), card(8), 2, 96, fixed={"batch.accumulation": 5})
    assert not found.fits
    assert {each.text for each in found.rejected} == {
        "batch.accumulation=5 does not make 48 samples of a rank",
        "batch.accumulation=5 does not make 96 samples of a rank",
    }


def test_a_schedule_that_is_asked_for_is_searched() -> None:
    found = searched(small(), card(1), 8, 64, fixed={"parallel.schedule": "gpipe"})
    assert found.fits and {fit.choice.parallel.schedule for fit in found.fits} == {"gpipe"}


@pytest.mark.parametrize(
    ("preset", "devices", "tokens"),
    [("345M", 8, 2**19), ("1.3B", 8, 2**20), ("6.7B", 16, 2**21), ("175B", 24, 3 * 2**20)],
)
def test_the_usual_batch(preset: str, devices: int, tokens: int) -> None:
    workload = workload_of(load(preset=preset))
    samples = usual_batch(workload, devices)
    assert samples % devices == 0
    assert samples * workload.seq_len == pytest.approx(tokens, rel=0.01)


# MemoryBudget


def rank(pp_rank: int, peak: int) -> RankMemory:
    return RankMemory(pp_rank, 1, peak, 0, 0, 0, 0, 0, "update", 1)


def test_room_of_a_device_and_of_a_machine() -> None:
    memories = [rank(0, 5), rank(1, 3), rank(2, 4), rank(3, 1)]
    layout = Layout(pp=4, dp=2)
    assert MemoryBudget(10).needed(memories, layout) == 5
    assert MemoryBudget(10, 8).needed(memories, layout) == 26
    assert MemoryBudget(10, 4).needed(memories, layout) == 16
    assert MemoryBudget(10, 2).needed(memories, layout) == 10


# The smallest change that makes it fit


def plan(*said: str, preset: str = "345M", devices: int = 1) -> tuple[Workload, LayoutChoice]:
    cfg = load(preset=preset, overrides=["precision.compute=fp16", *said])
    return workload_of(cfg), LayoutChoice.from_config(cfg, devices)


def shares(workload: Workload, choice: LayoutChoice) -> int:
    return max(each.peak for each in rank_memories(workload, choice))


BATCH = ("batch.global_size=64", "batch.micro_size=16")


def test_three_changes_keep_model_and_batch_and_fit() -> None:
    workload, choice = plan(*BATCH)
    budget = MemoryBudget(0.6 * shares(workload, choice))
    found = changes.smallest(workload, choice, budget)
    kept = [change for change in found if change.kind != changes.MODEL]
    assert len(kept) == 3
    for change in kept:
        assert change.needed <= budget.capacity
        said = [f"{key}={value}" for key, value in change.settings.items()]
        again, there = plan(*BATCH, *said)
        assert shares(again, there) == change.needed, "the settings are what was planned"
        assert there.batch.global_size == 64 and again.model == workload.model
    assert [change.kind for change in found[3:]] == [changes.MODEL] * len(found[3:])
    assert found[3:], "what changes the model comes last"


def test_a_change_is_no_larger_than_needed() -> None:
    workload, choice = plan(*BATCH)
    budget = MemoryBudget(0.6 * shares(workload, choice))
    alone = next(
        c
        for c in changes.smallest(workload, choice, budget)
        if set(c.settings) == {"batch.micro_size", "batch.accumulation"}
    )
    micro = alone.settings["batch.micro_size"]
    larger = next(size for size in range(micro + 1, 17) if 64 % size == 0)
    again, there = plan("batch.global_size=64", f"batch.micro_size={larger}")
    assert shares(again, there) > budget.capacity


def test_no_change_contains_a_smaller_one() -> None:
    workload, choice = plan(*BATCH, "parallel.dp=4", devices=4)
    found = [
        c
        for c in changes.smallest(workload, choice, MemoryBudget(0.5 * shares(workload, choice)), most=8)
        if c.kind == changes.RUN
    ]
    settings = [set(map(str, change.settings.items())) for change in found]
    assert all(not (a < b) for a in settings for b in settings)


def test_replicas_become_shards() -> None:
    """States alone are too large: no micro-batch helps, sharding does."""
    workload, choice = plan(
        "batch.global_size=8", "batch.micro_size=1", "parallel.dp=8", "train.recompute=full", preset="1.3B", devices=8
    )
    found = changes.smallest(workload, choice, MemoryBudget(14 * 2**30))
    assert found[0].settings["parallel.fsdp"] == 8 and found[0].settings["parallel.dp"] == 1
    assert found[0].settings["parallel.zero"] in (1, 2, 3)
    again, there = plan(
        "batch.global_size=8",
        "train.recompute=full",
        *(f"{k}={v}" for k, v in found[0].settings.items()),
        "batch.micro_size=1",
        preset="1.3B",
        devices=8,
    )
    assert shares(again, there) == found[0].needed <= 14 * 2**30


def test_written_out_attention_is_the_first_to_go() -> None:
    workload, choice = plan(*BATCH, "model.attention=math")
    fused, there = plan(*BATCH)
    found = changes.smallest(workload, choice, MemoryBudget(shares(fused, there)))
    assert found[0].settings == {"model.attention": "auto"} and found[0].kind == changes.RUN


def test_more_devices_where_one_cannot_hold_it() -> None:
    workload, choice = plan("batch.global_size=8", "batch.micro_size=8", "train.recompute=full", preset="1.3B")
    found = changes.smallest(workload, choice, MemoryBudget(16 * 2**30))
    assert [change.kind for change in found] == [changes.DEVICES, changes.MODEL, changes.MODEL]
    assert str(found[0]).startswith("2 devices: parallel.fsdp=2 parallel.zero=")
    assert str(found[1]).startswith("another model: model.hidden_size=1024 model.ffn_size=4096")
    assert [c.kind for c in changes.smallest(workload, choice, MemoryBudget(16 * 2**30, 2))] == [changes.MODEL] * 2


def test_a_pipeline_keeps_its_micro_batches() -> None:
    """With interleaved stages the number of micro-batches stays a multiple of pp."""
    said = ["parallel.pp=4", "parallel.schedule=interleaved", "parallel.virtual_stages=2"]
    workload, choice = plan("batch.global_size=96", "batch.micro_size=6", *said, devices=4)
    for change in changes.smallest(workload, choice, MemoryBudget(0.7 * shares(workload, choice))):
        assert change.choice.batch.accumulation % 4 == 0
