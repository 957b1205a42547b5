"""gptworks prepare: a vocabulary of characters, tables, folders of Hugging Face `datasets`."""

import json
from pathlib import Path
from typing import Any


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
