"""gptworks plan, as a user calls it."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli import tables
from gptworks.cli.plan_options import parse_count
from gptworks.config import load
from gptworks.errors import UsageError
from gptworks.plan.devices import device

Call = Callable[..., Any]

LAYOUT = ["parallel.pp=2", "parallel.fsdp=4", "parallel.tp=2", "batch.global_size=256", "batch.micro_size=2"]
LAYOUT += ["precision.compute=fp16", "train.recompute=full"]
PLAN = ["plan", "--preset", "6.7B", "--devices", "16", "--device", "v100-32g", *LAYOUT]


# One layout


def test_the_report_of_a_layout(call: Call) -> None:
    said = call(*PLAN, "--tokens", "300B", "--price", "2.5").out
    for words in (
        "16 x v100-32g, 2 machines of 8",
        "pp2.fsdp4.tp2, zero 1",
        "256 = 2 micro-batch x 32 accumulation x 4",
    ):
        assert words in said
    for word in ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication", "peak"):
        assert f"  {word}" in said
    for part in ("compute", "recompute", "bubble", "communication tp", "communication pp", "optimizer"):
        assert f"\n{part} " in said
    assert "tokens/s" in said and "MFU" in said and "300B take " in said and "at 2.5 for a device and hour" in said
    rows = [line for line in said.splitlines() if line.lstrip()[:2] in {"0 ", "1 "}]
    assert len(rows) == 2 and all("#" in row and "%" in row for row in rows), "a bar for each stage"
    assert len({row.index("%") for row in rows}) == 1, "aligned"


def test_json_says_the_same_and_its_parts_add_up(call: Call) -> None:
    told = json.loads(call(*PLAN, "--tokens", "300B", "--price", "2.5", "--json").out)
    terms = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication")
    assert [stage["stage"] for stage in told["stages"]] == [0, 1]
    for stage in told["stages"]:
        assert stage["peak"] == sum(stage[term] for term in terms)
    assert told["needed"] == max(stage["peak"] for stage in told["stages"])
    step = told["step"]
    parts = sum(step[name] for name in ("compute", "recompute", "bubble", "optimizer"))
    assert step["seconds"] == pytest.approx(parts + sum(step["communication"].values()))
    assert told["tokens_per_second"] == pytest.approx(256 * 1024 / step["seconds"])
    assert told["days"] == pytest.approx(3e11 / told["tokens_per_second"] / 86400)
    assert told["device_hours"] == pytest.approx(told["days"] * 24 * 16)
    assert told["cost"] == pytest.approx(2.5 * told["device_hours"])
    assert told["machines"] == 2 and 0 < told["mfu"] < 1
    assert told["settings"]["parallel.fsdp"] == 4 and told["settings"]["batch.accumulation"] == 32


def test_without_prices_and_tokens_nothing_is_made_up(call: Call) -> None:
    told = json.loads(call(*PLAN, "--json").out)
    assert told["tokens"] is told["days"] is told["cost"] is None
    steps = json.loads(call(*PLAN, "train.steps=1000", "--json").out)
    assert steps["tokens"] == 1000 * 256 * 1024
    assert "how many tokens?" in call(*PLAN, "--price", "1").out


def test_the_number_of_devices_follows_from_the_layout(call: Call) -> None:
    without = [word for word in PLAN if word not in ("--devices", "16")]
    assert json.loads(call(*without, "--json").out)["devices"] == 16


def test_auto_is_solved(call: Call) -> None:
    said = json.loads(
        call("plan", "--preset", "345M", "--devices", "8", "--device", "a100-40g", "parallel.dp=auto", "--json").out
    )
    assert said["layout"] == "dp8"


def test_machines_and_links_change_the_time_only(call: Call) -> None:
    one = json.loads(call(*PLAN, "--nodes", "1", "--json").out)
    sixteen = json.loads(call(*PLAN, "--nodes", "16", "--link", "eth-10", "--json").out)
    assert (one["machines"], sixteen["machines"]) == (1, 16)
    assert one["step"]["seconds"] < sixteen["step"]["seconds"]
    assert one["stages"] == sixteen["stages"]


def test_a_device_of_your_own(call: Call) -> None:
    said = [
        "plan",
        "--preset",
        "345M",
        "--device",
        "custom",
        "--memory",
        "24GiB",
        "--tflops",
        "70",
        "batch.micro_size=1",
    ]
    told = json.loads(call(*said, "--json").out)
    assert told["capacity"] == 24 * 2**30 - device("a100-80g").reserved
    faster = json.loads(call(*said[:-2], "140", "batch.micro_size=1", "--bandwidth", "2000", "--json").out)
    assert faster["tokens_per_second"] > told["tokens_per_second"]


def test_a_plan_imports_neither_torch_nor_numpy() -> None:
    """It takes a third of a second therefore: benchmarks/startup.py."""
    code = """
