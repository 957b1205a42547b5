"""Scores of rows against logits looked at one by one, records that go on, documents of a store."""

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from gptworks.checkpoint.pretrained import Pretrained
from gptworks.config.schema import DataConfig, InitConfig, ModelConfig
from gptworks.data.dataset import Dataset
from gptworks.errors import DataError
from gptworks.evaluate import identity, scoring
from gptworks.evaluate.documents import StoreDocuments, score_documents
from gptworks.evaluate.progress import Bar, PaddleLines, Watcher
from gptworks.evaluate.records import Records
from gptworks.evaluate.rows import Row, Score
from gptworks.evaluate.scoring import score_all
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> GPT:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 520, "max_positions": 32}
    cfg = ModelConfig.model_validate(shape | {"dropout_hidden": 0.5})
    return build_gpt(cfg, World(CPU), torch.float32, FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=1)).eval()


def rows_of(model: GPT, count: int = 23) -> list[Row]:
    """Of different lengths; every other one ends with what the model finds likeliest, some but for one token."""
    generator = np.random.default_rng(0)
    rows = []
    for number in range(count):
        length = int(generator.integers(3, 33))
        tokens = generator.integers(0, 520, length)
        first = int(generator.integers(1, length))
        if number % 2:
            for place in range(first, length):
                tokens[place] = int(model(torch.tensor(tokens[None, :place]))[0, -1].argmax())
        if number % 4 == 3 and length - first > 1:
            tokens[-1] = (tokens[-1] + 1) % 520
        rows.append(Row(tokens, first))
    return rows


@torch.no_grad()
def by_hand(model: GPT, row: Row) -> Score:
    total, greedy = 0.0, True
    for place in range(row.first, len(row.tokens)):
        logits = model(torch.tensor(row.tokens[None, :place]))[0, -1].double()
        total += logits.log_softmax(-1)[row.tokens[place]].item()
        greedy &= int(logits.argmax()) == row.tokens[place]
    return Score(total, greedy, row.num_scored)


@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_scores_equal_logits_looked_at_one_by_one(model: GPT, batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "CHUNK_ELEMENTS", 520 * 7)  # so that rows are cut
    rows = rows_of(model)
    got = score_all(model, rows, batch_size=batch_size)
    expected = [by_hand(model, row) for row in rows]
    assert [each.tokens for each in got] == [each.tokens for each in expected]
    assert [each.greedy for each in got] == [each.greedy for each in expected]
    assert {each.greedy for each in got} == {True, False}
    for one, other in zip(got, expected, strict=True):
        assert one.log_probability == pytest.approx(other.log_probability, abs=1e-4)


