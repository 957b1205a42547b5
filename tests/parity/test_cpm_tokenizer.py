"""Ids of Chinese text, and text of ids, against PaddleNLP's GPTChineseTokenizer (fixtures/cpm/make_cpm_ids.py)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from gptworks.tokenizer import Tokenizer

pytest.importorskip("sentencepiece", reason="sentencepiece (extra interop) is not installed")
pytest.importorskip("jieba", reason="jieba (extra interop) is not installed")

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures" / "cpm" / "ids.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def cpm(shared_data: Path) -> Tokenizer:
    file = shared_data / "vocab" / "cpm-zh" / "chinese_vocab.model"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == RECORDED["model_sha256"]
    return Tokenizer.from_pretrained(file)


@pytest.mark.parametrize("recorded", RECORDED["texts"], ids=lambda recorded: recorded["name"])
def test_ids_and_text_equal_paddlenlp(recorded: dict[str, Any], cpm: Tokenizer) -> None:
    assert cpm.encode(recorded["text"]) == recorded["ids"]
    assert cpm.decode(recorded["ids"]) == recorded["decoded"]


def test_a_batch_equals_paddlenlp(cpm: Tokenizer) -> None:
    texts = RECORDED["texts"]
    assert len(texts) > 40
    assert cpm.encode_batch([text["text"] for text in texts]) == [text["ids"] for text in texts]


@pytest.mark.parametrize("recorded", RECORDED["ids_alone"], ids=lambda recorded: str(recorded["ids"]))
def test_text_of_ids_that_no_text_gives_equals_paddlenlp(recorded: dict[str, Any], cpm: Tokenizer) -> None:
    assert cpm.decode(recorded["ids"]) == recorded["decoded"]


def test_vocabulary_equals_paddlenlp_and_the_published_list(cpm: Tokenizer, shared_data: Path) -> None:
    assert (cpm.vocab_size, cpm.eod_id, cpm.eod_token) == (RECORDED["vocab_size"], RECORDED["eod_id"], "<eod>")
    published = json.loads((shared_data / "vocab" / "cpm-zh" / "vocab.json").read_text(encoding="utf-8"))
    assert cpm._vocabulary() == published
    assert published["\u2583"] == RECORDED["eol_id"]


def test_the_published_folder_is_read(cpm: Tokenizer, shared_data: Path) -> None:
    assert Tokenizer.from_pretrained(shared_data / "vocab" / "cpm-zh").identity == cpm.identity
