"""sentencepiece models: how they are found, recognised, saved, carried to other processes, and what is refused."""

import hashlib
import io
import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from gptworks.checkpoint.systems.contract import tokenizer_in
from gptworks.data.store import Sidecar, Store
from gptworks.errors import TokenizerError
from gptworks.tokenizer import Tokenizer, cpm
from gptworks.tokenizer.sentencepiece import SentencePieceTokenizer

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece (extra interop) is not installed")
pytest.importorskip("jieba", reason="jieba (extra interop) is not installed")

CHINESE = [
    "我们 在 北京 学习 语言 模型 。",
    "他们 在 图书馆 看 书 ， 我们 去 公园 。",
    "天气 很 好 ， 我们 走 回 家 。",
]
ENGLISH = ["the captain walked to the harbour", "the harbour was quiet in the morning", "a quiet captain"]


def learn(texts: list[str], size: int, **options) -> bytes:
    """A tiny unigram model, in some hundredths of a second."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts * 5), model_writer=written, vocab_size=size, hard_vocab_limit=False,
        minloglevel=3, num_threads=1, **options,
    )  # fmt: skip
    return written.getvalue()


@pytest.fixture(scope="module")
def cpm_model() -> bytes:
    return learn(CHINESE, 90, user_defined_symbols=["\u2583", "<eod>", "\u2582"])


@pytest.fixture(scope="module")
def plain_model() -> bytes:
    return learn(ENGLISH, 60)


@pytest.fixture
def chinese(cpm_model: bytes, tmp_path: Path) -> Tokenizer:
    (tmp_path / "zh.model").write_bytes(cpm_model)
    return Tokenizer.from_pretrained(tmp_path / "zh.model")


@pytest.fixture
def english(plain_model: bytes, tmp_path: Path) -> Tokenizer:
    (tmp_path / "en.model").write_bytes(plain_model)
    return Tokenizer.from_pretrained(tmp_path / "en.model")


# Which rules, which end of document


def test_rules_are_recognised_by_the_pieces(chinese: Tokenizer, english: Tokenizer) -> None:
    assert isinstance(chinese, SentencePieceTokenizer) and isinstance(english, SentencePieceTokenizer)
    assert (chinese.rules, english.rules) == ("cpm", "plain")
    assert (chinese.eod_token, english.eod_token) == ("<eod>", "</s>")
    assert chinese.eod_id == chinese.backend.piece_to_id("<eod>")
    assert english.eod_id == english.backend.eos_id() == 2
    assert repr(english).startswith("SentencePieceTokenizer(")


@pytest.mark.parametrize("missing", ["\u2582", "\u2583", "<eod>"])
def test_rules_need_all_their_pieces(missing: str, tmp_path: Path) -> None:
    symbols = [symbol for symbol in ("\u2582", "\u2583", "<eod>") if symbol != missing]
    (tmp_path / "zh.model").write_bytes(learn(CHINESE, 90, user_defined_symbols=symbols))
    found = Tokenizer.from_pretrained(tmp_path / "zh.model")
    assert isinstance(found, SentencePieceTokenizer) and found.rules == "plain"


def test_plain_ids_are_sentencepieces_own(english: Tokenizer, plain_model: bytes) -> None:
    reference = sentencepiece.SentencePieceProcessor(model_proto=plain_model)
    for text in (*ENGLISH, "", " ", "The  quiet\n captain  ", "unknown Ж here", "</s>"):
        assert english.encode(text) == reference.encode(text)
        assert english.decode(english.encode(text)) == reference.decode(reference.encode(text))


def test_text_with_cpms_rules_keeps_spaces_and_line_ends(chinese: Tokenizer) -> None:
    text = "我们 在北京\n\n他们  看书\n"
    assert chinese.decode(chinese.encode(text)) == text
    assert chinese.encode("") == [] and chinese.decode([]) == ""
    space, line_end = (chinese.backend.piece_to_id(piece) for piece in "\u2582\u2583")
    assert [i for i in chinese.encode(" \n") if i in (space, line_end)] == [space, line_end]


def test_words_are_cut_before_sentencepiece_sees_them() -> None:
    assert cpm.to_words("我们在北京 学习\n") == "我们 在 北京 \u2582 学习 \u2583"
    assert cpm.from_words("我们 在 北京 \u2582 学习 \u2583") == "我们在北京 学习\n"


def test_words_added_to_jieba_by_others_change_nothing() -> None:
    import jieba

    before = cpm.to_words("我们在北京学习")
    jieba.setLogLevel("ERROR")
    jieba.add_word("在北京学习", freq=10**9)
    assert cpm.to_words("我们在北京学习") == before


def test_a_batch_is_its_texts(chinese: Tokenizer, english: Tokenizer) -> None:
    for tokenizer in (chinese, english):
        texts = ["我们 在", "", "the captain", "\n"]
        assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]
        assert tokenizer.encode_batch([]) == []


def test_bytes_per_token_are_not_guessed(chinese: Tokenizer) -> None:
    assert chinese.byte_lengths is None
    assert chinese.missing_bytes == ()


# Files


def test_saved_and_read_again(chinese: Tokenizer, english: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (chinese, english):
        folder = tmp_path / Path(tokenizer.name).stem
        tokenizer.with_eod(5).save(folder)
        tokenizer.save_file(tmp_path / f"alone{tokenizer.file_suffix}")
        in_folder, alone = (
            Tokenizer.from_pretrained(folder),
            Tokenizer.from_pretrained(tmp_path / "alone.tokenizer.model"),
        )
        checkpoint = tokenizer_in(folder)
        assert checkpoint is not None
        for again in (in_folder, alone, checkpoint):
            assert (again.identity, again.vocab_size) == (tokenizer.identity, tokenizer.vocab_size)
            assert again.encode("我们 a\n") == tokenizer.encode("我们 a\n")
        assert (in_folder.eod_id, alone.eod_id) == (5, tokenizer.eod_id)
    config = json.loads((tmp_path / "zh" / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (config["tokenizer_class"], config["sentencepiece_rules"]) == ("GPTChineseTokenizer", "cpm")


def test_byte_level_tokenizer_in_one_file(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    file = tmp_path / f"alone{small_tokenizer.file_suffix}"
    small_tokenizer.save_file(file)
    assert file.name == "alone.tokenizer.json"
    assert Tokenizer.from_pretrained(file).identity == small_tokenizer.identity


def test_the_recorded_rules_count(cpm_model: bytes, tmp_path: Path) -> None:
    (tmp_path / "sentencepiece.model").write_bytes(cpm_model)
    recognised = Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"sentencepiece_rules": "plain"}')
    recorded = Tokenizer.from_pretrained(tmp_path)
    assert isinstance(recorded, SentencePieceTokenizer) and recorded.rules == "plain"
    assert recorded.identity != recognised.identity
    assert recorded.encode("我们\n") != recognised.encode("我们\n")
    (tmp_path / "tokenizer_config.json").write_text('{"sentencepiece_rules": "other"}')
    with pytest.raises(TokenizerError, match='sentencepiece_rules is "other", needed one of plain, cpm'):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["sentencepiece.model", "chinese_vocab.model", "tokenizer.model", "anything.model"])
def test_the_model_of_a_folder(name: str, cpm_model: bytes, plain_model: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(cpm_model)
    (tmp_path / "vocab.json").write_text("{}")  # CPM's is there too, without merges
    assert Tokenizer.from_pretrained(tmp_path).name == str(tmp_path / name)
    (tmp_path / "zzz.model").write_bytes(plain_model)
    if name == "anything.model":
        with pytest.raises(TokenizerError, match=r"no tokenizer in this folder.*one sentencepiece \.model"):
            Tokenizer.from_pretrained(tmp_path)
    else:
        assert Tokenizer.from_pretrained(tmp_path).name == str(tmp_path / name)


def test_a_tokenizer_json_is_preferred(cpm_model: bytes, small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(cpm_model)
    assert Tokenizer.from_pretrained(tmp_path).identity == small_tokenizer.identity


def test_a_store_brings_its_tokenizer(chinese: Tokenizer, small_store: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"zh{suffix}").write_bytes(small_store.with_suffix(suffix).read_bytes())
    made = Sidecar.read(small_store.with_suffix(".json"))
    chinese.save_file(tmp_path / f"zh{chinese.file_suffix}")
    values = {
        **made.__dict__, "tokenizer": "zh.tokenizer.model", "tokenizer_identity": chinese.identity, "eod_id": 7,
    }  # fmt: skip
    Sidecar(**values).write(tmp_path / "zh.json")
    found = Store(tmp_path / "zh").load_tokenizer()
    assert found is not None and (found.identity, found.eod_id) == (chinese.identity, 7)
    values["tokenizer_identity"] = hashlib.sha256(b"another").hexdigest()
    Sidecar(**values).write(tmp_path / "zh.json")
    with pytest.raises(TokenizerError, match="was made with another tokenizer"):
        Store(tmp_path / "zh").load_tokenizer()


def test_the_end_of_document_a_store_was_made_with(chinese: Tokenizer) -> None:
    other = chinese.with_eod(5)
    assert (other.eod_id, other.eod_token) == (5, chinese.backend.id_to_piece(5))
    assert (other.identity, other.encode("我们")) == (chinese.identity, chinese.encode("我们"))
    assert chinese.eod_token == "<eod>" and chinese.with_eod(chinese.eod_id) is chinese
    with pytest.raises(TokenizerError, match=f"id {chinese.vocab_size} is not in its {chinese.vocab_size} tokens"):
        chinese.with_eod(chinese.vocab_size)


def test_other_processes_get_the_same_tokenizer(
    chinese: Tokenizer, english: Tokenizer, small_tokenizer: Tokenizer
) -> None:
    for tokenizer in (chinese, english, small_tokenizer.with_eod(5)):
        again = pickle.loads(pickle.dumps(tokenizer))
        assert (again.identity, again.eod_id, again.name) == (tokenizer.identity, tokenizer.eod_id, tokenizer.name)
        for text in ("我们 在\n北京", "the captain", ""):
            assert again.encode(text) == tokenizer.encode(text)
            assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


def test_identity_tells_models_and_rules_apart(cpm_model: bytes, chinese: Tokenizer, english: Tokenizer) -> None:
    renamed = SentencePieceTokenizer(cpm_model, name="other")
    plain = SentencePieceTokenizer(cpm_model, name="other", rules="plain")
    assert renamed.identity == chinese.identity
    assert len({chinese.identity, plain.identity, english.identity}) == 3


# What is refused


@pytest.mark.parametrize(
    "content", [b"", b"plain text\n" * 50, b"{}", b"\x00" * 64, b"\xff\xfe", b"\x0a\x05\x0a\x03<s>"]
)
def test_not_a_sentencepiece_model(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "broken.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"broken\.model: not a sentencepiece model, or a damaged one"):
        Tokenizer.from_pretrained(tmp_path / "broken.model")


def test_a_damaged_model_is_an_error_or_another_tokenizer(cpm_model: bytes, chinese: Tokenizer, tmp_path: Path) -> None:
    """No format has a checksum of its own here, but a store and a checkpoint know the identity they need."""
    generator = np.random.default_rng(0)
    path = tmp_path / "damaged.model"
    refused = 0
    for position in generator.integers(0, len(cpm_model), 60):
        damaged = bytearray(cpm_model)
        damaged[position] ^= int(generator.integers(1, 256))
        path.write_bytes(damaged if position % 2 else cpm_model[:position])
        try:
            found = Tokenizer.from_pretrained(path)
        except TokenizerError:
            refused += 1
        else:
            assert found.identity != chinese.identity
    assert refused > 20


def test_a_piece_that_is_not_text(cpm_model: bytes, tmp_path: Path) -> None:
    damaged = cpm_model.replace("\u2583".encode(), b"\xff\xfe\xfd", 1)
    assert damaged != cpm_model
    (tmp_path / "broken.model").write_bytes(damaged)
    with pytest.raises(TokenizerError, match="not a sentencepiece model, or a damaged one"):
        Tokenizer.from_pretrained(tmp_path / "broken.model")


def test_a_file_too_large_for_a_vocabulary_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "weights.model").open("wb") as file:
        file.truncate(300 * 1024**2)
    with pytest.raises(TokenizerError, match="314,572,800 bytes, and a tokenizer has at most 134,217,728"):
        Tokenizer.from_pretrained(tmp_path / "weights.model")


@pytest.mark.parametrize("beyond", [-1, 10**6])
def test_an_id_outside_the_vocabulary(beyond: int, chinese: Tokenizer) -> None:
    with pytest.raises(TokenizerError, match=f"the id {beyond} is not in its {chinese.vocab_size} tokens"):
        chinese.decode([3, beyond])


def test_half_a_surrogate_pair_is_no_text(chinese: Tokenizer) -> None:
    for encode in (chinese.encode, lambda text: chinese.encode_batch(["fine", text])):
        with pytest.raises(TokenizerError, match=r"text has '\\ud83d' at character 2"):
            encode("ab\ud83dcd")


def test_without_the_package(cpm_model: bytes, chinese: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(TokenizerError, match=r'needs the package sentencepiece.*pip install "gptworks\[interop\]"'):
        Tokenizer.from_pretrained(tmp_path / "zh.model")
    monkeypatch.setitem(sys.modules, "jieba", None)
    cpm._cutter.cache_clear()
    with pytest.raises(TokenizerError, match=r'jieba: it is not installed.*pip install "gptworks\[interop\]"'):
        chinese.encode("我们")
    assert chinese.decode([chinese.eod_id]) == "<eod>"  # needs no words


def test_another_dictionary_is_refused(monkeypatch, tmp_path: Path) -> None:
    import jieba

    monkeypatch.setattr(jieba, "__file__", str(tmp_path / "__init__.py"))
    (tmp_path / "dict.txt").write_text("我们 5 n\n", encoding="utf-8")
    cpm._cutter.cache_clear()
    with pytest.raises(TokenizerError, match=r"dict\.txt: sha256 .*, needed 7197c3211ddd.*jieba==0\.42\.1"):
        cpm.to_words("我们")
    monkeypatch.undo()
    cpm._cutter.cache_clear()
    assert cpm.to_words("我们在") == "我们 在"


def test_nothing_is_printed_and_no_cache_is_written_or_trusted(
    monkeypatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "jieba.cache").write_bytes(b"something else")
    cpm._cutter.cache_clear()
    assert cpm.to_words("我们在北京") == "我们 在 北京"
    assert capfd.readouterr() == ("", "")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("jieba.cache", b"something else")]
