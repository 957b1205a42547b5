"""The layout of processes: solved from the configuration and the world, or refused; and what else must fit it."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import Layout, ParallelConfig, load, solve_layout
from gptworks.config.derive import with_layout
from gptworks.errors import ConfigError, UsageError
from gptworks.train.setup import prepare

AXES = ["pp", "dp", "fsdp", "tp"]
degrees = st.dictionaries(st.sampled_from(AXES), st.integers(1, 8))


@given(sizes=degrees, auto=st.sampled_from(AXES), factor=st.integers(1, 6))
def test_auto_is_what_the_others_leave(sizes: dict[str, int], auto: str, factor: int) -> None:
    others = {axis: size for axis, size in sizes.items() if axis != auto}
    layout = solve_layout(ParallelConfig(**others, **{auto: "auto"}), math.prod(others.values()) * factor)
    assert layout == Layout(**others, **{auto: factor})


@given(sizes=degrees, auto=st.sampled_from([*AXES, None]), world=st.integers(1, 200))
def test_the_product_is_the_world_or_it_is_refused_with_layouts_that_fit(
    sizes: dict[str, int], auto: str | None, world: int
) -> None:
    asked = {**sizes, **({auto: "auto"} if auto else {})}
    known = math.prod(size for size in asked.values() if size != "auto")
    try:
        layout = solve_layout(ParallelConfig(**asked), world)
    except ConfigError as error:
        assert world % known if auto else known != world
        text = str(error)
        assert f"needs {'a multiple of ' if auto else ''}{known} ranks, but the world has {world}. Fits: " in text
        for fit in text.split("Fits: ")[1].removesuffix(".").split(", or "):
            numbers = [int(part.split("=")[1]) for part in fit.split(" x ")] if "=" in fit else []
            assert math.prod(numbers) == world
        return
    assert layout.world_size == world
    assert all(getattr(layout, axis) == size for axis, size in asked.items() if size != "auto")


@pytest.mark.parametrize(
    ("asked", "world", "message"),
    [
        (
            {"pp": 2, "fsdp": 4, "tp": 2, "dp": "auto"},
            24,
            "parallel: pp=2 x fsdp=4 x tp=2 needs a multiple of 16 ranks, but the world has 24. "
            "Fits: pp=2 x dp=2 x fsdp=3 x tp=2, or pp=2 x fsdp=6 x tp=2, or pp=2 x fsdp=4 x tp=3.",
        ),
        ({"dp": 8}, 6, "parallel: dp=8 needs 8 ranks, but the world has 6. Fits: dp=6, or dp=3 x fsdp=2, or "),
        ({"tp": 2}, 1, "parallel: tp=2 needs 2 ranks, but the world has 1. Fits: all of them 1."),
        ({}, 4, "parallel: all of them 1 needs 1 ranks, but the world has 4. Fits: "),
    ],
)
def test_the_words_of_a_refusal(asked: dict[str, int | str], world: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_layout(ParallelConfig(**asked), world)
    assert caught.value.problems[0].startswith(message)


def test_only_layouts_that_the_model_takes_are_proposed() -> None:
    with pytest.raises(ConfigError) as caught:
        solve_layout(ParallelConfig(tp=2), 15, lambda layout: 32 % layout.tp == 0)
    said = caught.value.problems[0]
    assert "tp=15" not in said and "tp=3" not in said and "Fits: " in said
    assert said.endswith("tp=2 itself goes with 14 or 16 ranks (and parallel.dp=auto).")


def test_a_tp_beyond_the_one_asked_for_is_named() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_heads \(32\)\. tp that would fit: 1, 2, 4, 8\."):
        load(preset="6.7B", overrides=["parallel.tp=3", "parallel.sequence=false", "model.ffn_size=16384"])


def test_two_autos_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.tp: auto, but parallel\.dp is auto too\. Say a number for one"):
        load(overrides=["parallel.tp=auto", "parallel.dp=auto"])


@pytest.mark.parametrize("value", ["x", "0", "-2", "true", "1.5"])
def test_a_degree_is_a_number_or_auto(value: str) -> None:
    with pytest.raises(ConfigError, match=r"1 problem\n.*parallel\.tp: got .*; needs a whole number of 1 or more, or"):
        load(overrides=[f"parallel.tp={value}"])


@given(sizes=degrees)
def test_a_layout_is_read_as_it_is_written(sizes: dict[str, int]) -> None:
    layout = Layout(**sizes)
    assert Layout.parse(str(layout)) == layout
    assert Layout.parse(".".join(f"{axis}{size}" for axis, size in sizes.items()) or "1") == layout


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp2.xx2", "layout 'tp2.xx2': 'xx2' is not an axis and a number. Needed: such as tp2.pp2, of the axes pp, dp"),
        ("tp0", "'tp0' is not an axis"),
        ("", "'' is not an axis"),
        ("tp2,pp2", "'tp2,pp2' is not an axis"),
        ("tp2.tp4", "layout 'tp2.tp4': tp is said twice."),
    ],
)
def test_a_layout_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Layout.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given_values", "zero"),
    [
        ({}, 0),
        ({"dp": 4}, 0),
        ({"fsdp": 2}, 3),
        ({"fsdp": "auto"}, 3),
        ({"fsdp": 2, "pp": 2}, 1),
        ({"fsdp": 2, "pp": 2, "zero": 3}, 3),
        ({"fsdp": 2, "zero": 0}, 0),
    ],
)
def test_the_usual_stage(given_values: dict[str, int | str], zero: int) -> None:
    assert ParallelConfig(**given_values).zero == zero


def test_what_follows_from_auto_follows_when_it_is_known() -> None:
    parallel = ParallelConfig(fsdp="auto", tp=2)
    assert with_layout(parallel, Layout(tp=2)).zero == 0
    assert with_layout(parallel, Layout(fsdp=2, tp=2)).zero == 3
    assert with_layout(ParallelConfig(fsdp="auto", zero=2), Layout(fsdp=4)) == ParallelConfig(fsdp=4, zero=2)


# Contradictions

SMALL = ["model.num_layers=4", "model.hidden_size=24", "model.num_heads=6", "model.max_positions=32"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.tp=4"],
            "parallel.tp: 4 does not divide model.num_heads (6). tp that would fit: 1, 2, 3, 6.",
        ),
        (
            ["parallel.tp=2", "model.ffn_size=33"],
            "parallel.tp: 2 does not divide model.ffn_size (33). tp that would fit: 1, 3.",
        ),
        (
            ["parallel.tp=2", "model.vocab_size=1"],
            "parallel.tp: 2 leaves a rank without rows of model.vocab_size (1).",
        ),
        (
            ["parallel.tp=6", "parallel.sequence=false", "model.vocab_size=10"],
            "parallel.tp: 6 leaves a rank without rows of model.vocab_size",
        ),
        (
            ["parallel.tp=3"],
            "data.seq_len: 32 is not a multiple of parallel.tp (3), along which the sequence is split. "
            "Use a parallel.tp that divides it (next below: 2), or parallel.sequence: false.",
        ),
        (
            ["parallel.pp=8", "batch.accumulation=8"],
            "parallel.pp: 8 pipeline stages, but the model has 4 layers; needs a layer or more in each. Use at most 4 "
            "stages (pp x virtual_stages).",
        ),
        (
            ["parallel.pp=2", "parallel.virtual_stages=3", "parallel.schedule=interleaved", "batch.accumulation=2"],
            "parallel.pp: 6 pipeline stages, but the model has 4 layers",
        ),
        (
            ["parallel.pp=4", "batch.accumulation=3"],
            "batch.accumulation: 3 micro-batches per step and data-parallel rank are fewer than the 4 pipeline stages: "
            "some stages would have no work. Needed: 4 or more.",
        ),
        (
            ["parallel.pp=4", "batch.global_size=6", "batch.micro_size=2"],
            "batch.accumulation: 3 micro-batches per step and data-parallel rank are fewer than the 4",
        ),
        (
            ["parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "batch.accumulation=5"],
            "batch.accumulation: 5 micro-batches per step and data-parallel rank are not a multiple of pp = 2, which "
            "schedule interleaved needs. Nearest: 4 or 6.",
        ),
        (
            ["parallel.schedule=gpipe"],
            "parallel.schedule: gpipe, but parallel.pp is 1: there is no pipeline. Set parallel.pp, or leave it out.",
        ),
        (["parallel.virtual_stages=2"], "parallel.virtual_stages: 2, but parallel.pp is 1: there is no pipeline."),
        (
            ["parallel.pp=2", "parallel.virtual_stages=2", "batch.accumulation=2"],
            "parallel.virtual_stages: 2, but schedule 1f1b needs 1. Set it to 1, or use parallel.schedule: interleaved",
        ),
        (
            ["parallel.pp=2", "parallel.schedule=interleaved", "batch.accumulation=2"],
            "parallel.virtual_stages: 1, but schedule interleaved needs 2 or more. Set it to 2, or use",
        ),
        (["parallel.zero=2"], "parallel.zero: 2 shards over parallel.fsdp, which is 1."),
        (["parallel.dp=2", "parallel.zero=1"], "parallel.zero: 1 shards over parallel.fsdp, which is 1."),
        (
            ["parallel.fsdp=2", "parallel.zero=0", "parallel.offload=true"],
            "parallel.offload: true moves shards to the CPU, but parallel.zero is 0: nothing is sharded.",
        ),
        (["parallel.dp=2", "parallel.offload=true"], "parallel.offload: true moves shards to the CPU"),
    ],
)
def test_what_does_not_fit_the_layout_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[*SMALL, *overrides])
    assert [problem for problem in caught.value.problems if problem.startswith(message)], caught.value.problems
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["parallel.tp=3", "parallel.sequence=false"],
        ["parallel.tp=2"],
        ["parallel.pp=4", "batch.accumulation=4"],
        ["parallel.pp=2", "parallel.virtual_stages=2", "parallel.schedule=interleaved", "batch.accumulation=4"],
        ["parallel.pp=2", "parallel.schedule=zero_bubble", "batch.accumulation=4"],
        ["parallel.pp=2", "parallel.schedule=gpipe", "batch.accumulation=3"],
        *[["parallel.fsdp=2", f"parallel.zero={zero}", "parallel.offload=true"] for zero in (1, 2, 3)],
        ["parallel.fsdp=2", "parallel.zero=0"],
        # what hangs on a number that is not known yet is checked when it is
        ["parallel.tp=auto"],
        ["parallel.pp=auto", "parallel.schedule=gpipe"],
        ["parallel.dp=auto", "batch.global_size=7"],
        ["parallel.fsdp=auto", "parallel.zero=2", "parallel.offload=true"],
    ],
)
def test_what_fits_is_accepted(overrides: list[str]) -> None:
    load(overrides=[*SMALL, *overrides])


def test_what_hung_on_auto_is_checked_when_the_world_is_known(small_store: Path) -> None:
    data = ["train.steps=1", f"data.path={small_store}", "model.vocab_size=512", "run.device=cpu"]
    setup = prepare(load(overrides=[*SMALL, *data, "parallel.dp=auto", "batch.global_size=4"]))
    assert setup.parallel == ParallelConfig(dp=1) and setup.batch.data_parallel == 1
    with pytest.raises(ConfigError, match=r"parallel\.schedule: gpipe, but parallel\.pp is 1"):
        prepare(load(overrides=[*SMALL, *data, "parallel.pp=auto", "parallel.schedule=gpipe"]))
