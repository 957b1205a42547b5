"""Step time in closed form: its parts by hand, what must grow with what, and the published speeds."""

import importlib.util
import statistics
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import gptworks
from gptworks.config.derive import BatchPlan
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from gptworks.errors import UsageError
from gptworks.plan import rates, work
from gptworks.plan import time as plan_time
from gptworks.plan.devices import Device, custom_device, device, devices, link
from gptworks.plan.rates import Efficiency, Kernels, efficiency, facts
from gptworks.plan.sizes import num_parameters
from gptworks.plan.time import StepTime, count, mfu, seconds, step_time, tokens_per_second
from gptworks.plan.workload import LayoutChoice, Workload

ROOT = Path(gptworks.__file__).parents[2]
MODEL = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=51200, max_positions=1024)
NO_HEAD = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=1, max_positions=1024)
BF16 = PrecisionConfig(compute="bf16")
A100 = device("a100-80g")
# Products at the peak of the datasheet and nothing else that takes time.
IDEAL = Efficiency(peak=1.0, half=0.0, gap=0.0, inside=1.0, between=1.0, elementwise=0.0, overlap=1.0)


def plan(micro: int = 4, accumulation: int = 1, replicas: int = 1) -> BatchPlan:
    return BatchPlan(micro * accumulation * replicas, micro, accumulation, replicas)


def timed(
    model: ModelConfig = MODEL,
    batch: BatchPlan | None = None,
    *,
    rates: Efficiency = IDEAL,
    program: str | Kernels = "ours",
    on: Device = A100,
    over: str = "",
    recompute: str = "none",
    **parallel: object,
) -> StepTime:
    choice = LayoutChoice(ParallelConfig(**parallel), batch or plan(), recompute)  # type: ignore[arg-type]
    program = facts(program) if isinstance(program, str) else program
    amounts = count(Workload(model, 1024, BF16), choice, on, link(over, on), program)
    return seconds(amounts, rates, on, "bf16")


# Computing


def test_ideal_computing_is_the_well_known_formula_over_the_peak():
    B, s, L, h, V = 4, 1024, MODEL.num_layers, MODEL.hidden_size, MODEL.vocab_size
    by_hand = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    found = timed(program="megatron-2021")
    assert found.compute == pytest.approx(by_hand / 312e12)
    assert found.recompute == found.bubble == found.exposed == 0.0


def test_fused_attention_skips_the_hidden_half_and_computes_scores_again():
    """Of 2 products forward and 4 backward: 1 and 2.5 of them."""
    B, s, L, h = 4, 1024, MODEL.num_layers, MODEL.hidden_size
    one_product = 2 * B * s**2 * h * L / 312e12
    assert timed(program="megatron-2021").compute - timed().compute == pytest.approx((6 - 3.5) * one_product)


def test_recomputing_all_takes_a_third_of_the_blocks_again():
    whole = timed(NO_HEAD, program="megatron-2021", recompute="full")
    assert whole.recompute == pytest.approx(whole.compute / 3, rel=1e-4)
    attention = timed(NO_HEAD, program="megatron-2021", recompute="core_attn")
    assert attention.recompute == pytest.approx(4 * 4 * 1024**2 * 2048 * 24 / 312e12)
    part = timed(NO_HEAD, program="megatron-2021", recompute="full_attn")
    assert attention.recompute < part.recompute < whole.recompute


def test_a_small_product_takes_longer_by_its_sizes():
    """[M, K] x [K, N] with half 100: 1 + 100 (1/M + 1/N + 1/K) times as long."""
    product = work._product(400, 200, 100)
    assert product.flops == 2 * 400 * 200 * 100
    assert product.slowed == pytest.approx(product.flops * (1 / 400 + 1 / 200 + 1 / 100))
    slow = replace(IDEAL, half=100.0)
    shares = [timed(NO_HEAD, tp=tp, rates=IDEAL).compute / timed(NO_HEAD, tp=tp, rates=slow).compute for tp in (1, 8)]
    assert shares[1] < shares[0] < 1, "a matrix cut in 8 is further from the peak"