import sys
from gptworks.cli.main import main
assert main(sys.argv[1:]) == 0
assert not {"torch", "numpy", "rich"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code, *PLAN], capture_output=True, text=True, check=True)


def test_a_layout_that_does_not_fit_shows_what_would(call: Call) -> None:
    one = ["plan", "--preset", "345M", "--device", "v100-16g", "precision.compute=fp16"]
    big = [*one, "batch.global_size=64", "batch.micro_size=64"]
    done = call(*big)
    assert "DOES NOT FIT" in done.out and "!" in done.out
    told = json.loads(call(*big, "--json").out)
    assert told["fits"] is False and len(told["changes"]) >= 3
    first = told["changes"][0]
    again = [f"{key}={value}" for key, value in first["settings"].items()]
    mended = json.loads(call(*one, "batch.global_size=64", *again, "--json").out)
    assert mended["fits"] is True and mended["needed"] == first["needed"]
    assert told["changes"][-1]["kind"] == "model"
    assert "another model: " in done.out


def test_what_is_slow_on_the_device_is_said(call: Call) -> None:
    said = call("plan", "--preset", "345M", "--device", "v100-32g").out
    assert "precision.compute: fp32 has 15.7 of the 125 TFLOP/s of v100-32g. precision.compute=fp16" in said


@pytest.mark.parametrize(
    ("device", "advice"), [("v100-32g", "fp16"), ("a100-80g", "bf16"), ("h100-80g", "bf16"), ("cpu", "")]
)
def test_the_faster_precision_of_a_device_is_recommended(device: str, advice: str, call: Call) -> None:
    """By the time of a step. V100 has no units for bf16; a CPU is not assumed to have any."""
    said = ["plan", "--preset", "345M", "--device", device, "batch.micro_size=1"]
    told = json.loads(call(*said, "--json").out)
    notes = [note for note in told["notes"] if note.startswith("precision.compute: fp32")]
    if not advice:
        assert notes == []
        return
    faster = json.loads(call(*said, f"precision.compute={advice}", "--json").out)
    ratio = told["step"]["seconds"] / faster["step"]["seconds"]
    assert f"precision.compute={advice} is {ratio:.1f} times as fast" in notes[0] and ratio > 1.5
    assert not any("precision.compute" in note for note in faster["notes"])


def test_s3_07_gpt3_on_128_devices_is_planned(call: Call) -> None:
    settings = ["model.max_positions=2048", "data.seq_len=2048", "batch.global_size=1536", "batch.micro_size=1"]
    settings += ["parallel.pp=16", "parallel.tp=8", "precision.compute=bf16"]
    told = json.loads(call("plan", "--preset", "175B", "--device", "a100-80g", *settings, "--json").out)
    assert told["devices"] == 128 and told["parameters"] == 174_615_846_912
    assert len(told["stages"]) == 16
    middle = told["stages"][7]
    assert middle["parameters"] == 4 * 1_359_461_376 and middle["optimizer"] == 2 * middle["parameters"]


def test_simulate_runs_a_step_of_the_same_layout(call: Call) -> None:
    small = ["model.num_layers=4", "model.hidden_size=64", "model.num_heads=4", "model.vocab_size=512"]
    small += ["model.max_positions=64", "batch.global_size=8", "batch.micro_size=2", "parallel.pp=2"]
    told = json.loads(call("plan", "--simulate", "--device", "cpu", *small, "--json").out)
    assert [each["pp_ranks"] for each in told["simulated"]] == [[0], [1]]
    for planned, simulated in zip(told["stages"], told["simulated"], strict=True):
        assert planned["peak"] == pytest.approx(simulated["bytes"]["peak"], rel=0.05)
        assert simulated["planned_peak"] == planned["peak"]
    out = call("plan", "--simulate", "--device", "a100-40g", "precision.compute=bf16", *small).out
    assert "simulated        pp2: 2 processes" in out
    table = out[out.index("planned and simulated peaks") :].splitlines()
    assert table[1].split("  ")[-1] == "difference" and all(line.endswith(" %") for line in table[2:4])
    assert "The kernels of a GPU keep other things" in table[4]
    assert "--simulate: is about one layout" in call("plan", "--simulate", "--search", expect=2).err


