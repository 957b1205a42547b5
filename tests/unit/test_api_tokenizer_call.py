"""tokenizer(text, ...): against transformers' GPT-2 tokenizer, and what it refuses."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2TokenizerFast

import gptworks as gw
from gptworks.errors import TokenizerError
from gptworks.tokenizer.bundled import gpt2_files

TEXTS = ["hello world", "I love Beijing, because it is 长城 and 🙂.", "x", "", "  two\n\nlines "]


@pytest.fixture(scope="module")
def ours() -> gw.Tokenizer:
    return gw.Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def theirs(ours: gw.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    vocab, merges = gpt2_files()
    tokenizer = GPT2TokenizerFast(vocab=str(vocab), merges=str(merges))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "right"
    return tokenizer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"padding": True},
        {"padding": "longest"},
        {"padding": "max_length", "max_length": 64},
        {"max_length": 4, "truncation": True},
        {"padding": True, "max_length": 4, "truncation": True},
        {"padding": "max_length", "max_length": 4, "truncation": True},
    ],
)
def test_lists_equal_transformers(settings: dict[str, Any], ours: gw.Tokenizer, theirs: Any) -> None:
    expected = theirs(TEXTS, **settings)
    assert ours(TEXTS, **settings) == {name: expected[name] for name in ("input_ids", "attention_mask")}
    for text in TEXTS[:3]:  # one text: rows without a list around them
        expected = theirs(text, **settings)
        assert ours(text, **settings) == {name: expected[name] for name in ("input_ids", "attention_mask")}


@pytest.mark.parametrize("text", [TEXTS, TEXTS[:1], TEXTS[0]])
@pytest.mark.parametrize("kind", ["np", "pt"])
def test_tensors_equal_transformers(text: Any, kind: str, ours: gw.Tokenizer, theirs: Any) -> None:
    settings = {"padding": "max_length", "max_length": 32, "return_tensors": kind}
    expected, got = theirs(text, **settings), ours(text, **settings)
    assert list(got) == ["input_ids", "attention_mask"]
    for name in got:
        assert type(got[name]) is (np.ndarray if kind == "np" else torch.Tensor)
        assert got[name].dtype == expected[name].dtype == (np.int64 if kind == "np" else torch.int64)
        assert got[name].tolist() == expected[name].tolist()


def test_padding_is_the_end_of_document_and_masked(small_tokenizer: gw.Tokenizer) -> None:
    rows = small_tokenizer(["Anna walked to the river", "Tom"], padding=True)
    assert rows["input_ids"][1][-1] == small_tokenizer.eod_id == 511
    for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True):
        assert all((token == 511) == (real == 0) for token, real in zip(ids, mask, strict=True))


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("hello world, hello", {"max_length": 3}, "text 1 has 4 tokens, more than max_length=3"),
        (["x", "hello world, hello"], {"max_length": 3}, "text 2 has 4 tokens"),
        ("x", {"padding": "left"}, "padding: got 'left'"),
        ("x", {"padding": "max_length"}, "padding: needs max_length"),
        ("x", {"truncation": True}, "truncation: needs max_length"),
        ("x", {"truncation": "only_first", "max_length": 3}, "truncation: got 'only_first'"),
        ("x", {"max_length": 0}, "max_length: got 0"),
        ("x", {"max_length": True}, "max_length: got True"),
        ("x", {"max_length": 2.5}, "max_length: got 2.5"),
        ("x", {"return_tensors": "ms"}, "return_tensors: got 'ms'"),
        (["x", "hello world"], {"return_tensors": "pt"}, "rows of 1 to 2 tokens"),
        ([], {"return_tensors": "np"}, "got no text"),
        (["x", 7], {}, "got 7"),
        (["x", None], {}, "text: got None"),
        (None, {}, "text: got None"),
    ],
)
def test_what_cannot_be_done_is_said(text: Any, settings: dict[str, Any], said: str, ours: gw.Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=said):
        ours(text, **settings)


def test_without_an_end_of_document_there_is_nothing_to_pad_with(small_tokenizer: gw.Tokenizer) -> None:
    import copy

    without = copy.copy(small_tokenizer)
    without.eod_id = None
    assert without(["Tom", "Anna"], padding=False)["input_ids"]
    with pytest.raises(TokenizerError, match="padding=True: this tokenizer has no end-of-document token"):
        without(["Tom", "Anna walked"], padding=True)