def test_bytes_are_read_and_written_at_the_speed_of_the_memory():
    program = facts("ours")
    moving = replace(IDEAL, elementwise=1.0)
    tokens = 4 * 1024
    blocks = 24 * tokens * 2048 * (sum(program.stream) + sum(program.inner))
    logits = tokens * 51200 * program.logits
    parameters = (24 * 12 * 2048**2 + 51200 * 2048) * program.parameter
    extra = timed(rates=moving).compute - timed().compute
    assert extra == pytest.approx((blocks + logits + parameters) / (2039e9 * 0.85))
    unfused = timed(rates=moving, program="megatron-2021").compute - timed(program="megatron-2021").compute
    scores = 24 * 4 * 16 * 1024**2 * sum(facts("megatron-2021").scores)
    assert unfused > scores / (2039e9 * 0.85)


def test_every_kernel_waits_a_moment_for_the_one_before():
    gap = timed(rates=replace(IDEAL, gap=1e-5), recompute="full")
    plain = timed(recompute="full")
    forward, backward = facts("ours").kernels
    assert gap.compute - plain.compute == pytest.approx(24 * (forward + backward) * 1e-5)
    assert gap.recompute - plain.recompute == pytest.approx(24 * forward * 1e-5)


def test_dropout_and_written_scores_move_more_bytes():
    moving = replace(IDEAL, elementwise=1.0)
    plain = timed(rates=moving).compute
    assert timed(MODEL.model_copy(update={"dropout_hidden": 0.1}), rates=moving).compute > plain
    assert timed(MODEL.model_copy(update={"attention": "math"}), rates=moving).compute > plain


def test_compiled_blocks_are_faster_and_fp32_slower():
    def total(precision: PrecisionConfig = BF16, compiled: bool = False) -> float:
        workload = Workload(MODEL, 1024, precision, compiled)
        return step_time(workload, LayoutChoice(ParallelConfig(), plan()), A100, link("", A100)).total

    assert total(compiled=True) < total() < total(precision=PrecisionConfig())


# The pipeline


def test_the_bubble_is_stages_less_one_over_micro_batches():
    found = timed(NO_HEAD, plan(1, 8), pp=4)
    assert found.bubble == pytest.approx(3 / 8 * (found.compute + found.communication["pp"]), rel=1e-3)


def test_more_micro_batches_make_the_bubble_a_smaller_share():
    shares = [(t := timed(MODEL, plan(1, m), pp=4)).bubble / t.total for m in (4, 8, 16, 32)]
    assert shares == sorted(shares, reverse=True)


def test_zero_1_in_a_pipeline_sums_when_all_passes_are_done():
    """Its gradients do not travel during the last backward pass; parameters still do, during the first forward pass."""
    pipeline = LayoutChoice(ParallelConfig(pp=2, fsdp=4, zero=1), plan(1, 8, 4))
    alone = LayoutChoice(ParallelConfig(fsdp=4, zero=1), plan(1, 8, 4))
    after, meanwhile = (replace(facts("ours"), sums_after_pipeline=late) for late in (True, False))
    assert plan_time._window(pipeline, after) == pytest.approx(1 / 3 / 8)
    assert plan_time._window(pipeline, meanwhile) == pytest.approx(1 / 8)
    assert plan_time._window(alone, after) == pytest.approx(1 / 8)


def test_interleaving_divides_the_bubble_and_a_zero_bubble_schedule_leaves_a_third():
    whole = timed(NO_HEAD, plan(1, 8), pp=4, rates=replace(IDEAL, inside=1e9)).bubble
    halved = timed(
        NO_HEAD, plan(1, 8), pp=4, schedule="interleaved", virtual_stages=2, rates=replace(IDEAL, inside=1e9)
    )
    third = timed(NO_HEAD, plan(1, 8), pp=4, schedule="zero_bubble", rates=replace(IDEAL, inside=1e9)).bubble
    assert halved.bubble == pytest.approx(whole / 2, rel=1e-2), "but for the latency of twice as many sends"
    assert third == pytest.approx(whole / 3, rel=1e-3)


