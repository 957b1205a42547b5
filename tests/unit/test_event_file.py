"""events.jsonl and the samples of bad steps, whatever a disk has made of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main
from gptworks.report import live, page, run_data
from gptworks.train import event_file

PIECE = {"document": 7, "tokens": [0, 5], "characters": [0, 9], "text": "some text"}
SAMPLE = {"sample": 3, "loss": 9.5, "variety": 0.1, "store": "a store", "pieces": [PIECE]}
EVENT = {"step": 4, "rule": "loss", "loss": 9.5, "decision": "skip", "samples": "bad-batch-4.jsonl", "culprit": SAMPLE}


def write(file: Path, *entries: Any) -> None:
    file.write_text("".join(json.dumps(each) + "\n" for each in entries))


def write_run(folder: Path) -> None:
    """The records of a run that went wrong once."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "environment.json").write_text(json.dumps({"command": ["gptworks"], "plan": {"step_seconds": 0.5}}))
    (folder / "config.yaml").write_text("train:\n  steps: 9\n")
    (folder / "trackers.json").write_text(json.dumps({"wandb": "12ab"}))
    write(folder / "metrics.jsonl", *({"step": step, "loss": 5.0, "tokens_per_sec": 9.0} for step in range(1, 6)))
    write(folder / "events.jsonl", EVENT)
    write(folder / "bad-batch-4.jsonl", SAMPLE)
    write(folder / "nonfinite.jsonl", {"step": 4, "loss": "nan", "sample_ids": [3]})
    write(folder / "texts.jsonl", {"step": 4, "prompt": "a", "text": "b"})
    evaluation = {"step": 4, "task": "lambada", "values": {"accuracy": 0.5}, "data": {"path": "x"}}
    write(folder / "evaluations.jsonl", evaluation)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_run(tmp_path)
    return tmp_path


def look(run: Path) -> str:
    """All that reads them; returns what `inspect --events` said."""
    found = run_data.read(run)
    assert page.written([found]).encode(errors="replace")
    assert live.drawn([live.Followed(run, "run")], 100)
    assert main(["inspect", str(run), "--events"]) == 0
    return "".join(event_file.in_words(each) for each in found.events)


STRANGE = [None, True, -1, 1.5, [], {}, "text", [[]], [0], [0, "9"], {"a": 1}, 10**400, "\ud800"]


@pytest.mark.parametrize("key", ["document", "tokens", "characters", "text"])
def test_a_piece_that_is_damaged_leaves_its_sample_out(run: Path, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    look(run)
    assert "a store: document 7, characters 0 to 9" in capsys.readouterr().out
    without = {name: value for name, value in PIECE.items() if name != key}
    for piece in [without, *({**PIECE, key: value} for value in STRANGE)]:
        damaged = {**SAMPLE, "pieces": [piece]}
        write(run / "bad-batch-4.jsonl", damaged)
        write(run / "events.jsonl", {**EVENT, "culprit": damaged})
        look(run)


@pytest.mark.slow
@pytest.mark.parametrize("key", [*EVENT, "store", "pieces"])
def test_an_event_that_is_damaged(run: Path, key: str) -> None:
    for value in STRANGE:
        where = SAMPLE if key in SAMPLE and key != "loss" else EVENT
        damaged = {**where, key: value}
        write(run / "bad-batch-4.jsonl", damaged if where is SAMPLE else SAMPLE)
        write(run / "events.jsonl", {**EVENT, "culprit": damaged} if where is SAMPLE else damaged)
        look(run)


@pytest.mark.parametrize("line", ['{"step": 6, "loss": 1' + "0" * 400 + "}", '{"step": 1' + "0" * 400 + ', "loss": 1}'])
def test_a_number_that_is_too_long_makes_a_line_unreadable(run: Path, line: str) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    look(run)
    assert run_data.read(run).num_unreadable == 1


@pytest.mark.parametrize("content", [b"\xff", b"a: [", b"\0", b"? !!python/object:os.system x"])
def test_a_configuration_that_is_no_yaml_is_told(run: Path, content: bytes) -> None:
    (run / "config.yaml").write_bytes(content)
    look(run)
    (note,) = run_data.read(run).notes
    assert note.startswith(f"{run / 'config.yaml'}: ")


@pytest.mark.parametrize("text", ["data:\n  path: 5\n", "train:\n  steps: many\n", "train:\n  steps: 2024-01-01\n"])
def test_a_configuration_of_other_types_is_shown_as_it_is(run: Path, text: str) -> None:
    (run / "config.yaml").write_text(text)
    look(run)


@pytest.mark.parametrize("name", ["", ".", "..", "config.yaml", "../run/config.yaml", "metrics.jsonl", 5, None, ["x"]])
def test_an_event_takes_no_other_file_along(run: Path, name: Any) -> None:
    before = {file.name for file in run.iterdir()}
    write(run / "events.jsonl", {**EVENT, "samples": name, "back_to": "2", "rollback": "1"})
    look(run)
    event_file.forget_after(run, 1, 0, print)
    assert event_file.read(run) == [] and {file.name for file in run.iterdir()} == before


def test_what_is_done_again_is_forgotten_with_its_samples_and_the_rest_set_aside(run: Path) -> None:
    write(run / "events.jsonl", EVENT, {**EVENT, "step": 2, "samples": "bad-batch-2.jsonl"})
    write(run / "bad-batch-2.jsonl", SAMPLE)
    with (run / "events.jsonl").open("a") as file:
        file.write("no event\n")
    said: list[str] = []
    event_file.forget_after(run, 3, 0, said.append)
    assert [each["step"] for each in event_file.read(run)] == [2]
    assert (run / "bad-batch-2.jsonl").exists() and not (run / "bad-batch-4.jsonl").exists()
    aside = run / "events.jsonl.bad"
    assert aside.read_text() == "no event\n"
    assert said == [f"{run / 'events.jsonl'}: 1 line that cannot be read set aside in {aside}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["texts.jsonl", "evaluations.jsonl", "nonfinite.jsonl"])
def test_other_records_that_are_damaged(run: Path, name: str) -> None:
    (whole,) = [json.loads(line) for line in (run / name).read_text().splitlines()]
    for key in whole:
        write(run / name, {other: value for other, value in whole.items() if other != key})
        look(run)
        for value in STRANGE:
            write(run / name, {**whole, key: value})
            look(run)
