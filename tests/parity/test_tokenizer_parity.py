"""Ids against tiktoken and transformers, which share no vocabulary reader with us."""

import base64
import json
import shutil
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, GPT2TokenizerFast

from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.bundled import gpt2_files

# GPT-2's published pattern.
PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""

TEXTS = {
    "empty": "",
    "English": "The quick brown fox jumps over the lazy dog. It wasn't there at 10:45 a.m.!",
    "contractions": "I'm you're he's we'll they've she'd isn't I'M YOU'RE DON'T ' 's 't''re 'RE x's",
    "curly quotes": "I’m “sure” it’s… fine — really",
    "Chinese": "生活的真谛是什么?我们在北京,天气很好。《红楼梦》第一回",
    "Japanese and Korean": "こんにちは世界 カタカナ 안녕하세요",
    "Arabic and Hebrew": "مرحبا بالعالم שלום עולם",
    "Hindi and Thai": "नमस्ते दुनिया สวัสดีปี",
    "emoji": "😊👍🏽👨‍👩‍👧‍👦🇩🇪 ❤️ done 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "whitespace runs": "a  b   c    d\n\n\n e\t\tf \n \t g   ",
    "only spaces": "          ",
    "only newlines": "\n\n\r\n\r\n\n",
    "odd spaces": "a\u00a0b\u2003c\u3000d\u200be\u2028f\u0085g\u1680h",
    "control characters": "a\x00b\x01c\x07\x1b[31mred\x1b[0m\x7f\x80\x9f",
    "combining": "é vs é, Å, ﬁ, n̈, Z̷̢a̶l̴g̸o̷",
    "numbers": "3.14159 1,000,000 1e-5 ½ ² ⅷ ٣ 一二三 0x1F",
    "code": "def f(x):\n    return {'a': [x ** 2 for x in range(10)]}  # done\n",
    "punctuation": "!!! ... ??? --- === <<<>>> @#$%^&*() ~`|\\/ ¿¡ «»",
    "unassigned and private": "\ue000\uf8ff\U000f0000\ufffd\uffff\U0010ffff",
    "end of document": "one<|endoftext|>two <|endoftext|> three<|endoftext|><|endoftext|>",
    "almost end of document": "<|endoftext|<|endoftext >|endoftext|> <|ENDOFTEXT|>",
    "long word": "a" * 3000 + "ß" * 1000,
    "url": "https://example.org/a_b?c=d&e=%20f#g user@example.org",
}


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    """tiktoken's own BPE over GPT-2's bytes, built from the file without going through our code or `tokenizers`."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    to_byte = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    vocab = json.loads(gpt2_files()[0].read_text(encoding="utf-8"))
    eod = vocab.pop("<|endoftext|>")
    ranks = {bytes(to_byte[letter] for letter in token): rank for token, rank in vocab.items()}
    return tiktoken.Encoding(
        "gpt2-bundled", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": eod}
    )


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> GPT2TokenizerFast:
    folder = tmp_path_factory.mktemp("gpt2")
    for file, name in zip(gpt2_files(), ("vocab.json", "merges.txt"), strict=True):
        shutil.copy(file, folder / name)
    return GPT2TokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("name", TEXTS)
def test_ids_equal_tiktoken_and_transformers(name, ours: Tokenizer, reference, hugging_face) -> None:
    text = TEXTS[name]
    ids = ours.encode(text)
    assert ids == reference.encode(text, allowed_special="all")
    assert ids == hugging_face(text)["input_ids"]
    assert ours.decode(ids) == text == reference.decode(ids)


@hypothesis_settings(max_examples=4 * hypothesis_settings().max_examples)
@given(
    st.text(st.characters(codec="utf-8"), max_size=60)
    | st.text("ab'sStTdDmMreRElLvV \t\n\r19.!é中😊\u00a0\u3000", max_size=60)
)
def test_ids_equal_tiktoken_on_any_text(ours: Tokenizer, reference, text: str) -> None:
    assert ours.encode(text) == reference.encode(text, allowed_special="all")


def test_bytes_per_token_equal_tiktoken(ours: Tokenizer, reference) -> None:
    lengths = [len(reference.decode_single_token_bytes(i)) for i in range(50256)]
    assert ours.byte_lengths[:50256].tolist() == lengths


def test_ranks_equal_the_published_ones(reference, shared_data: Path) -> None:
    lines = (shared_data / "vocab" / "gpt2" / "gpt2.tiktoken").read_bytes().splitlines()
    published = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    assert len(published) == 50256
    assert all(reference.encode_single_token(token) == rank for token, rank in published.items())


def test_ids_equal_the_recorded_ones(ours: Tokenizer, shared_data: Path) -> None:
    recorded = json.loads((shared_data / "fixtures" / "tokenizer-parity" / "hf_gpt2_integration.json").read_text())
    assert len(recorded["ids"]) > 50
    assert ours.encode(recorded["text"]) == recorded["ids"]


@pytest.mark.parametrize(
    "file",
    [
        "corpora/zh/fortunes-tang300.txt",
        "corpora/wikitext-2/wiki.test.raw",
        "corpora/tinyshakespeare/input.txt",
        "corpora/zh/debian-reference.zh-cn.txt",
    ],
)
def test_ids_equal_tiktoken_on_real_text(file: str, ours: Tokenizer, reference, shared_data: Path) -> None:
    text = (shared_data / file).read_text(encoding="utf-8")[:60_000]
    assert ours.encode(text) == reference.encode(text, allowed_special="all")


def test_saved_tokenizer_is_read_by_transformers(ours: Tokenizer, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (ours, small_tokenizer):
        folder = tmp_path / tokenizer.name
        tokenizer.save(folder)
        theirs = AutoTokenizer.from_pretrained(folder)
        assert (len(theirs), theirs.eos_token_id) == (tokenizer.vocab_size, tokenizer.eod_id)
        for text in TEXTS.values():
            assert theirs(text)["input_ids"] == tokenizer.encode(text)