def test_the_stage_with_the_head_sets_the_pace():
    even, uneven = timed(NO_HEAD, plan(1, 64), pp=4), timed(MODEL, plan(1, 64), pp=4)
    head = 6 * 64 * 1024 * 2048 * 51200 / 312e12
    assert uneven.compute - even.compute == pytest.approx(head, rel=1e-3)


# Messages


def test_gradients_of_replicas_by_hand():
    """8 machines of one A100 each with 25 GB/s; fp32 gradients, sent twice (7 of 8 parts), after the backward pass."""
    found = timed(batch=plan(replicas=8), dp=8, on=replace(A100, per_node=1), over="ib-200")
    size = num_parameters(MODEL) * 4 * 2 * 7 / 8
    latency = 24 * 1e-5 * 2 * 6  # of each block's message, along a tree of 8
    assert found.communication["dp"] == pytest.approx(size / 25e9 + latency, rel=1e-3)
    assert found.hidden["dp"] == 0.0, "nothing overlaps the sum over replicas"


def test_shards_travel_while_the_device_computes():
    replicas = timed(batch=plan(replicas=8), dp=8)
    shards = timed(batch=plan(replicas=8), fsdp=8)
    assert shards.communication["fsdp"] < replicas.communication["dp"]
    assert shards.hidden["fsdp"] > 0
    slow = timed(batch=plan(replicas=8), fsdp=8, on=replace(A100, per_node=1), over="eth-10")
    assert slow.communication["fsdp"] > 0.5 * slow.total, "what does not fit behind computing is waited for"


def test_tensor_parallel_between_machines_is_slower_than_inside():
    near = timed(tp=8).communication["tp"]
    far = timed(tp=8, on=replace(A100, per_node=4), over="ib-200").communication["tp"]
    assert far > 5 * near
    assert timed(tp=8, over="pcie").communication["tp"] > 5 * near


def test_ranks_of_an_axis_are_inside_or_between_by_the_order_of_the_mesh():
    """pp, dp, fsdp, tp from the outside: with tp 8 a machine is full, and neighbours in dp are a machine apart."""
    full = timed(batch=plan(replicas=2), dp=2, tp=8)
    both_inside = timed(batch=plan(replicas=2), dp=2, tp=4)
    assert full.communication["dp"] > both_inside.communication["dp"] * 3
    # 4 replicas in each of 2 machines form rings that use 4 shares of the card.
    by_four = timed(batch=plan(replicas=8), dp=8, tp=2, program="megatron-2021")
    amounts = 2 * 7 / 8 * (num_parameters(MODEL) / 2) * 2
    latency = 24 * 1e-5 * 2 * 6
    assert by_four.communication["dp"] == pytest.approx(amounts / (4 * 25e9) + latency, rel=0.01)


def test_recomputing_repeats_the_sums_of_the_forward_pass():
    plain = timed(tp=8, sequence=False, program="megatron-2021").communication["tp"]
    again = timed(tp=8, sequence=False, program="megatron-2021", recompute="full").communication["tp"]
    assert again == pytest.approx(1.5 * plain, rel=1e-3)


def test_a_sum_over_tp_in_fp32_sends_twice_the_bytes_of_one_in_bf16():
    wide, narrow = facts("ours"), replace(facts("ours"), tensor_sum=2)
    sizes = [timed(tp=8, sequence=False, program=program, on=replace(A100, per_node=1)) for program in (wide, narrow)]
    latency = 4 * 24 * 1e-5 * 2 * 6
    first, second = (found.communication["tp"] - latency for found in sizes)
    assert first == pytest.approx(2 * second, rel=1e-2)


