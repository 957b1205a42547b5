"""The Engine section of FleetX's document in our config words: when to log, evaluate and save, and the log line."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint import manifest
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.cli.main import main

TINY = {
    "model.num_layers": 2,
    "model.hidden_size": 32,
    "model.num_heads": 2,
    "model.vocab_size": 512,
    "model.max_positions": 16,
    "data.split": "90,10",
    "batch.global_size": 4,
    "batch.micro_size": 2,
    "optim.lr": 3e-3,
    "optim.warmup_steps": 4,
    "evaluate.every": 0,
    "run.device": "cpu",
    "run.threads": 1,
}


@pytest.fixture
def train(small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """train("run", "train.steps=6"): what a run in tmp_path / "run" prints."""

    def run(name: str, *more: str) -> str:
        settings = [f"{key}={value}" for key, value in {**TINY, "data.path": small_store}.items()]
        code = main(["train", "--out", str(tmp_path / name), *settings, *more])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return printed.out

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def deterministic(run: Path) -> list[dict[str, Any]]:
    return [
        {k: v for k, v in line.items() if k not in {"tokens_per_sec", "mfu", "memory"} and not k.endswith("_seconds")}
        for line in lines_of(run)
    ]


# S0-12: max_steps, num_train_epochs, accumulate_steps, logging_freq, eval_freq, eval_iters


def test_s0_12_max_steps_and_logging_freq(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train("run", "train.steps=7", "train.log_every=3")
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [3, 6, 7], "every third, and the last"
    assert re.findall(r"^step (\d)/7 ", printed, re.MULTILINE) == ["3", "6", "7"]


def test_s0_12_eval_freq_and_eval_iters(train: Callable[..., str], tmp_path: Path) -> None:
    train("run", "train.steps=7", "train.log_every=100", "evaluate.every=3", "evaluate.batches=5")
    evaluations = [line for line in lines_of(tmp_path / "run") if "held_out_loss" in line]
    assert [line["step"] for line in evaluations] == [3, 6, 7]
    assert {line["held_out_tokens"] for line in evaluations} == {5 * 4 * 16}, "five batches of four samples"


def test_s0_12_num_train_epochs(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train("run", "train.epochs=2", "batch.global_size=480", "batch.micro_size=240")
    samples = int(re.search(r"data: +([\d,]+) samples per epoch", printed)[1].replace(",", ""))  # type: ignore[index]
    assert samples // 480 >= 2, "the corpus is large enough to tell epochs from steps"
    assert lines_of(tmp_path / "run")[-1]["step"] == 2 * samples // 480


def test_s0_12_accumulate_steps(train: Callable[..., str], tmp_path: Path) -> None:
    printed = train("one", "train.steps=4", "train.log_every=1", "batch.micro_size=4")
    assert "4 micro-batch x 1 accumulation" in printed
    printed = train("four", "train.steps=4", "train.log_every=1", "batch.micro_size=0", "batch.accumulation=4")
    assert "1 micro-batch x 4 accumulation" in printed
    for one, four in zip(lines_of(tmp_path / "one"), lines_of(tmp_path / "four"), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], abs=5e-6)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
        assert four["tokens"] == one["tokens"]


# S0-14: save_steps, output_dir, ckpt_dir


def test_s0_14_saves_where_and_when_it_is_told(train: Callable[..., str], tmp_path: Path) -> None:
    train("output", "train.steps=7", "checkpoint.every=2", "checkpoint.keep_last=9")
    assert set(CheckpointFolder(tmp_path / "output").steps()) == {2, 4, 6, 7}
    for path in CheckpointFolder(tmp_path / "output").steps().values():
        manifest.verify(path, manifest.read(path))


def test_s0_14_keeps_what_it_is_told(train: Callable[..., str], tmp_path: Path) -> None:
    train("output", "train.steps=7", "checkpoint.every=1", "checkpoint.keep_last=2", "checkpoint.keep_every=3")
    assert set(CheckpointFolder(tmp_path / "output").steps()) == {3, 6, 7}


def test_s0_14_resumes_exactly_from_a_ckpt_dir(train: Callable[..., str], tmp_path: Path) -> None:
    """Each checkpoint of a run, resumed in a folder of its own, gives the rest of that run to the last bit."""
    common = ["train.steps=6", "train.log_every=1", "checkpoint.every=2", "model.dropout_hidden=0.1"]
    train("whole", *common)
    expected = deterministic(tmp_path / "whole")
    assert len(expected) == 6
    for step in (2, 4):
        checkpoint = tmp_path / "whole" / "checkpoints" / f"step-{step:08d}"
        printed = train(f"rest-{step}", *common, "--resume", str(checkpoint))
        assert f"resuming from {checkpoint}" in printed
        assert deterministic(tmp_path / f"rest-{step}") == expected[step:]


# S0-15: the log line. Two lines as the document prints them.

DOCUMENT = [
    "[2022-07-27 12:42:46,601] [    INFO] - global step 1, epoch: 0, batch: 0, loss: 11.052017212, avg_reader_cost: "
    "0.05710 sec, avg_batch_cost: 1.59627 sec, speed: 0.63 step/s, ips_total: 5132 tokens/s, ips: 5132 tokens/s, "
    "learning rate: 5.55556e-09",
    "[2022-07-27 12:42:50,583] [    INFO] - global step 9, epoch: 0, batch: 8, loss: 11.047873497, avg_reader_cost: "
    "0.00015 sec, avg_batch_cost: 0.49669 sec, speed: 2.01 step/s, ips_total: 16493 tokens/s, ips: 16493 tokens/s, "
    "learning rate: 2.77778e-08",
]
FIELDS = ["year", "month", "day", "hour", "minute", "second", "millisecond", "step", "epoch", "batch", "loss"] + [
    "reader_cost",
    "batch_cost",
    "speed",
    "ips_total",
    "ips",
    "lr",
]


def shape_of(line: str) -> re.Pattern[str]:
    """The line with every number replaced by "a number written like this one": same decimals, same exponent."""
    names = iter(FIELDS)

    def number(match: re.Match[str]) -> str:
        whole, decimals, exponent = match["whole"], match["decimals"], match["exponent"]
        name = next(names)
        fixed = name in FIELDS[:7]  # parts of the date keep their width
        digits = rf"\d{{{len(whole)}}}" if fixed or exponent else r"\d+"
        fraction = rf"\.\d{{{len(decimals)}}}" if decimals else ""
        power = r"e[-+]\d\d" if exponent else ""
        return rf"(?P<{name}>{digits}{fraction}{power})"

    pieces, at = [], 0
    for match in re.finditer(r"(?P<whole>\d+)(?:\.(?P<decimals>\d+))?(?P<exponent>e[-+]\d+)?", line):
        pieces += [re.escape(line[at : match.start()]), number(match)]
        at = match.end()
    return re.compile("".join([*pieces, re.escape(line[at:])]))


def test_s0_15_the_shape_is_that_of_the_document() -> None:
    first, second = (shape_of(line) for line in DOCUMENT)
    assert first.pattern == second.pattern
    found = first.fullmatch(DOCUMENT[1])
    assert found
    assert found["loss"] == "11.047873497"
    assert found["ips_total"] == "16493"
    assert first.fullmatch(DOCUMENT[0].replace("11.052017212", "11.05")) is None
    assert first.fullmatch(DOCUMENT[0].replace("INFO", "WARN")) is None


def test_s0_15_the_log_line_field_by_field(train: Callable[..., str], tmp_path: Path) -> None:
    settings = ["train.steps=6", "train.log_every=1", "train.log_style=fleetx"]
    printed = train("run", *settings, "batch.global_size=480", "batch.micro_size=240")
    samples = int(re.search(r"data: +([\d,]+) samples per epoch", printed)[1].replace(",", ""))  # type: ignore[index]
    per_epoch = samples // 480
    assert 1 < per_epoch < 6, "more than one epoch, each with more than one batch"
    shape = shape_of(DOCUMENT[0])
    found = [match for match in map(shape.fullmatch, printed.splitlines()) if match]
    logged = lines_of(tmp_path / "run")
    assert len(found) == len(logged) == 6
    next_rates = [line["lr"] for line in logged[1:]]
    for number, (line, entry) in enumerate(zip(found, logged, strict=True)):
        assert int(line["step"]) == entry["step"] == number + 1
        assert int(line["epoch"]) == number // per_epoch
        assert int(line["batch"]) == number % per_epoch
        assert line["loss"] == f"{entry['loss']:.9f}"
        assert line["ips"] == line["ips_total"]
        assert int(line["ips"]) == pytest.approx(entry["tokens_per_sec"], abs=0.56)  # the metrics have one decimal
        batch_cost, speed = float(line["batch_cost"]), float(line["speed"])
        assert speed == pytest.approx(1 / batch_cost, abs=0.006 + 0.01 * speed)
        assert float(line["ips"]) == pytest.approx(480 * 16 / batch_cost, rel=0.01)
        assert 0 <= float(line["reader_cost"]) <= batch_cost + 1e-5
        # The document's own clock has moved on by the time it logs: the rate of the step that comes next.
        if number < 5:
            assert line["lr"] == f"{next_rates[number]:.5e}"


def test_s0_15_the_default_line_is_ours(train: Callable[..., str]) -> None:
    printed = train("run", "train.steps=5", "train.log_every=1")
    assert "global step" not in printed
    ours = r"^step 5/5  loss \d\.\d{4}  lr \S+  grad \S+  [\d,]+ tok/s  MFU (?:\d+%|-)  ETA 0:00$"
    assert re.search(ours, printed, re.M)


# S2-06: the log of PaddleNLP's document, which begins at step 1471

PADDLENLP = (
    "[2022-11-25 23:31:05,459] [    INFO] - global step 1471, epoch: 0, batch: 1470, loss: 8.085629463, "
    "avg_reader_cost: 0.00024 sec, avg_batch_cost: 0.35901 sec, speed: 2.79 step/s, ips_total: 11409 tokens/s, "
    "ips: 11409 tokens/s, learning rate: 4.60000e-05"
)


@pytest.mark.slow
def test_s2_06_the_learning_rates_of_the_log(train: Callable[..., str]) -> None:
    shape = ["model.num_layers=1", "model.hidden_size=8", "model.num_heads=1", "batch.global_size=1"]
    clock = ["optim.lr=1e-4", "optim.min_lr=1e-5", "optim.warmup_steps=3200", "optim.decay_steps=320000"]
    settings = ["train.steps=1475", "train.log_every=1", "train.log_style=fleetx", "batch.micro_size=1"]
    printed = train("run", *shape, *clock, *settings)
    found = {int(m["step"]): m["lr"] for m in map(shape_of(PADDLENLP).fullmatch, printed.splitlines()) if m}
    assert len(found) == 1475
    logged = ["4.60000e-05", "4.60313e-05", "4.60625e-05", "4.60938e-05", "4.61250e-05"]
    assert [found[step] for step in range(1471, 1476)] == logged