# Search


SEARCH = ["plan", "--search", "--preset", "6.7B", "--devices", "16", "--device", "v100-32g", "precision.compute=fp16"]


@pytest.mark.slow
def test_search_ranks_what_fits_and_tells_why_the_rest_does_not(call: Call) -> None:
    done = call(*SEARCH, "batch.global_size=512", "--top", "3", "--tokens", "300B")
    assert " layouts fit; the fastest:" in done.out and "--rejected says why" in done.out
    rows = [line.split() for line in done.out.splitlines() if line[:1] in {"1", "2", "3"} and "full" in line + "full"]
    assert [row[0] for row in rows if row[0] in {"1", "2", "3"}][:3] == ["1", "2", "3"]
    told = json.loads(call(*SEARCH, "batch.global_size=512", "--top", "3", "--rejected", "--json").out)
    assert len(told["found"]) == 3
    speeds = [each["tokens_per_second"] for each in told["found"]]
    assert speeds == sorted(speeds, reverse=True)
    assert all(each["fits"] for each in told["found"])
    assert told["looked_at"] == told["fits"] + len(told["rejected"])
    listed = call(*SEARCH, "batch.global_size=512", "--rejected").out
    assert "more than v100-32g has" in listed and "tp 16 would reach beyond a machine of 8" in listed


@pytest.mark.slow
def test_no_layout_and_no_batch_means_the_best(call: Call) -> None:
    said = [word for word in SEARCH if word != "--search"]
    done = call(*said)
    assert "note: no layout is given: this is the fastest of " in done.out
    assert (
        "note: batch.global_size is not set: 2,048 samples of 1,024 tokens are taken, which suit a model of this size"
        in done.out
    )
    best = json.loads(call(*SEARCH, "--json").out)["found"][0]
    assert json.loads(call(*said, "--json").out)["settings"] == best["settings"]


