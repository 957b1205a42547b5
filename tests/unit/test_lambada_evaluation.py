"""LAMBADA: what each protocol asks for, and files that are no LAMBADA."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gptworks.errors import DataError, UsageError
from gptworks.evaluate.rows import Score
from gptworks.evaluate.tasks import lambada
from gptworks.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


def asked(protocol: str, text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    question = lambada.PROTOCOLS[protocol].ask(text, tokenizer)
    return tokenizer.decode(question.context), tokenizer.decode(question.target)


@pytest.mark.parametrize(
    ("text", "strict", "harness"),
    [
        ("I saw the gloves", ("I saw the", " gloves"), ("I saw the", " gloves")),
        ("with the\ngloves", ("with the", " gloves"), ("with", " the\ngloves")),
        ("some kind of\n\nPower", ("some kind of", " Power"), ("some kind", " of\n\nPower")),
        # The last occurrence of the word, wherever it stands.
        ("an ant and an ant ", ("an ant and an", " ant"), ("an ant and an ant", " ")),
        ("two  spaces", ("two", " spaces"), ("two", "  spaces")),
    ],
)
def test_what_is_asked(text: str, strict: tuple[str, str], harness: tuple[str, str], gpt2: Tokenizer) -> None:
    assert asked("strict", text, gpt2) == strict
    assert asked("openai", text, gpt2) == harness
    assert asked("standard", text, gpt2) == harness


def test_the_last_token_only(gpt2: Tokenizer) -> None:
    text = "She bought a statuette"
    ids = gpt2.encode(text)
    assert len(gpt2.encode(" statuette")) > 1
    question = lambada.PROTOCOLS["last-token"].ask(text, gpt2)
    assert (question.context, question.target) == (ids[:-1], ids[-1:])


def test_a_word_without_context(gpt2: Tokenizer) -> None:
    question = lambada.encode_pair("", " Power", gpt2)
    assert (question.context, question.target) == ([gpt2.eod_id], gpt2.encode(" Power"))
    again = lambada.encode_pair("", "<|endoftext|> Power", gpt2)
    assert again == question, "the end of a document is not put before itself"
    assert lambada.encode_pair(" \n", " Power", gpt2).target == gpt2.encode(" \n Power")
    with pytest.raises(DataError, match="passage 1 is 'Power', which leaves nothing before its last word"):
        lambada.rows_of(["Power"], gpt2, lambada.PROTOCOLS["strict"], 64)


def test_passages_longer_than_the_context(gpt2: Tokenizer) -> None:
    text = "one two three four five six"
    ids = gpt2.encode(text)
    with pytest.raises(DataError, match="passage 2 has 6 tokens, but the model's context is 4, and --protocol strict"):
        lambada.rows_of(["one two", text], gpt2, lambada.PROTOCOLS["strict"], 4)
    questions = lambada.rows_of(["one two", text], gpt2, lambada.PROTOCOLS["openai"], 4)
    assert questions.shortened == 1
    assert (questions.rows[1].tokens.tolist(), questions.rows[1].first) == (ids[-5:], 4)
    assert lambada.rows_of([text], gpt2, lambada.PROTOCOLS["strict"], 5).shortened == 0, "5 tokens predict the sixth"
    with pytest.raises(DataError, match="the model's context is 1"):
        lambada.rows_of(["a statuette"], gpt2, lambada.PROTOCOLS["openai"], 1)


def test_an_unknown_protocol_lists_the_known() -> None:
    with pytest.raises(UsageError, match=r"none called 'strickt'\. Protocols: strict, last-token, openai, standard"):
        lambada.TASK.protocol("strickt")


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "no passage in it"),
        (["", "  "], "no passage in it"),
        (['{"text": "one two"}', '{"text": "one'], 'line 2: not JSON .*: \'{"text": "one\''),
        (['["one two"]'], r"line 1: holds '\[\"one two\"\]', needed a JSON object"),
        (['{"txt": "one two", "id": 3}'], "line 1: has no 'text'; its keys: txt, id"),
        (["{}"], "its keys: none"),
        (['{"text": 7}'], "'text' is 7, needed a passage"),
        (['{"text": " "}'], "'text' is \" \", needed a passage"),
        (["[" * 100_000], "line 1: not JSON"),
    ],
)
def test_files_that_are_no_lambada(lines: list[str], said: str, tmp_path: Path) -> None:
    file = tmp_path / "lambada.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(DataError, match=said) as caught:
        lambada.read_passages(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < 400


def test_reading_and_limits(tmp_path: Path) -> None:
    file = tmp_path / "lambada.jsonl"
    file.write_text("\n\n".join(json.dumps({"text": f"word {n}"}) for n in range(5)))
    assert lambada.read_passages(file) == [f"word {n}" for n in range(5)]
    assert lambada.read_passages(file, 2) == ["word 0", "word 1"]
    file.write_bytes(b"\xff\n")
    with pytest.raises(DataError, match="not UTF-8"):
        lambada.read_passages(file)
    with pytest.raises(DataError, match="cannot be read"):
        lambada.read_passages(tmp_path)


def test_sums() -> None:
    got = lambada.summarize([Score(-1.0, True, 1), Score(-2.0, False, 2), Score(-6.0, False, 1)], 1)
    assert (got.correct, got.total, got.accuracy, got.shortened) == (1, 3, pytest.approx(1 / 3), 1)
    assert got.target_perplexity == pytest.approx(math.exp(3.0))
    assert lambada.summarize([Score(-1e6, False, 1)]).target_perplexity == math.inf


def test_remarks_on_the_data(small_tokenizer: Any) -> None:
    known = lambada.PROTOCOLS
    assert "capital letters" in str(lambada.remark_on(known["standard"], ["One two"]))
    assert "no capital letters" in str(lambada.remark_on(known["openai"], ["one two"]))
    assert lambada.remark_on(known["standard"], ["one two"]) is lambada.remark_on(known["strict"], ["One"]) is None
