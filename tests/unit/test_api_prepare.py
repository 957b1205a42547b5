"""gptworks.prepare: text to a store of tokens, for Python programs."""

import json
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.data.store import Store


def test_prepare_makes_a_store_that_training_takes(tmp_path: Path) -> None:
    texts = [f"the cat number {number} sat on the mat" for number in range(40)]
    (tmp_path / "cats.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    found = gptworks.prepare(tmp_path / "cats.jsonl", tmp_path / "cats", train_tokenizer=300, key="body")
    assert found.documents == 40 and found.eod_appended
    store = Store(tmp_path / "cats")
    first, last = store.document_starts[3:5]
    tokenizer = store.load_tokenizer()
    assert tokenizer is not None and tokenizer.decode(store.tokens[first : last - 1].tolist()) == texts[3]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "mindrecord"}, r'format="mindrecord": its rows are training samples. Needed: row_length='),
        ({"format": "papyrus"}, r"format=: no format 'papyrus'"),
        ({"workers": -1}, r"workers=: got -1"),
        ({"train_tokenizer": "chars", "append_eod": False, "key": "content"}, r"no text found"),
    ],
)
def test_prepare_says_what_is_wrong_in_keywords(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a cat"}\n')
    with pytest.raises(gptworks.GPTWorksError, match=said):
        gptworks.prepare(str(tmp_path / "a.jsonl"), tmp_path / "out", **settings)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
