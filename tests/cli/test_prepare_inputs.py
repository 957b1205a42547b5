"""gptworks prepare: a vocabulary of characters, tables, folders of Hugging Face `datasets`."""

import json
import re
from pathlib import Path
from typing import Any

import pytest


def test_characters_on_the_command_line(tmp_path: Path, call: Any) -> None:
    (tmp_path / "a.txt").write_text("abc\n\nab", encoding="utf-8")
    said = call("prepare", tmp_path / "a.txt", "--train-tokenizer", "chars", "--out", tmp_path / "s", "--json")
    assert json.loads(said.out)["vocab_size"] == 4
    said = call(
        "prepare", tmp_path / "a.txt", "--train-tokenizer", "chars", "--append-eod", "--out", tmp_path / "t", "--json"
    )
    assert json.loads(said.out)["vocab_size"] == 4, "a, b, c and the end of document: the blank line is no text"
    wrong = call("prepare", tmp_path / "a.txt", "--train-tokenizer", "letters", "--out", tmp_path / "u", expect=2)
    assert "got 'letters'; needs a number of tokens, such as 4096, or chars" in wrong.err


SHAPE = [
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.vocab_size=400",
    "model.max_positions=16",
    "batch.global_size=2",
    "run.device=cpu",
]


def table(folder: Path, rows: int = 40) -> Path:
    lines = [f'{n},"Take {n} onions, cut them.\nCook for {n} minutes."\n' for n in range(rows)]
    (folder / "recipes.csv").write_text("n,text\n" + "".join(lines), encoding="utf-8")
    return folder / "recipes.csv"


def test_raw_text_is_trained_on_evaluated_and_written(tmp_path: Path, call: Any, monkeypatch: Any) -> None:
    """A newcomer's three commands: no store is ever named."""
    monkeypatch.chdir(tmp_path)
    table(tmp_path)
    looked = call("train", *SHAPE, "data.path=recipes.csv", "train.steps=4", "--out", "run", "--dry-run").out
    assert "samples          " in looked and sorted(path.name for path in tmp_path.iterdir()) == ["recipes.csv"]
    said = call("train", *SHAPE, "data.path=recipes.csv", "data.split=80,20", "train.steps=4", "--out", "run").out
    assert "data:  recipes.csv is text: 40 documents" in said and "prepared as run/.inputs/recipes" in said
    result = json.loads(call("eval", "--model", "run", "--json", "--device", "cpu").out)
    named = call("eval", "--model", "run", "--data", "run/.inputs/recipes", "--json", "--device", "cpu").out
    assert result["rows"] == json.loads(named)["rows"] and result["split"] == "held-out"
    text = call("generate", "--model", "run", "--prompt", "Take", "--max-new-tokens", "4", "--device", "cpu").out
    assert text.startswith("Take")
    # Going on, with the same words and with the configuration of the run; the text is not prepared again.
    before = (tmp_path / "run/.inputs/recipes.bin").stat().st_mtime_ns
    more = ["train.steps=6", "--resume", "auto"]
    call("train", *SHAPE, "data.path=recipes.csv", "data.split=80,20", "--out", "run", *more)
    call("train", "-c", "run/config.yaml", "train.steps=8", "--resume", "auto")
    assert (tmp_path / "run/.inputs/recipes.bin").stat().st_mtime_ns == before
    table(tmp_path, rows=50)
    told = call("train", *SHAPE, "data.path=recipes.csv", "data.split=80,20", "--out", "run", *more, expect=2).err
    assert "recipes.csv has changed since this run prepared it as run/.inputs/recipes" in told
    told = call("eval", "--model", "run", "--task", "lambada", expect=2).err
    assert "--data: not given. Needed: the file of --task lambada" in told


@pytest.mark.slow
def test_the_tokenizer_of_raw_text(tmp_path: Path, call: Any, monkeypatch: Any) -> None:
    from gptworks.data.store import Store

    monkeypatch.chdir(tmp_path)
    table(tmp_path)

    def tokenizer(out: str, *words: str) -> Any:
        call("train", *SHAPE, "data.path=recipes.csv", "train.steps=1", "--out", out, *words)
        return Store(f"{out}/.inputs/recipes").load_tokenizer()

    learned, letters = tokenizer("a"), tokenizer("b", "data.tokenizer=chars")
    assert learned.vocab_size <= 400 and letters.vocab_size < 40 and letters.eod_id is not None
    assert tokenizer("c", "model.vocab_size=50257").name == "gpt2"
    assert tokenizer("f", "data.key=n", "data.tokenizer=chars", "data.seq_len=4").vocab_size == 11
    assert tokenizer("d", "data.tokenizer=a/.inputs/recipes.tokenizer.json").identity == learned.identity
    assert tokenizer("e", "init.checkpoint=b", "model.vocab_size=400").identity == letters.identity


def test_raw_text_that_is_refused(tmp_path: Path, call: Any, monkeypatch: Any) -> None:
    from gptworks.train import text_inputs

    monkeypatch.chdir(tmp_path)
    table(tmp_path)
    (tmp_path / "other.csv").write_text("n,body\n1,a\n", encoding="utf-8")
    told = call("train", *SHAPE, "data.path=other.csv", "train.steps=1", "--out", "a", expect=2).err
    assert "other.csv:1: no column 'text'. Columns: n, body. Choose one with data.key=NAME, or several" in told
    assert "`gptworks prepare other.csv --key NAME --train-tokenizer 400 --append-eod --out data/other`" in told
    monkeypatch.setattr(text_inputs, "MOST_BYTES", 1000)
    told = call("train", *SHAPE, "data.path=recipes.csv", "train.steps=1", "--out", "b", expect=2).err
    assert "recipes.csv is 0 MB of text; up to 0 MB are prepared on the way" in told and "gptworks prepare" in told
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    told = call("train", *SHAPE, "data.path=recipes.csv", "train.steps=1", "--out", "mine", expect=2).err
    assert "mine: not empty (thesis.txt)" in told
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    assert not (tmp_path / "a" / ".inputs").exists() or not any((tmp_path / "a" / ".inputs").iterdir())


def test_a_table_and_a_folder_of_datasets_become_stores(tmp_path: Path, call: Any) -> None:
    folder = Path(__file__).parents[1] / "fixtures" / "hf_datasets" / "splits"
    said = call("prepare", folder, table(tmp_path), "--append-eod", "--out", tmp_path / "s", "--json")
    assert json.loads(said.out)["documents"] == 48 and "the split train is read, and not test" in said.out
    said = call("prepare", table(tmp_path), "--key", "n", "--append-eod", "--out", tmp_path / "n", "--json")
    assert json.loads(said.out)["documents"] == 40
    told = call("prepare", table(tmp_path), "--key", "body", "--out", tmp_path / "t", expect=2).err
    assert "recipes.csv:1: no column 'body'. Columns: n, text. Choose one with --key, or several" in told


@pytest.mark.parametrize("page", ["prepare.md", "prepare.zh.md"])
def test_bad_lines_are_answered_as_the_page_shows(page: str, tmp_path: Path, call: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = Path(__file__, "../../../docs/howto", page).resolve().read_text(encoding="utf-8")
    shown = re.search(r"```\n(skipped rough.*?)```", text, re.DOTALL)
    assert shown
    Path("rough.jsonl").write_text('{"text": "A good line."}\nnot JSON\n{"body": "no text here"}\n')
    assert call("prepare", "rough.jsonl", "--append-eod", "--out", "data/rough").err == shown[1]
    begin = re.search(r"\| (key 'text' .*?): \.\.\. \|", text)
    assert begin and begin[1] in shown[1], "the table below has the same words"
