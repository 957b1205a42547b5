"""A store as a whole: the pair, its sidecar and its tokenizer must tell the same story."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import DataConfig
from gptworks.data import corpus, prepare
from gptworks.data.dataset import Dataset
from gptworks.data.formats.file_names import beside
from gptworks.data.store import Store, vocabulary_of
from gptworks.errors import DataError, TokenizerError
from gptworks.tokenizer import Tokenizer

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40)


@pytest.fixture
def copy(small_store: Path, tmp_path: Path) -> Path:
    """The small store again, to be damaged."""
    for suffix in (".bin", ".idx", ".json", ".tokenizer.json"):
        shutil.copy(beside(small_store, suffix), beside(tmp_path / "copy", suffix))
    return _renamed_tokenizer(tmp_path / "copy")


def _renamed_tokenizer(prefix: Path) -> Path:
    edit_sidecar(prefix, tokenizer=f"{prefix.name}.tokenizer.json")
    return prefix


def edit_sidecar(prefix: Path, *without: str, **values: object) -> None:
    file = beside(prefix, ".json")
    sidecar = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in sidecar.items() if key not in without}))


def refused(prefix: Path) -> str:
    with pytest.raises(DataError) as caught:
        Store(prefix)
    return str(caught.value)


@given(st.lists(texts, min_size=1, max_size=6), st.booleans())
def test_documents_are_read_as_they_were_written(small_tokenizer: Tokenizer, documents: list[str], eod: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "corpus.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
        prepare.prepare(prepare.PrepareJob([str(source)], Path(folder) / "x", small_tokenizer, append_eod=eod))
        store = Store(Path(folder) / "x")
        assert store.num_documents == len(documents)
        starts = store.document_starts.tolist()
        assert starts[0] == 0 and starts[-1] == len(store.tokens)
        for text, begin, end in zip(documents, starts, starts[1:], strict=False):
            ids = store.tokens[begin:end].tolist()
            assert small_tokenizer.decode(ids) == text + ("<|endoftext|>" if eod else "")


def test_tokens_are_mapped_not_loaded(small_store: Path) -> None:
    assert isinstance(Store(small_store).tokens, np.memmap)


@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_prefix_or_either_file(suffix: str, small_store: Path) -> None:
    assert Store(f"{small_store}{suffix}").file == beside(small_store, ".bin")


def test_how_many_tokens_the_tokenizer_of_datasets_has(small_store: Path, tmp_path: Path) -> None:
    assert vocabulary_of([str(small_store)]) == 512
    assert vocabulary_of([str(small_store), str(small_store)], "gpt2") == 512
    assert vocabulary_of([str(tmp_path / "nowhere")], "gpt2") is None  # what is wrong is said when it is opened
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "bare.bin")
    assert vocabulary_of([str(tmp_path / "bare.bin")]) is None
    assert vocabulary_of([str(tmp_path / "bare.bin")], "gpt2") == 50257


def test_tokenizer_beside_the_store(small_store: Path, small_tokenizer: Tokenizer) -> None:
    found = Store(small_store).load_tokenizer()
    assert found is not None and found.identity == small_tokenizer.identity


def test_the_end_of_document_is_that_of_the_store_not_a_guess(
    small_tokenizer: Tokenizer, corpus_file: Path, tmp_path: Path
) -> None:
    chosen = small_tokenizer.with_eod(7)
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "store", chosen, append_eod=True))
    store = Store(tmp_path / "store")
    found = store.load_tokenizer()
    assert found is not None and found.eod_id == 7 == store.tokens[-1]
    assert Tokenizer.from_pretrained(tmp_path / "store.tokenizer.json").eod_id == 511  # what would be guessed


def test_a_pair_without_a_sidecar(copy: Path) -> None:
    beside(copy, ".json").unlink()
    store = Store(copy)
    assert store.sidecar is None and store.load_tokenizer() is None
    assert store.num_documents == 160


def test_identity_follows_the_contents(small_store: Path, copy: Path, tmp_path: Path) -> None:
    identity = Store(small_store).identity
    assert Store(copy).identity == identity
    edit_sidecar(copy, sha256={**json.loads(beside(copy, ".json").read_text())["sha256"], ".bin": "0" * 64})
    assert Store(copy).identity != identity
    beside(copy, ".json").unlink()
    bare = Store(copy).identity
    tokens = np.fromfile(beside(copy, ".bin"), np.uint16)
    tokens[0] ^= 1
    tokens.tofile(beside(copy, ".bin"))
    assert Store(copy).identity != bare


def test_missing_store(tmp_path: Path) -> None:
    assert refused(tmp_path / "gone").startswith(f"{tmp_path / 'gone'}: no such dataset. Needed: the prefix")


def test_truncated_tokens(copy: Path) -> None:
    file = beside(copy, ".bin")
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-2])
    assert refused(copy).startswith(f"{file}: {size - 2} bytes, but copy.idx describes {size}.")


def test_index_of_another_store(copy: Path, corpus_file: Path, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole_file = corpus.TextRules(separator="")
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "other", small_tokenizer, rules=whole_file))
    shutil.copy(tmp_path / "other.idx", beside(copy, ".idx"))
    assert "One of the two is cut off or belongs to another store" in refused(copy)


def test_every_moved_document_border_is_noticed(copy: Path) -> None:
    """A border can move without contradiction inside the index; the sidecar's hash still tells."""
    file = beside(copy, ".idx")
    whole = file.read_bytes()
    first_border = 34 + 12 * 160
    for border in (1, 2, 80, 159):
        damaged = bytearray(whole)
        damaged[first_border + 8 * border] -= 1
        file.write_bytes(damaged)
        message = refused(copy)
        assert message.startswith(f"{file}: ")
    assert "sha256" in message and "copy.json says" in message
    file.write_bytes(whole)
    Store(copy)