@pytest.mark.slow
def test_the_best_is_written_and_train_takes_it(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    done = call(*SEARCH, "batch.global_size=512", "--tokens", "300B", "--save", file)
    assert f"gptworks train -c {file}" in done.out
    text = file.read_text()
    assert "# Predicted: " in text and "# Still to be said: data.path." in text and "preset: 6.7B" in text
    told = json.loads(call(*SEARCH, "batch.global_size=512", "--json").out)["found"][0]
    config = load(file)
    assert config.train.tokens == 300_000_000_000 and config.precision.compute == "fp16"
    settings = told["settings"]
    assert {key: settings[f"parallel.{key}"] for key in ("pp", "dp", "fsdp", "tp", "zero")} == {
        key: getattr(config.parallel, key) for key in ("pp", "dp", "fsdp", "tp", "zero")
    }
    planned = json.loads(call("plan", "-c", file, "--device", "v100-32g", "--json").out)
    assert planned["settings"] == settings and planned["needed"] == told["needed"]
    dry = call("train", "--dry-run", "-c", file)
    assert f"layout           {told['layout']}: 16 processes" in dry.out
    assert "is there already" in call(*SEARCH, "--save", file, expect=2).err


def test_a_saved_file_keeps_what_the_first_one_said(call: Call, recipe: Path, tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    call("plan", "-c", recipe, "--search", "--devices", "2", "--device", "cpu", "--save", file, "optim.lr=1e-4")
    before, after = load(recipe), load(file)
    for section in ("model", "data", "optim", "checkpoint", "run", "precision"):
        if section != "optim":
            assert getattr(after, section) == getattr(before, section)
    assert after.optim.lr == 1e-4 and after.train.steps == 6
    call("train", "--dry-run", "-c", file, "--out", tmp_path / "run")


def test_what_is_said_on_the_command_line_is_kept_by_a_search(call: Call) -> None:
    told = json.loads(call(*SEARCH, "batch.global_size=512", "parallel.tp=4", "--top", "50", "--json").out)
    assert {each["settings"]["parallel.tp"] for each in told["found"]} == {4}


def test_a_search_that_finds_nothing_says_what_is_needed(call: Call) -> None:
    none = ["plan", "--search", "--preset", "13B", "--devices", "2", "--device", "v100-32g", "precision.compute=fp16"]
    done = call(*none, "batch.global_size=64", expect=2)
    assert "error: --search: none of " in done.err and "nearest: " in done.err
    assert "more than v100-32g has" in done.err and " x v100-32g would be enough." in done.err
    told = json.loads(call(*none, "batch.global_size=64", "--json", expect=2).out)
    assert told["fits"] == 0 and told["fewest_devices"] > 2
    more = [word if word != "2" else str(told["fewest_devices"]) for word in none]
    assert json.loads(call(*more, "batch.global_size=64", "--json").out)["fits"] > 0


def test_a_search_asks_nothing_of_what_it_is_to_choose(call: Call) -> None:
    """pp=4 with one micro-batch would be refused; but nobody has said one micro-batch."""
    told = json.loads(call(*SEARCH, "batch.global_size=512", "parallel.pp=4", "--top", "5", "--json").out)
    assert {each["settings"]["parallel.pp"] for each in told["found"]} == {4}
    assert all(each["settings"]["batch.accumulation"] >= 4 for each in told["found"])
    zero = json.loads(call(*SEARCH, "batch.global_size=512", "parallel.zero=3", "--top", "5", "--json").out)
    assert {each["settings"]["parallel.zero"] for each in zero["found"]} == {3}


@pytest.mark.parametrize("said", [["parallel.pp=4", "parallel.tp=8"], ["parallel.fsdp=8", "parallel.dp=4"]])
def test_more_devices_than_there_are_is_said_at_once(said: list[str], call: Call) -> None:
    err = call(*SEARCH, *said, expect=2).err
    assert "needs 32 devices or a multiple of them, but there are 16" in err and "--devices 32" in err


@pytest.mark.slow
def test_enough_devices_are_enough_for_what_was_said(call: Call) -> None:
    err = call(*SEARCH, "batch.micro_size=64", "train.recompute=none", expect=2).err
    assert "would be enough" not in err
    assert "do not help as long as it is batch.micro_size=64 train.recompute=none" in err


def test_a_pipeline_gets_its_micro_batches(call: Call) -> None:
    said = ["plan", "--preset", "6.7B", "--devices", "16", "--device", "v100-32g", "precision.compute=fp16"]
    said += ["parallel.pp=2", "parallel.fsdp=8", "parallel.zero=3", "batch.global_size=512"]
    told = json.loads(call(*said, "--json").out)
    assert told["fits"] is True and told["settings"]["batch.accumulation"] >= 2
    assert any(note.startswith("batch.micro_size is not set: ") for note in told["notes"])
    err = call(*said, "batch.micro_size=64", expect=2).err
    assert "1 micro-batches per step and data-parallel rank are fewer than the 2 pipeline stages" in err


@pytest.mark.parametrize("layout", [["--devices", "16", "parallel.fsdp=16"], ["--devices", "1"]])
def test_a_batch_that_nobody_chose_is_said(layout: list[str], call: Call) -> None:
    said = ["plan", "--preset", "6.7B", "--device", "v100-32g", "precision.compute=fp16", *layout]
    told = json.loads(call(*said, "--tokens", "300B", "--json").out)
    assert told["settings"]["batch.global_size"] == 2048
    assert any("batch.global_size is not set: 2,048 samples" in note for note in told["notes"])
    chosen = json.loads(call(*said, "batch.micro_size=1", "--json").out)
    assert chosen["settings"]["batch.global_size"] == told["devices"] and not chosen["notes"]


@pytest.mark.slow
def test_changes_have_their_speed_and_the_best_beside_them(call: Call) -> None:
    said = ["plan", "--preset", "6.7B", "--devices", "16", "--device", "v100-32g", "precision.compute=fp16"]
    said += ["parallel.dp=16", "batch.global_size=512", "batch.micro_size=4", "--tokens", "300B"]
    told = json.loads(call(*said, "--json").out)
    for change in told["changes"]:
        if change["kind"] == "run":
            again = [f"{key}={value}" for key, value in change["settings"].items()]
            mended = json.loads(call(*said, *again, "--json").out)
            assert mended["step"]["seconds"] == pytest.approx(change["seconds"])
            assert mended["days"] == pytest.approx(change["days"])
    best = json.loads(call(*SEARCH, "batch.global_size=512", "--json").out)["found"][0]
    assert told["search"]["seconds"] == pytest.approx(best["step"]["seconds"])
    assert told["search"]["seconds"] < min(each["seconds"] for each in told["changes"] if each["kind"] == "run")
    lines = call(*said).out
    assert "GiB, 54.15 s a step, 358.6 days)" in lines and "\nOf all layouts, --search: " in lines


@pytest.mark.slow
def test_what_a_search_costs(call: Call) -> None:
    paid = [*SEARCH, "batch.global_size=512", "--price", "2", "--top", "1"]
    assert " cost\n" in call(*paid, "--tokens", "300B").out
    assert "note: --price: how many tokens?" in call(*paid).out


@pytest.mark.slow
def test_rejected_ones_are_grouped_for_people(call: Call) -> None:
    out = call(*SEARCH, "batch.global_size=512", "--rejected").out
    told = json.loads(call(*SEARCH, "batch.global_size=512", "--rejected", "--json").out)["rejected"]
    listed = out[out.index(" rejected:\n") :].splitlines()[1:]
    counts = [int(line.split(":")[0].replace(",", "")) for line in listed if line[:2] == "  " and line[2].isdigit()]
    assert sum(counts) == len(told) and len(listed) < 60


def test_a_cpu_says_what_it_is_taken_for(call: Call) -> None:
    said = ["plan", "--preset", "345M", "--device", "cpu", "batch.micro_size=1"]
    out = call(*said, "--devices", "4", "parallel.dp=4").out
    assert "two cores with 16 GB is assumed" in out and "4 devices are 4 machines" in out
    told = json.loads(call(*said, "--memory", "64GB", "--json").out)
    assert told["capacity"] == 64e9 and not told["notes"]


def test_a_search_of_a_file_has_as_many_devices_as_the_file(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "four.yaml"
    file.write_text("preset: 345M\nparallel: {dp: 4}\nbatch: {global_size: 64}\n")
    told = json.loads(call("plan", "-c", file, "--search", "--device", "a100-40g", "--json").out)
    assert told["found"][0]["devices"] == 4
    saved = call("plan", "-c", file, "--device", "a100-40g", "--save", tmp_path / "one.yaml").out
    assert f"This layout is in {tmp_path / 'one.yaml'}" in saved


# Mistakes


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        (["--device", "v100"], "error: device 'v100' is unknown. Nearest: v100-"),
        (["--device", "a10080g"], "a100-80g"),
        (["--device", "A100"], "Nearest: a100-40g, a100-80g."),
        (["--device", "v100-32g", "--price", "$2"], "error: --price: '$2' is not a number. Needed: 0 or more"),
        (["--device", "v100-32g", "--devices", "sixteen"], "error: --devices: 'sixteen' is not a number."),
        (["--device", "v100-32g", "6.7b.yaml"], "Did you mean -c 6.7b.yaml?"),
        ([], "error: --device: not given. Needed: one of v100-16g, v100-32g, a100-40g"),
        (["--device", "v100-32g", "--devices", "12", "--nodes", "2"], "needs 16 ranks, but the world has 12"),
        (
            ["--device", "v100-32g", "--devices", "12"],
            "12 of them do not fill whole machines of 8. Needed: 8 or 16 devices, or --nodes",
        ),
        (["--device", "v100-32g", "--devices", "0"], "--devices: 0. Needed: 1 or more."),
        (["--device", "v100-32g", "--nodes", "3"], "--nodes: 3 machines do not divide --devices 16"),
        (["--device", "v100-32g", "--nodes", "-1"], "--nodes: -1."),
        (["--device", "v100-32g", "--link", "token-ring"], "link 'token-ring'"),
        (["--device", "v100-32g", "--tokens", "many"], "--tokens: 'many' is not a number of tokens"),
        (["--device", "v100-32g", "--tokens", "-3B"], "--tokens"),
        (["--device", "v100-32g", "--price", "-1"], "--price: -1. Needed: 0 or more"),
        (["--device", "v100-32g", "--price", "nan"], "--price: nan."),
        (["--device", "v100-32g", "--top", "3"], "--top: is about a search. Add --search."),
        (["--device", "v100-32g", "--memory", "24GB"], "--memory: describes a device of your own. Add --device custom"),
        (["--device", "custom"], "--device custom: --memory and --tflops not given"),
        (["--device", "custom", "--memory", "plenty", "--tflops", "9"], "--memory: 'plenty' is not an amount"),
        (["--device", "custom", "--memory", "24", "--tflops", "-9"], "-9"),
        (["--device", "v100-32g", "--save", "no/where/x.yaml"], "no/where/x.yaml cannot be written"),
        (["--device", "v100-32g", "parallel.tp=3"], "parallel.tp: 3 does not divide"),
    ],
)
def test_mistakes_get_an_answer(said: list[str], answer: str, call: Call) -> None:
    assert answer in call("plan", "--preset", "6.7B", *LAYOUT, *said, expect=2).err


def test_a_search_needs_the_number_of_devices(call: Call) -> None:
    assert "--devices: not given, and a search needs it" in call("plan", "--search", "--device", "cpu", expect=2).err
    auto = call("plan", "--device", "cpu", "parallel.dp=auto", expect=2).err
    assert "--devices: not given, and parallel.dp is auto" in auto


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("300B", 3e11),
        ("3e11", 3e11),
        ("1.5T", 1.5e12),
        ("20m", 2e7),
        ("300_000", 3e5),
        ("1,000", 1e3),
        ("2 K", 2e3),
        ("300 billion", 3e11),
        ("2 thousand", 2e3),
        ("1.5 trillion", 1.5e12),
    ],
)
def test_numbers_of_tokens(text: str, number: float) -> None:
    assert parse_count(text, "--tokens") == pytest.approx(number)


