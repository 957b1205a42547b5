"""Tokenizers of single characters, learned from text or read from nanoGPT's meta.pkl."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config.load import from_dict
from gptworks.data.convert import convert
from gptworks.data.dataset import Dataset
from gptworks.data.formats.registry import FORMATS
from gptworks.data.prepare import PrepareJob, prepare, train_tokenizer
from gptworks.data.store import Store
from gptworks.data.text_blocks import TextRules
from gptworks.errors import GPTWorksError, TokenizerError
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.characters import CharacterTokenizer

TEXT = "First Citizen:\nYou're all resolved? 你好, naïve 👩‍👩‍👧!\t<|end\r\n"


def meta(folder: Path, text: str = TEXT, **changes: Any) -> Path:
    """As nanoGPT's data/shakespeare_char/prepare.py writes it."""
    letters = sorted(set(text))
    content = {
        "vocab_size": len(letters),
        "itos": dict(enumerate(letters)),
        "stoi": {letter: i for i, letter in enumerate(letters)},
    } | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "meta.pkl").write_bytes(pickle.dumps(content))
    return folder / "meta.pkl"


@given(st.text(st.sampled_from(TEXT)))
@pytest.mark.parametrize("with_eod", [False, True])
def test_ids_are_those_of_the_tokenizers_library(with_eod: bool, text: str) -> None:
    ours = CharacterTokenizer.learn([TEXT], with_eod=with_eod)
    theirs = tokenizers.Tokenizer.from_str(ours.backend.to_str())
    text = f"{text}<|endoftext|>{text}" if with_eod else text
    assert ours.encode(text) == theirs.encode(text).ids
    assert ours.decode(ours.encode(text)) == text == theirs.decode(ours.encode(text), skip_special_tokens=False)


def test_ids_are_those_of_nanogpt_and_the_file_knows_itself_again(tmp_path: Path) -> None:
    letters = sorted(set(TEXT))
    ours = CharacterTokenizer.learn([TEXT])
    assert ours.encode(TEXT) == [letters.index(letter) for letter in TEXT] and ours.vocab_size == len(letters)
    assert ours.eod_id is None
    ours.save(tmp_path / "saved")
    again = Tokenizer.from_pretrained(tmp_path / "saved")
    assert isinstance(again, CharacterTokenizer) and again.identity == ours.identity
    assert again.identity == Tokenizer.from_pretrained(meta(tmp_path / "meta")).identity
    assert CharacterTokenizer.learn([TEXT], with_eod=True).identity != ours.identity


def test_bytes_of_a_character_are_counted() -> None:
    ours = CharacterTokenizer.learn(["aé你👩"], with_eod=True)
    assert [int(ours.byte_lengths[i]) for i in ours.encode("aé你👩<|endoftext|>")] == [1, 2, 3, 4, 0]


@pytest.mark.parametrize("text", ["ok\nbut ж", "ж", "ok\n<|endoftext|>buж"])
def test_an_unknown_character_is_refused_with_its_place(text: str) -> None:
    ours = CharacterTokenizer.learn(["ok but\n"], with_eod=True)
    at = text.index("ж") + 1
    with pytest.raises(TokenizerError, match=rf"'ж' \(U\+0436\), character {at} of the text, is not among its 7"):
        ours.encode(text)
    with pytest.raises(Exception, match="UNK"):  # in the hands of others it is not lost either
        tokenizers.Tokenizer.from_str(ours.backend.to_str()).encode(text)


def test_a_store_of_characters(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"{TEXT}\n\n{TEXT * 3}", encoding="utf-8", newline="")
    rules = TextRules(keep_separator=False)
    tokenizer = train_tokenizer([str(tmp_path / "a.txt")], "chars", rules, with_eod=True)
    prepare(PrepareJob([str(tmp_path / "a.txt")], tmp_path / "s", tokenizer, rules=rules, append_eod=True))
    store = Store(tmp_path / "s")
    read = store.load_tokenizer()
    assert isinstance(read, CharacterTokenizer) and store.num_documents == 2
    assert read.decode(store.tokens[: store.document_starts[1]]) == f"{TEXT.rstrip()}<|endoftext|>"
    (tmp_path / "b.txt").write_text("First all ж", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"b\.txt: .*'ж' \(U\+0436\), character 11"):
        prepare(PrepareJob([str(tmp_path / "b.txt")], tmp_path / "t", tokenizer))
    assert not list(tmp_path.glob("t*"))