@pytest.mark.parametrize(
    ("name", "value"),
    [("tokens", 5), ("documents", 161)],
)
def test_sidecar_with_other_counts(name: str, value: int, copy: Path) -> None:
    found = {"tokens": len(Store(copy).tokens), "documents": 160}[name]
    edit_sidecar(copy, **{name: value})
    expected = f"{copy}.json: describes {value} {name}, the store has {found}. Prepare the data again."
    assert refused(copy) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", None),
        ("tokenizer", 3),
        ("tokenizer_identity", None),
        ("vocab_size", "512"),
        ("eod_id", "511"),
        ("eod_appended", "yes"),
        ("documents", None),
        ("tokens", [1]),
        ("sha256", "abc"),
    ],
)
def test_sidecar_with_a_value_of_another_type(name: str, value: object, copy: Path) -> None:
    edit_sidecar(copy, **{name: value})
    assert f"copy.json: not a store's sidecar ({name} is {value!r})" in refused(copy)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "{}", '{"version": 1}', "\x00"])
def test_sidecar_that_is_none(content: str, copy: Path) -> None:
    beside(copy, ".json").write_text(content)
    assert f"{copy}.json: not a store's sidecar" in refused(copy)


def test_sidecar_of_another_version_or_with_other_keys(copy: Path) -> None:
    edit_sidecar(copy, version=7)
    assert refused(copy) == f"{copy}.json: version 7, needed 1. Prepare the data again."
    edit_sidecar(copy, version=1, colour="blue")
    assert "colour" in refused(copy)
    edit_sidecar(copy, "colour", "tokenizer")
    assert "tokenizer" in refused(copy)


def test_store_without_documents_opens_and_says_so_when_read(tmp_path: Path) -> None:
    header = (
        b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + b"\x08" + (0).to_bytes(8, "little") + (1).to_bytes(8, "little")
    )
    (tmp_path / "none.idx").write_bytes(header + bytes(8))
    (tmp_path / "none.bin").write_bytes(b"")
    assert (Store(tmp_path / "none").num_documents, len(Store(tmp_path / "none").tokens)) == (0, 0)
    dataset = Dataset(DataConfig(path=(str(tmp_path / "none"),), seq_len=8), vocab_size=512)
    with pytest.raises(DataError, match="the train split has 0 of 0 documents and 0 tokens; one sample needs 9"):
        dataset.samples("train")