@pytest.mark.parametrize("text", ["", "0", "-1", "nan", "inf", "B", "1e999", "3Q", "1.2.3", "0x10", "1e-9"])
def test_numbers_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--tokens"):
        parse_count(text, "--tokens")


def test_a_device_is_known_however_it_is_written(call: Call) -> None:
    for name in ("v100-32G", "v100-32gb", "V100-32GB"):
        assert json.loads(call("plan", "--preset", "345M", "--device", name, "--json").out)["device"] == "v100-32g"


def test_bf16_is_no_larger_than_fp16(call: Call) -> None:
    said = call("plan", "--preset", "345M", "--device", "v100-32g", "precision.compute=bf16").out
    assert "precision.compute=fp16 is 5.4 times as fast." in said and "half as large" not in said
    assert "(of 15.7 TFLOP/s, bf16)" in said


# The look of tables


TITLES, ROWS = ["stage", "layers", "peak"], [["0", "16", "30.10"], ["1", "16", "9.99"]]


def test_columns_are_aligned_and_bars_are_in_proportion() -> None:
    lines = tables.plain(TITLES, ROWS, [1.2, 0.5])
    assert lines[0] == "stage  layers   peak"
    assert lines[1] == "    0      16  30.10  " + "#" * 20 + "!"
    assert lines[2] == "    1      16   9.99  " + "#" * 10 + "-" * 10


