"""A run as a job of a cluster: times, names, volumes, and whether it suits the machines."""

import pytest

from gptworks.cli import launch, options
from gptworks.config.load import load
from gptworks.errors import GPTWorksError, UsageError
from gptworks.launch.schedulers.duration import parse_duration, slurm_duration
from gptworks.launch.schedulers.fit import Machine, examine
from gptworks.launch.schedulers.job import ShellText, Volume, default_name, require_name, shell_lines
from gptworks.launch.schedulers.registry import SCHEDULERS
from gptworks.launch.schedulers.skypilot import ACCELERATORS
from gptworks.plan.devices import devices


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90m", 5400),
        ("12h", 43200),
        ("1d12h", 129600),
        ("45s", 45),
        ("12:00:00", 43200),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("2-00:00:01", 172801),
    ],
)
def test_times_as_people_write_them(text: str, seconds: int) -> None:
    assert parse_duration(text, "--time") == seconds


@pytest.mark.parametrize("seconds", [1, 59, 3599, 86400, 129661])
def test_slurms_own_time_is_read_back(seconds: int) -> None:
    assert parse_duration(slurm_duration(seconds), "--time") == seconds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is not a time"),
        ("soon", "'soon' is not a time"),
        ("12:60:00", "'12:60:00' is not a time"),
        ("-5m", "'-5m' is not a time"),
        ("90", "90m for minutes, 90h for hours"),
        ("12:30", "12:30:00 or 12m30s"),
        ("0h", "is zero seconds"),
    ],
)
def test_a_time_that_is_none_or_two_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=f"--time: {text!r}") as error:
        parse_duration(text, "--time")
    assert told in str(error.value)


def test_the_command_line_names_each_scheduler() -> None:
    assert list(options.listed(launch.SCHEDULERS.lower())) == list(SCHEDULERS)


def test_names() -> None:
    assert default_name("GPT_1.3B run") == "gpt-1-3b-run"
    assert default_name("345M") == "train-345m" and default_name("...") == "train"
    for name in ("Up", "9a", "a_b", "a-", "", "a" * 51):
        with pytest.raises(UsageError, match=f"--name: '{name}'"):
            require_name(name)


def test_volumes() -> None:
    assert Volume.parse("s3://bucket/a:/data/") == Volume("s3://bucket/a", "/data")
    assert Volume("x", "/data").holds("/data/runs") and not Volume("x", "/data").holds("/database")
    for text in ("/data", "claim", "claim:data", ":/data", "s3://bucket"):
        with pytest.raises(UsageError, match=f"--volume: '{text}'"):
            Volume.parse(text)


LARGE = ["data.seq_len=1024", "batch.global_size=64", "batch.micro_size=8"]


def test_memory_is_the_planners_and_what_is_too_large_is_refused_with_changes() -> None:
    config = load(preset="1.3B", overrides=[*LARGE, "parallel.dp=4"])
    fit = examine(config, Machine(1, 4), "")
    assert fit.devices == ("a100-80g", "h100-80g")
    assert "does not fit v100-16g, v100-32g, a100-40g" in fit.lines[-1]
    with pytest.raises(UsageError, match="--device v100-16g: ") as error:
        examine(config, Machine(1, 4), "v100-16g")
    assert "14.85 GiB" in str(error.value) and "parallel.tp=4" in str(error.value)
    config = load(preset="1.3B", overrides=[*LARGE, "parallel.dp=4", "train.check_memory=off"])
    assert "does not fit v100-16g" in " ".join(examine(config, Machine(1, 4), "v100-16g").lines)


def test_a_type_that_a_gpu_has_no_units_for_is_not_rented() -> None:
    settings = ["data.seq_len=128", "batch.global_size=8", "parallel.dp=2"]
    for compute, wanted in (("fp16", True), ("bf16", False)):
        fit = examine(load(preset="tiny", overrides=[*settings, f"precision.compute={compute}"]), Machine(1, 2), "")
        assert ("v100-32g" in fit.devices) is wanted and "h100-80g" in fit.devices


@pytest.mark.parametrize(
    ("tp", "machine", "inside"),
    [(2, Machine(2, 8), True), (8, Machine(2, 8), True), (16, Machine(1, 16), True), (16, Machine(2, 8), False)],
)
def test_tensor_parallelism_that_leaves_a_node_is_said(tp: int, machine: Machine, inside: bool) -> None:
    config = load(preset="1.3B", overrides=[*LARGE, f"parallel.tp={tp}", "parallel.dp=auto"])
    notes = " ".join(examine(config, machine, "").notes)
    assert (f"parallel.tp: {tp} does not divide the {machine.processes} processes" in notes) is not inside
    assert inside or "tp = 1, 2, 4, 8." in notes


def test_degrees_that_are_another_number_of_processes_are_refused() -> None:
    config = load(preset="1.3B", overrides=[*LARGE, "parallel.tp=2", "parallel.fsdp=4"])
    with pytest.raises(GPTWorksError, match="fsdp=4 x tp=2 needs 8 ranks, but the world has 16"):
        examine(config, Machine(2, 8), "")


def test_every_gpu_of_the_planner_has_a_name_that_can_be_rented() -> None:
    assert set(ACCELERATORS) == {name for name, device in devices().items() if device.generation != "cpu"}
    assert len({scheduler.SUFFIX for scheduler in SCHEDULERS.values()}) == len(SCHEDULERS) == 3


def test_words_of_a_user_are_quoted_and_those_for_the_shell_are_not() -> None:
    words = ["timeout", "5", "gptworks", "train", 'run.out="$(rm -r x)"', "--master", ShellText('"$master"')]
    lines = shell_lines(words, "  ").split(" \\\n")
    assert lines == ["timeout 5", "  gptworks train 'run.out=\"$(rm -r x)\"'", '  --master "$master"']