# The stores of a run together


def config(*prefixes: Path, **values: object) -> DataConfig:
    return DataConfig(path=tuple(str(prefix) for prefix in prefixes), seq_len=32, **values)


def test_no_path() -> None:
    with pytest.raises(
        DataError, match=r"data\.path: not set\. Needed: a text file or a folder of text, or the prefix"
    ):
        Dataset(DataConfig(), vocab_size=512)


def test_vocabulary_larger_than_the_models(small_store: Path) -> None:
    Dataset(config(small_store), vocab_size=512)
    with pytest.raises(DataError) as caught:
        Dataset(config(small_store), vocab_size=511)
    assert str(caught.value) == (
        f"{small_store}.bin: its tokenizer has 512 tokens, but model.vocab_size is 511. "
        "Prepare it with the tokenizer of the model, or, for a model that starts from random weights, "
        "set model.vocab_size=512 or more."
    )


def test_stores_of_different_tokenizers(small_store: Path, corpus_file: Path, tmp_path: Path) -> None:
    other = prepare.train_tokenizer([str(corpus_file)], 300, corpus.TextRules())
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "other", other))
    with pytest.raises(TokenizerError, match=r"other\.bin was made with another tokenizer: got .*needed "):
        Dataset(config(small_store, tmp_path / "other"), vocab_size=512)
    assert Dataset(config(small_store, small_store), vocab_size=512).tokenizer.vocab_size == 512


def test_stores_that_end_documents_differently(small_store: Path, copy: Path) -> None:
    edit_sidecar(copy, eod_id=5)
    assert Dataset(config(copy), vocab_size=512).tokenizer.eod_id == 5
    with pytest.raises(DataError, match=r"end documents with different tokens \(ids 5, 511\)"):
        Dataset(config(small_store, copy), vocab_size=512)


def test_tokenizer_given_in_the_config_must_be_the_stores(small_store: Path, small_tokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path / "same")
    dataset = Dataset(config(small_store, tokenizer=str(tmp_path / "same")), vocab_size=512)
    assert dataset.tokenizer_identity == small_tokenizer.identity
    assert dataset.identities == [Store(small_store).identity]
    with pytest.raises(TokenizerError, match=r"small\.bin was made with another tokenizer: got gpt2"):
        Dataset(config(small_store, tokenizer="gpt2"), vocab_size=50257)


def test_tokenizer_file_that_was_exchanged(copy: Path) -> None:
    Tokenizer.train(["something else"], 300).backend.save(str(beside(copy, ".tokenizer.json")))
    with pytest.raises(TokenizerError, match=r"copy\.bin was made with another tokenizer"):
        Dataset(config(copy), vocab_size=512)
    beside(copy, ".tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match=r"copy\.tokenizer\.json: not a tokenizer"):
        Dataset(config(copy), vocab_size=512)


@pytest.mark.parametrize("option", ["mask_eod", "reset_positions", "reset_attention"])
def test_ends_of_documents_must_be_there_to_act_on(option: str, copy: Path, small_store: Path) -> None:
    assert Dataset(config(small_store, **{option: True}), vocab_size=512).eod_policy.eod_id == 511
    edit_sidecar(copy, eod_appended=False)
    with pytest.raises(DataError) as caught:
        Dataset(config(small_store, copy, **{option: True}), vocab_size=512)
    assert str(caught.value).startswith(f"data.{option}: {copy}.bin has no end-of-document tokens to act on.")
    beside(copy, ".json").unlink()
    with pytest.raises(DataError, match=f"data.{option}: the end-of-document token is not known."):
        Dataset(config(copy, **{option: True}), vocab_size=512)