@pytest.mark.parametrize("width", [20, 25, 34, 40, 120])
def test_lines_are_no_wider_than_the_terminal(width: int) -> None:
    lines = tables.plain(TITLES, ROWS, [0.9, 0.5], width=width)
    assert max(map(len, lines)) <= width
    words = " ".join(lines).split()
    assert all(cell in words for row in ROWS for cell in row), "nothing is left out"


def test_a_pipe_is_as_wide_as_columns_says(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = call(*PLAN).out
    table = out[out.index("stage 0") : out.index("\na step takes")]
    assert max(map(len, table.splitlines())) <= 60


@pytest.mark.parametrize("columns", [40, 150])
def test_on_a_terminal(columns: int) -> None:
    """A real one: colours, and no line is wider than it."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "gptworks", *PLAN]
    with subprocess.Popen(command, stdout=child, stdin=child, env=environment, close_fds=True) as process:
        os.close(child)
        said = b""
        while True:
            try:
                piece = os.read(parent, 4096)
            except OSError:
                break
            if not piece:
                break
            said += piece
        assert process.wait(30) == 0
    os.close(parent)
    text = said.decode()
    assert ("\x1b[3" in text and "█" in text) is (columns == 150)
    assert "16 x v100-32g" in text


def test_memory_of_compiled_blocks_is_said_to_be_that_of_others(call: Call) -> None:
    said = ["plan", "--preset", "1.3B", "--device", "a100-80g", "precision.compute=bf16", "batch.global_size=8"]
    assert "blocks that are not compiled" in call(*said, "train.compile=true").out
    assert "compiled" not in call(*said).out


@pytest.mark.slow
def test_a_file_is_not_taken_for_the_command_line_by_its_name(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Degrees of a file are left to the search; those of the command line stay."""
    monkeypatch.chdir(tmp_path)
    Path("override.yaml").write_text("preset: gpt2\nparallel: {tp: 2, dp: 4}\nbatch: {global_size: 64}\n")
    asked = ("plan", "-c", "override.yaml", "--device", "a100-80g", "--search", "--top", "1000", "--json")
    found = json.loads(call(*asked).out)["found"]
    assert {each["settings"]["parallel.tp"] for each in found} > {1, 2}
    found = json.loads(call(*asked, "parallel.tp=2").out)["found"]
    assert {each["settings"]["parallel.tp"] for each in found} == {2}