def test_long_texts_are_cut_and_the_ids_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptworks.data import encode, text_blocks

    for module, name in ((text_blocks, "BLOCK_BYTES"), (text_blocks, "_READ_BYTES"), (encode, "_PIECE_BYTES")):
        monkeypatch.setattr(module, name, 300)
    text = "".join(f"word{number} and 你好。好 or\nthen " for number in range(400))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    rules = TextRules(separator="")
    tokenizer = train_tokenizer([str(tmp_path / "a.txt")], "chars", rules)
    prepare(PrepareJob([str(tmp_path / "a.txt")], tmp_path / "s", tokenizer, rules=rules))
    store = Store(tmp_path / "s")
    assert store.num_documents == 1 and tokenizer.decode(store.tokens[:]) == text


def test_meta_pkl_is_the_tokenizer_of_the_data_beside_it(tmp_path: Path) -> None:
    place = tmp_path / "data" / "mine"
    file = meta(place)
    tokenizer = Tokenizer.from_pretrained(place)
    np.array(tokenizer.encode(TEXT * 20), np.uint16).tofile(place / "train.bin")
    store = Store(place / "train.bin")
    assert (read := store.load_tokenizer()) is not None and read.decode(store.tokens[: len(TEXT)]) == TEXT
    data = from_dict({"data": {"path": str(place / "train.bin"), "seq_len": 8}}).data
    assert Dataset(data, vocab_size=64).tokenizer_identity == tokenizer.identity
    convert([str(place / "train.bin")], tmp_path / "m", FORMATS["megatron"])
    assert (again := Store(tmp_path / "m").load_tokenizer()) is not None and again.identity == tokenizer.identity
    other = from_dict({"data": {"path": str(place / "train.bin"), "seq_len": 8, "tokenizer": "gpt2"}}).data
    with pytest.raises(TokenizerError, match=r"train\.bin \(.*meta\.pkl\) was made with another tokenizer: got gpt2"):
        Dataset(other, vocab_size=50257)
    meta(place, vocab_size=7, stoi=None)
    assert store.load_tokenizer() is None  # it says only how many
    with pytest.raises(TokenizerError, match="has a vocab_size, but not which character"):
        Tokenizer.from_pretrained(file)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"stoi": {"ab": 0}}, "stoi has 'ab': 0"),
        ({"stoi": {"a": -1}}, "stoi has 'a': -1"),
        ({"stoi": {"a": 3}, "vocab_size": 1}, "1 characters with ids up to 3"),
        ({"vocab_size": 7}, "vocab_size is 7"),
        ({"itos": {0: "x"}}, "itos and stoi disagree"),
        ({"stoi": 5}, "stoi is 5"),
        ({"stoi": None, "vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_a_meta_pkl_that_cannot_be_right(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = meta(tmp_path, **changes)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_pretrained(file)
    assert str(file) in str(caught.value) and said in str(caught.value)


def test_a_meta_pkl_is_read_and_never_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "trap",)

    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": Trap(), "stoi": {"a": 0}}))
    with pytest.raises(GPTWorksError, match=r"meta\.pkl"):
        Tokenizer.from_pretrained(tmp_path)
    for content in (b"", b"no pickle", pickle.dumps([1, 2])):
        (tmp_path / "meta.pkl").write_bytes(content)
        with pytest.raises(TokenizerError, match=r"meta\.pkl.*Needed: what nanoGPT's prepare\.py writes"):
            Tokenizer.from_pretrained(tmp_path)
    assert not (tmp_path / "trap").exists()