def test_dropout_is_off_and_mode_and_loss_come_back(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(model, 3)
    expected = score_all(model, rows)
    loss = model.loss_sum
    model.train()
    assert score_all(model, rows) == expected
    assert model.training and model.loss_sum is loss
    monkeypatch.setattr(scoring._TokenScores, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        score_all(model, rows)
    assert model.training and model.loss_sum is loss
    model.eval()


@pytest.mark.parametrize(
    ("tokens", "first", "said"),
    [
        ([1, 2, 3], 0, "row 0: 3 tokens, scored from number 0 on"),
        ([1, 2, 3], 3, "scored from number 3 on"),
        ([1] * 34, 1, "row 0: 34 tokens, but the model's context is 32"),
        ([1, 520], 1, "token id 520 is outside the model's vocabulary of 520"),
        ([1, -2], 1, "token id -2 is outside"),
    ],
)
def test_rows_that_cannot_be_scored(tokens: list[int], first: int, said: str, model: GPT) -> None:
    with pytest.raises(DataError, match=said):
        score_all(model, [Row(np.array(tokens), first)])


# Records


HEADER = {"task": "lambada", "data_sha256": "d" * 64, "weights_sha256": "w" * 64}


class Interrupt(Watcher):
    def __init__(self, after: int) -> None:
        self.left, self.batches = after, 0

    def batch(self, items: int, scores: list[Score]) -> None:
        self.batches += 1
        if self.batches == self.left:
            raise KeyboardInterrupt


def run(model: GPT, rows: list[Row], file: Path | None, watcher: Watcher, **header: object) -> list[Score]:
    with Records(file, {**HEADER, **header}, len(rows)) as records:
        documents = [[row] for row in rows]
        return score_documents(model, documents, records, batch_size=4, watcher=watcher, name="x")


def test_an_interrupted_evaluation_goes_on(model: GPT, tmp_path: Path) -> None:
    rows, file = rows_of(model), tmp_path / "out.jsonl"
    expected = run(model, rows, None, Watcher())
    with pytest.raises(KeyboardInterrupt):
        run(model, rows, file, Interrupt(2))
    with file.open("a") as opened:
        opened.write('{"index": 5, "log_pro')  # torn in the middle of a line
    assert len(file.read_text().splitlines()) == 1 + 8 + 1
    rest = Interrupt(100)
    assert run(model, rows, file, rest) == pytest.approx(expected)
    assert rest.batches == 4, "15 of 23 were left"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert lines[0]["format"] == "gptworks-evaluation" and lines[0]["total"] == 23
    assert [line["index"] for line in lines[1:]] == list(range(23)), "in the order of the data at last"
    nothing_left = Interrupt(1)
    again = run(model, rows, file, nothing_left)
    assert nothing_left.batches == 0
    assert [score.log_probability for score in again] == [line["log_probability"] for line in lines[1:]]


def test_a_file_of_something_else_is_left_alone(model: GPT, tmp_path: Path) -> None:
    rows, file = rows_of(model, 3), tmp_path / "out.jsonl"
    run(model, rows, file, Watcher())
    before = file.read_bytes()
    with pytest.raises(DataError, match=r"was written with weights_sha256 wwwwwwwwwwww\.\.\., now vvvv") as caught:
        run(model, rows, file, Watcher(), weights_sha256="v" * 64)
    assert str(file) in str(caught.value)
    with pytest.raises(DataError, match="was written with total 3, now 2"):
        run(model, rows[:2], file, Watcher())
    assert file.read_bytes() == before
    for content in (b"precious\n", b"[1]\n", b'{"format": "other"}\n'):
        file.write_bytes(content)
        with pytest.raises(DataError, match="exists, but not as an evaluation of gptworks"):
            run(model, rows, file, Watcher())
        assert file.read_bytes() == content
    for line, said in [(b"what?", "damaged at b'what"), (b'{"index": 99}', "has number 99 of 3"), (b"[]", "damaged")]:
        file.write_bytes(before + line + b"\n")
        with pytest.raises(DataError, match=said):
            run(model, rows, file, Watcher())
    with pytest.raises(DataError, match="is not a folder"):
        run(model, rows, tmp_path / "nowhere" / "out.jsonl", Watcher())


# Documents of a store


@pytest.mark.slow
def test_documents_of_a_store_each_by_itself(
    model: GPT, small_store: Path, small_tokenizer: Any, corpus_file: Path
) -> None:
    cfg = DataConfig.model_validate({"path": str(small_store), "seq_len": 32, "split": "120,30,10"})
    (found,) = Dataset(cfg, vocab_size=520).documents("held_out")
    assert found[1] == range(120, 150)
    documents = StoreDocuments(*found, 32)
    with Records(None, {}, len(documents)) as records:
        got = score_documents(model, documents, records, batch_size=7, watcher=Watcher(), name="x")
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")[120:150]
    for text, one in zip(texts, got, strict=True):
        ids = np.array([*small_tokenizer.encode(text), 511])
        pieces = [Row(ids[begin : begin + 33], 1) for begin in range(0, len(ids) - 1, 32)]
        assert one.tokens == len(ids) - 1
        assert one.log_probability == pytest.approx(sum(by_hand(model, p).log_probability for p in pieces), abs=1e-3)


def test_paddle_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = PaddleLines("number correct", every=2)
    lines.begin("x", 9, 0)
    for _ in range(5):
        lines.batch(0, [Score(-1.0, True, 1), Score(-1.0, False, 1)])
    import re

    shape = (
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[    INFO\] - step (\d), batch: \1, number correct: (\d)\.000000, "
    )
    found = [re.fullmatch(shape + r"speed: \d+\.\d\d step/s", line) for line in capsys.readouterr().out.splitlines()]
    assert [(match[1], match[2]) for match in found if match] == [("0", "1"), ("2", "3"), ("4", "5")]


def test_a_bar_counts_documents(model: GPT, capsys: pytest.CaptureFixture[str]) -> None:
    bar, rows = Bar(), rows_of(model, 9)
    for _ in range(2):  # one after the other, as with several models
        run(model, rows, None, bar)
        assert not bar.bar.tasks and not bar.bar.live.is_started
    with pytest.raises(DataError):
        run(model, [Row(np.array([1, 999]), 1)], None, bar)
    assert not bar.bar.live.is_started
    assert capsys.readouterr().out == ""


# Hashes


def test_hashes_of_weights(tmp_path: Path) -> None:
    import hashlib

    def of(folder: Path) -> str:
        files = [file for file in folder.rglob("*") if file.is_file()]
        return identity.of_weights(Pretrained(folder, ModelConfig(), cast(Any, None), None, files))

    for name, files in {
        "one": {"model.safetensors": b"a"},
        "bin": {"pytorch_model.bin": b"b"},
        "shards": {"model-1.safetensors": b"a", "model-2.safetensors": b"b"},
        "swapped": {"model-1.safetensors": b"b", "model-2.safetensors": b"a"},
        "state": {"state/0.distcp": b"a", "state/.metadata": b"b"},
    }.items():
        for file, content in files.items():
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_bytes(content)
    assert of(tmp_path / "one") == hashlib.sha256(b"a").hexdigest()
    assert of(tmp_path / "bin") == hashlib.sha256(b"b").hexdigest()
    assert len({of(tmp_path / name) for name in ("one", "bin", "shards", "swapped", "state")}) == 5
