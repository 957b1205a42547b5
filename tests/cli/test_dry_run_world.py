"""train --dry-run --world N: what the ranks of a layout would hold, seen without its machines and without data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.config.load import load
from gptworks.plan import sizes
from gptworks.simulate.dry_run import Survey, survey

Call = Callable[..., Any]
GPT3 = ["model.max_positions=2048", "data.seq_len=2048", "batch.global_size=1536", "batch.micro_size=1"]


def look(world_size: int, *overrides: str, preset: str = "175B") -> Survey:
    return survey(load(preset=preset, overrides=overrides), world_size)


def test_gpt3_on_128_ranks(call: Call) -> None:
    """96 x 12288 on tp8 x pp16, as the five systems run it, from the formulas of its matrices."""
    settings = [*GPT3, "parallel.pp=16", "parallel.tp=8", "precision.compute=bf16"]
    found = look(128, *settings)
    first, middle, last = found.holdings
    assert [h.pp_ranks for h in found.holdings] == [range(1), range(1, 15), range(15, 16)]
    assert [h.num_ranks for h in found.holdings] == [8, 112, 8]
    assert (first.layers, middle.layers, last.layers) == ([range(6)], [range(6, 12)], [range(90, 96)])
    assert (first.heads, first.words, middle.words, last.words) == (12, 6400, 0, 6400)
    h = 12288
    layer = 12 * h * h // 8 + (3 * h + 4 * h) // 8 + (2 + 4) * h  # matrices, cut biases, whole biases and norms
    assert middle.parameters == 6 * layer
    assert first.parameters == 6 * layer + (6400 + 2048) * h
    assert last.parameters == 6 * layer + 6400 * h + 2 * h
    assert (middle.weights, middle.gradients, middle.optimizer, middle.gathered) == tuple(
        n * middle.parameters for n in (4, 4, 8, 0)
    )
    model = load(preset="175B", overrides=settings).model
    assert found.parameters == sizes.num_parameters(model) == 174_615_846_912, "a tied embedding is counted once"

    printed = call("train", "--dry-run", "--world", "128", "--preset", "175B", *settings).out
    assert "layout           pp16.tp8: 128 processes" in printed
    assert "batch            1536 = 1 micro-batch x 1536 accumulation x 1 data-parallel" in printed
    assert "174,615,846,912" in printed and f"{middle.parameters:,}" in printed


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [("dp=2 tp=4", 8), ("dp=2 pp=4 tp=4", 32)],  # S1-13: 2x4x1 on one machine, 2x4x4 on four
)
def test_example_layouts(layout: str, world_size: int) -> None:
    found = look(world_size, *(f"parallel.{one}" for one in layout.split()), "batch.micro_size=1", *GPT3[:-1])
    assert found.layout.world_size == world_size == sum(held.num_ranks for held in found.holdings)
    assert found.batch.data_parallel == 2
    assert found.parameters == 174_615_846_912


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharding_stages_hold_less_and_less(zero: int) -> None:
    settings = ["parallel.fsdp=4", "batch.global_size=8", "batch.micro_size=1", "precision.compute=bf16"]
    (held,) = look(4, *settings, f"parallel.zero={zero}", preset="gpt2").holdings
    (plain,) = look(4, *settings, "parallel.zero=0", preset="gpt2").holdings
    whole = plain.parameters
    assert plain.in_all == 16 * whole
    around = (50257 + 1024 + 2) * 768  # embeddings and last norm stay in fp32
    assert held.parameters == pytest.approx(whole / 4, rel=1e-3)
    assert held.optimizer == 8 * held.parameters
    assert held.gradients == 4 * held.parameters + (4 * whole if zero == 1 else 0)
    block = (whole - around) // 12
    assert held.gathered == 4 * around + 2 * block * (2 if zero == 3 else 12)


def test_uneven_cuts_are_told_apart() -> None:
    """50257 words on 4 ranks, 7 layers on 4 stages of 2 ranks: nothing is rounded away."""
    settings = ["model.num_layers=7", "parallel.tp=4", "parallel.pp=2", "parallel.schedule=interleaved"]
    settings += ["parallel.virtual_stages=2", "batch.global_size=2", "batch.micro_size=1", "model.num_heads=4"]
    found = look(8, *settings, "parallel.offload=false", preset="tiny")
    assert [held.words for held in found.holdings] == [12565, 12562, 12565, 12562]
    assert [held.num_ranks for held in found.holdings] == [3, 1, 3, 1]
    assert [held.layers for held in found.holdings[::2]] == [[range(2), range(4, 6)], [range(2, 4), range(6, 7)]]
    assert found.parameters == sizes.num_parameters(load(preset="tiny", overrides=settings).model)


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
    assert (
        "--stopped-code: 300. Needed: an exit code"
        in call("train", "--preset", "tiny", "--stopped-code", "300", expect=2).err
    )
