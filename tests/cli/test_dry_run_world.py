"""train --dry-run --world N: what the ranks of a layout would hold, seen without its machines and without data."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.config.load import load
from gptworks.plan import sizes
from gptworks.simulate.ranks import Inspected, inspect_ranks

Call = Callable[..., Any]
GPT3 = ["model.max_positions=2048", "data.seq_len=2048", "batch.global_size=1536", "batch.micro_size=1"]


def look(world_size: int, *overrides: str, preset: str = "175B") -> Inspected:
    return inspect_ranks(load(preset=preset, overrides=overrides), world_size)


def test_gpt3_on_128_ranks(call: Call) -> None:
    """96 x 12288 on tp8 x pp16, as the five systems run it, from the formulas of its matrices."""
    settings = [*GPT3, "parallel.pp=16", "parallel.tp=8", "precision.compute=bf16"]
    found = look(128, *settings)
    first, middle, last = found.ranks
    assert [state.pp_ranks for state in found.ranks] == [range(1), range(1, 15), range(15, 16)]
    assert [state.num_ranks for state in found.ranks] == [8, 112, 8]
    assert (first.layers, middle.layers, last.layers) == ([range(6)], [range(6, 12)], [range(90, 96)])
    assert (first.heads, first.words, middle.words, last.words) == (12, 6400, 0, 6400)
    h = 12288
    layer = 12 * h * h // 8 + (3 * h + 4 * h) // 8 + (2 + 4) * h  # matrices, cut biases, whole biases and norms
    assert middle.parameters == 6 * layer
    assert first.parameters == 6 * layer + (6400 + 2048) * h
    assert last.parameters == 6 * layer + 6400 * h + 2 * h
    memory = middle.memory
    assert (memory.parameters, memory.optimizer) == (4 * middle.parameters, 8 * middle.parameters)
    # 15 micro-batches under way on the second of 16 stages; of each at least what the matrices of 6 layers take in.
    assert memory.in_flight == 15 and memory.activations > 15 * 6 * 2048 * h * (1 + 3 + 4) // 8 * 2
    model = load(preset="175B", overrides=settings).model
    assert found.parameters == sizes.num_parameters(model) == 174_615_846_912, "a tied embedding is counted once"

    printed = call("train", "--dry-run", "--world", "128", "--preset", "175B", *settings).out
    assert "layout           pp16.tp8: 128 processes" in printed
    assert "batch            1536 = 1 micro-batch x 1536 accumulation x 1 data-parallel" in printed
    assert "174,615,846,912" in printed and f"{middle.parameters:,}" in printed
    assert "what one rank holds at its fullest (GiB), on " in printed and f"{memory.activations / 2**30:.2f}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("dp=2 tp=4", 8), ("dp=2 pp=4 tp=4", 32)],  # S1-13: 2x4x1 on one machine, 2x4x4 on four
)
def test_example_layouts(layout: str, world_size: int) -> None:
    found = look(world_size, *(f"parallel.{one}" for one in layout.split()), "batch.micro_size=1", *GPT3[:-1])
    assert found.choice.layout.world_size == world_size == sum(state.num_ranks for state in found.ranks)
    assert found.choice.batch.data_parallel == 2
    assert found.parameters == 174_615_846_912


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_stages_hold_less_and_less(zero: int) -> None:
    settings = ["parallel.fsdp=4", "batch.global_size=8", "batch.micro_size=1", "precision.compute=bf16"]
    (state,) = look(4, *settings, f"parallel.zero={zero}", preset="gpt2").ranks
    (plain,) = look(4, *settings, "parallel.zero=0", preset="gpt2").ranks
    whole = plain.parameters
    assert plain.memory.parameters + plain.memory.optimizer == 12 * whole
    assert state.parameters == pytest.approx(whole / 4, rel=1e-3)
    assert state.memory.parameters == pytest.approx(4 * state.parameters, rel=1e-3), "what is built is what is planned"
    assert state.memory.optimizer == 2 * state.memory.parameters
    assert state.memory.peak < plain.memory.peak
    if zero > 1:
        (less,) = look(4, *settings, f"parallel.zero={zero - 1}", preset="gpt2").ranks
        assert state.memory.peak < less.memory.peak


def test_uneven_cuts_are_told_apart() -> None:
    """50257 words on 4 ranks, 7 layers on 4 stages of 2 ranks: nothing is rounded away."""
    settings = ["model.num_layers=7", "parallel.tp=4", "parallel.pp=2", "parallel.schedule=interleaved"]
    settings += ["parallel.virtual_stages=2", "batch.global_size=2", "batch.micro_size=1", "model.num_heads=4"]
    found = look(8, *settings, "parallel.offload=false", preset="tiny")
    assert [state.words for state in found.ranks] == [12565, 12562, 12565, 12562]
    assert [state.num_ranks for state in found.ranks] == [3, 1, 3, 1]
    assert [state.layers for state in found.ranks[::2]] == [[range(2), range(4, 6)], [range(2, 4), range(6, 7)]]
    assert found.parameters == sizes.num_parameters(load(preset="tiny", overrides=settings).model)
    first, fewer = found.ranks[:2]
    assert first.memory.parameters - fewer.memory.parameters == 4 * (12565 - 12562) * 128, "the last rank has less"
    assert [state.memory.parameters for state in found.ranks] == [4 * state.parameters for state in found.ranks]


def test_auto_takes_what_is_left_and_data_is_read_where_there_is_some(call: Call, recipe: Path) -> None:
    printed = call("train", "-c", recipe, "--dry-run", "--world", "4", "parallel.dp=auto", "parallel.tp=2").out
    assert "layout           dp2.tp2: 4 processes" in printed
    assert "samples          " in printed and "steps            6 (384 tokens)" in printed
    assert printed == call("train", "-c", recipe, "--dry-run", "parallel.dp=2", "parallel.tp=2").out
    call("train", "-c", recipe, "--dry-run", "--world", "2", "parallel.tp=2", "data.path=nowhere", expect=2)


@pytest.mark.parametrize(
    ("world_size", "settings", "said"),
    [
        ("128", ["parallel.tp=8"], "tp=8 needs 8 ranks, but the world has 128. Fits: fsdp=16 x tp=8, or dp=16 x tp=8"),
        ("64", ["parallel.tp=64"], "64 does not divide model.num_heads (96)"),
        ("64", ["parallel.tp=auto"], "64 does not divide model.num_heads (96)"),
        ("97", ["parallel.pp=97", "batch.global_size=97"], "97 pipeline stages, but the model has 96 layers"),
        (
            "16",
            ["parallel.pp=16", "batch.global_size=8"],
            "8 micro-batches per step and data-parallel rank are fewer than the 16 pipeline stages",
        ),
        ("0", [], "--world: 0. Needed: 1 or more."),
    ],
)
def test_what_would_be_refused_is_refused(world_size: str, settings: list[str], said: str, call: Call) -> None:
    shape = ["--preset", "175B", "batch.micro_size=1", *settings]
    assert said in call("train", "--dry-run", "--world", world_size, *shape, expect=2).err


def test_world_is_for_a_dry_run(call: Call) -> None:
    assert "--world: 8 without --dry-run" in call("train", "--preset", "tiny", "--world", "8", expect=2).err
    for option in ("--stopped-code", "--try-again-code"):
        error = call("train", "--preset", "tiny", option, "300", expect=2).err
        assert f"{option}: 300. Needed: an exit code" in error


def test_a_dry_run_says_what_plan_says(call: Call) -> None:
    """One answer to the memory of a rank, activations included."""
    shape = ["--preset", "345M", "parallel.pp=2", "parallel.fsdp=2", "batch.global_size=16", "batch.micro_size=2"]
    planned = json.loads(call("plan", *shape, "--device", "cpu", "--json").out)["stages"]
    ranks = inspect_ranks(load(preset="345M", overrides=[*shape[2:], "run.device=cpu"]), 4).ranks
    assert [state.memory.peak for state in ranks] == [stage["peak"] for stage in planned]
    printed = call("train", "--dry-run", "--world", "4", "--device", "cpu", *shape).out
    for stage in planned:
        assert f"{stage['activations'] / 2**30:.2f}" in printed and f"{stage['peak'] / 2**30:.2f}" in printed
