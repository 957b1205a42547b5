"""WikiText: each rule of the detokenizer by itself, the windows by counting, the formulas by hand."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.errors import DataError, UsageError
from gptworks.evaluate.rows import Score
from gptworks.evaluate.tasks import wikitext


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("the boys ' room", "the boys' room"),
        ("of /' 9/ , not ' 98 .", "of /'[0-9]/, not' 98 ."),  # the rule that is written with slashes
        ("state @-@ of @-@ the @-@ art", "state-of-the-art"),
        ("1 @,@ 234 @.@ 5", "1,234.5"),
        ("one : two ; three . four ! five ? six , seven", "one: two; three. four! five? six, seven"),
        ("the end .", "the end ."),  # only between two spaces
        ("a ( b c ) d", "a (b c) d"),
        ("a [ b ] { c } d", "a [b] {c} d"),
        ("(  ) ( ( a ) )", "() (( a) )"),  # the first opening sign pairs with the first closing one
        ('he said " yes " and " no "', 'he said "yes" and "no"'),
        ('one " two three', 'one " two three'),  # no pair
        ("she ' quoted ' him", "she 'quoted' him"),
        ('odd " line\n two " end', 'odd "line\ntwo" end'),  # pairs reach across lines
        ("= = = = Deep = = = =", "==== Deep ===="),
        ("= = = Low = = =", "=== Low ==="),
        ("= = Heading = =", "== Heading =="),
        ("= Title =", "= Title ="),
        ("20 ° C", "20°C"),
        (" \n = Title = \n \n Text", "\n= Title =\n\nText"),
        ("about N people", "about 1 people"),
        ("Anna 's", "Anna's"),
    ],
)
def test_each_rule_of_the_detokenizer(before: str, after: str) -> None:
    assert wikitext.detokenize(before) == after


def test_the_order_of_the_rules_matters() -> None:
    assert wikitext.detokenize("boys 's") == "boys's", "joined by the first rule; the last has nothing left to do"
    assert wikitext.detokenize("( a , b )") == "(a, b)"
    assert wikitext.detokenize('" a . " b') == '"a." b', "the sign moves first, then the quotes are trimmed"


@pytest.mark.time_limit(120)
def test_text_of_unpaired_signs_comes_to_an_end() -> None:
    """Looking for the other half of each would take hours."""
    found = wikitext.detokenize("( " * 300_000 + "[ " * 300_000)
    assert found.count("(") == found.count("[") == 300_000


HASHES = {  # made with the function of lm-evaluation-harness 0.4.13, which is Megatron's
    "wiki.valid.tokens": "690623f8b014db8936214a63f29caee6503f4b9a21f0e883957c278868a9be34",
    "wiki.test.tokens": "f7a499621c56efe6af6dfcf0000730cb19f60063656a277e0dc881c165d6c397",
    "wiki.test.raw": "9971cc81cf2e5429c48844a0e64b1b32f333486d28d9407a17f76aad3e1b761a",
}


@pytest.mark.parametrize("name", HASHES)
def test_the_detokenizer_on_real_files(name: str, shared_data: Path) -> None:
    import hashlib

    text = (shared_data / "corpora" / "wikitext-2" / name).read_bytes().decode()
    assert hashlib.sha256(wikitext.detokenize(text).encode()).hexdigest() == HASHES[name]


# Windows


@given(st.integers(2, 200), st.integers(1, 40), st.data())
def test_every_token_but_the_first_is_scored_once(num_tokens: int, length: int, data: Any) -> None:
    overlap = data.draw(st.integers(1, length))
    stream = np.arange(num_tokens)
    rows = wikitext.window_rows(stream, length, overlap)
    scored = [token for row in rows for token in row.tokens[row.first :].tolist()]
    assert scored == list(range(1, num_tokens))
    for number, row in enumerate(rows):
        assert row.tokens[0] == number * overlap
        assert len(row.tokens) <= length + 1
        assert row.num_scored <= (length if number == 0 else overlap)
        assert number == 0 or row.first == length - overlap + 1


def test_windows_by_hand() -> None:
    rows = wikitext.window_rows(np.arange(10), 4, 2)
    assert [(row.tokens.tolist(), row.first) for row in rows] == [
        ([0, 1, 2, 3, 4], 1),
        ([2, 3, 4, 5, 6], 3),
        ([4, 5, 6, 7, 8], 3),
        ([6, 7, 8, 9], 3),
    ]
    assert wikitext.num_windows(10, 2) == 5, "the last would have padding only"


@pytest.mark.parametrize("overlap", [0, -3, 17])
def test_overlaps_that_are_none(overlap: int) -> None:
    with pytest.raises(UsageError, match=f"--overlap: got {overlap}; needs 1 to 16"):
        wikitext.window_rows(np.arange(100), 16, overlap)


# Formulas


def test_formulas(small_tokenizer: Any, tmp_path: Path) -> None:
    text = " = Title = \n\n The boys ' room , 1 @,@ 000 m . \n"
    file = tmp_path / "wiki.tokens"
    file.write_text(text)
    stream = wikitext.read_stream(file, small_tokenizer)
    assert stream.num_original == len(text.strip().split(" ")) == 14
    assert stream.tokens.tolist() == small_tokenizer.encode(" = Title =\n\nThe boys' room, 1,000 m.\n")
    rows = wikitext.window_rows(stream.tokens, 8, 4)
    scores = [Score(-2.0 * row.num_scored, False, row.num_scored) for row in rows]
    got = wikitext.summarize(stream, rows, scores, small_tokenizer.byte_lengths)
    ratio = (len(stream.tokens) - 1) / 13
    assert (got.tokens, got.loss, got.token_ratio) == (len(stream.tokens) - 1, 2.0, ratio)
    assert got.perplexity == pytest.approx(math.exp(2.0))
    assert got.adjusted_perplexity == pytest.approx(math.exp(2.0 * ratio))
    scored_text = small_tokenizer.decode(stream.tokens[1:])
    assert got.text_bytes == len(scored_text.encode())
    assert got.bits_per_byte == pytest.approx(2.0 * got.tokens / math.log(2) / len(scored_text.encode()))
    hopeless = wikitext.WikiText(nats=100.0, tokens=4, windows=1, token_ratio=1.5, text_bytes=None)
    assert (hopeless.perplexity, hopeless.bits_per_byte) == (math.exp(20), None)


def test_text_as_it_is(small_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "wiki.raw"
    file.write_bytes(b"one , two \r\n three")
    stream = wikitext.read_stream(file, small_tokenizer, "as-is")
    assert small_tokenizer.decode(stream.tokens) == "one , two \r\n three"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "empty. Needed"), (b"\xff\xfeab", "not UTF-8 at byte 0"), (None, "cannot be read")],
)
def test_files_that_are_no_text(content: bytes | None, said: str, small_tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "wiki.tokens"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=said) as caught:
        wikitext.read_stream(file, small_tokenizer)
    assert str(file) in str(caught.value)


def test_the_protocol_is_named() -> None:
    assert wikitext.protocol_name("detokenized", 32) == "wikitext, sliding window, overlap 32, detokenized (Megatron)"
    assert wikitext.protocol_name("as-is", None) == "wikitext, windows side by side, text as it is"