def test_stages_send_hidden_states_or_shares_of_them():
    """The last stage sends gradients back: 8 micro-batches of 1024 x 2048 numbers of 2 bytes. 25 GB/s for each rank."""
    layout = {"pp": 2, "tp": 8, "sequence": False}
    untied = NO_HEAD.model_copy(update={"tied": False})
    whole = timed(untied, plan(1, 8), program="megatron-2021", **layout).communication["pp"]
    size, latency = 8 * 1024 * 2048 * 2 / 25e9, 8 * 2 * 1e-5
    assert whole == pytest.approx(size + latency, rel=1e-3)
    scattered = timed(untied, plan(1, 8), program="megatron-sc21", **layout).communication["pp"]
    assert scattered == pytest.approx(size / 8 + latency, rel=1e-3)
    tied = timed(MODEL, plan(1, 8), program="megatron-2021", **layout).communication["pp"]
    assert tied - whole == pytest.approx(51200 / 8 * 2048 * 4 / 25e9, rel=1e-2), "the gradient of its embedding"


def test_the_amounts_grow_on_a_straight_line_with_the_layers():
    """Messages are counted for one and two blocks per stage: the rest follows."""
    from gptworks.plan.communication import on_the_wire, per_step

    workload = Workload(MODEL, 1024, BF16)
    choice = LayoutChoice(ParallelConfig(dp=2, fsdp=2, tp=2, zero=3), plan(replicas=4))
    terms = per_step(workload, choice, gradient_bytes=4)
    sizes = {"dp": 2, "fsdp": 2, "tp": 2}
    whole = {
        axis: sum(float(on_the_wire(t.kind, t.bytes, n)) for t in terms if t.axis == axis) for axis, n in sizes.items()
    }
    amounts = count(workload, choice, A100, link("", A100), replace(facts("ours"), tensor_sum=4))
    assert {axis: found.bytes for axis, found in amounts.messages.items()} == pytest.approx(whole)


# The update, and all of it


def test_the_update_moves_its_bytes_once_and_shards_divide_it():
    held = 24 * 12 * 2048**2 + 51200 * 2048
    alone = timed().optimizer
    assert alone == pytest.approx(held * facts("ours").update / (2039e9 * 0.85))
    assert timed(batch=plan(replicas=8), fsdp=8).optimizer == pytest.approx(alone / 8)
    assert timed(batch=plan(replicas=8), fsdp=8, offload=True).optimizer > 10 * alone / 8


def test_the_parts_add_up_and_tokens_and_mfu_follow():
    batch = plan(1, 16, 8)
    found = timed(batch=batch, pp=2, dp=4, fsdp=2, tp=2, rates=efficiency("a100", "ours"))
    whole = found.compute + found.recompute + found.bubble + found.optimizer + sum(found.communication.values())
    assert found.total == pytest.approx(whole)
    assert set(found.communication) == {"pp", "dp", "fsdp", "tp"}
    tokens = tokens_per_second(found, batch, 1024)
    assert tokens == pytest.approx(batch.global_size * 1024 / found.total)
    choice = LayoutChoice(ParallelConfig(pp=2, dp=4, fsdp=2, tp=2), batch)
    used = mfu(found, Workload(MODEL, 1024, BF16), choice, A100)
    assert 0.02 < used < 0.6
    long = plan(4, 256)
    alone = LayoutChoice(ParallelConfig(), long)
    ideal = mfu(timed(NO_HEAD, long), Workload(NO_HEAD, 1024, BF16), alone, A100)
    assert 0.95 < ideal < 1.0, "but for the scores that the backward pass computes again"


@pytest.mark.parametrize("name", devices())
def test_every_device_has_an_answer(name: str):
    card = device(name)
    for compute in ("fp32", "bf16", "fp16"):
        workload = Workload(MODEL, 1024, PrecisionConfig(compute=compute))  # type: ignore[arg-type]
        choice = LayoutChoice(ParallelConfig(fsdp=2, tp=2), plan(replicas=2), "full")
        said = step_time(workload, choice, card, link("", card))
        assert 0 < said.total < 1e4
        assert all(part >= 0 for part in [said.bubble, said.optimizer, *said.communication.values()])


def test_a_measured_cpu_reaches_what_was_measured():
    cpu = custom_device(memory=8e9, tflops=0.1, bandwidth=20e9, per_node=1, like="cpu")
    tiny = ModelConfig(num_layers=2, hidden_size=256, num_heads=4, vocab_size=512, max_positions=256)
    said = step_time(Workload(tiny, 256), LayoutChoice(ParallelConfig(), plan(8)), cpu, link("", cpu))
    products = 6 * 8 * 256 * (2 * 12 * 256**2 + 512 * 256) / 0.1e12
    assert products < said.compute < 5 * products


def test_unknown_kernels_are_refused():
    with pytest.raises(UsageError, match=r"kernels 'megatron-1999' are not known. Known: ours,"):
        facts("megatron-1999")


# The fit, and the published speeds


@pytest.fixture(scope="module")
def plan_fit() -> ModuleType:
    return _benchmark("plan_fit")


def _benchmark(name: str) -> ModuleType:
    found = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fitted(plan_fit: ModuleType) -> tuple[list, dict[str, float]]:
    found = plan_fit.cases()
    return found, plan_fit.fit(found)


def test_all_published_rows_are_there(fitted: tuple[list, dict[str, float]]):
    found, _ = fitted
    rows = {}
    for case in found:
        rows[case.table, case.counted] = rows.get((case.table, case.counted), 0) + 1
    assert rows == {
        ("Megatron, A100", True): 10,
        ("Megatron, H100", True): 9,
        ("FleetX, A100", True): 4 * 2,
        ("DLPerf, V100", True): 18 * 2,
        ("LiBai, V100", True): 21 * 2,
        ("Megatron, A100, 2022", False): 4,
        ("FleetX, V100", False): 2,
    }


def test_efficiency_toml_is_what_the_fit_gives(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    text = plan_fit.written(*fitted)
    given, stored = tomllib.loads(text), rates._table("efficiency.toml")
    assert given.keys() == stored.keys()
    for table in given:
        for name, value in given[table].items():
            assert stored[table][name] == pytest.approx(value, rel=2e-3, abs=2e-3), f"{table}.{name}"
    programs = set(rates._table("kernels.toml"))
    assert set(stored["systems"]) == programs - {"ours-fp32", "ours-compiled"}, "variants of ours share its numbers"


def test_published_speeds_are_predicted(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    found, values = fitted
    errors = sorted(abs(plan_fit.error(values, case)) for case in found if case.counted)
    assert len(errors) == 105
    assert statistics.median(errors) < 0.04
    assert errors[-1] < 0.20


def test_rows_left_out_of_the_fit_are_predicted(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    """The seven rows that the fit meets worst, which also pull it most; benchmarks/plan_speed.py has all of them."""
    found, values = fitted
    counted = sorted((case for case in found if case.counted), key=lambda case: -abs(plan_fit.error(values, case)))
    for left_out in counted[:7]:
        rest = [replace(case, counted=False) if plan_fit.alike(case, left_out) else case for case in found]
        without = plan_fit.fit(rest, values)
        assert abs(plan_fit.error(without, left_out)) < 0.25, (left_out.table, left_out.name, left_out.program)


def test_a_case_measured_twice_is_left_out_twice(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    found, _ = fitted
    twice = next(case for case in found if case.name == "DP 8x1x1_16_1536x16" and case.program == "oneflow-2021")
    assert [case.name for case in found if plan_fit.alike(case, twice)] == [
        "DP 8x1x1_16_1536x16",
        "2D 8x1x1_16_1536x16",
    ]


def test_rows_from_memory_say_nothing_to_the_fit(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    found, values = fitted
    assert plan_fit.fit([case for case in found if case.counted]) == pytest.approx(values, rel=1e-6)


def test_what_no_row_speaks_of_stays_as_expected(plan_fit: ModuleType, fitted: tuple[list, dict[str, float]]):
    found, _ = fitted
    unseen = [replace(case, counted=case.table != "Megatron, H100") for case in found]
    values, expected = plan_fit.fit(unseen), plan_fit.priors(found)
    for name in ("generations.h100.peak", "generations.h100.half", "systems.megatron-2024.overlap"):
        assert values[name] == pytest.approx(expected[name].expected, rel=1e-3)
