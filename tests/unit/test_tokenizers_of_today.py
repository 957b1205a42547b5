"""Tokenizers of Llama, Qwen, SmolLM and sentencepiece's kind: the ids of transformers, tiktoken and sentencepiece."""

import io
import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import tiktoken
import tokenizers

from gptworks.checkpoint.systems import gguf_vocabulary
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer, scored_pieces, splits
from gptworks.tokenizer.special_tokens import SpecialTokens

FIXTURES = Path(__file__).parents[1] / "fixtures"
HARD = (FIXTURES / "tokenizers" / "hard_text.txt").read_bytes().decode()
TEXTS = [HARD, "", *HARD.split("\n"), *(line[3:] for line in HARD.split("\n")), " ", "\n", "\r\n\r\n x", "  <s>  a"]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|eot_id|>"]
# As they are published, not as we spell them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
PUBLISHED = {"llama-bpe": LLAMA3, "qwen2": QWEN2}


def learned(split: splits.Split) -> tokenizers.Tokenizer:
    """A small vocabulary of such a model: bytes, merges from a corpus in many languages, special tokens."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=split.whole_words))
    if split.composed:
        backend.normalizer = tokenizers.normalizers.NFC()
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.name not in PUBLISHED)
    if split.name in PUBLISHED:
        cut = tokenizers.pre_tokenizers.Split(tokenizers.Regex(PUBLISHED[split.name]), "isolated")
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([cut, letters])
    elif split.name == "smollm":
        apart = tokenizers.pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([apart, letters])
    else:
        backend.pre_tokenizer = letters
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        special_tokens=[],
    )
    backend.train_from_iterator([HARD, (FIXTURES / "corpus.txt").read_text()[:40_000]], trainer)
    backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    return backend


def folder_of(backend: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """As a model's folder has it."""
    folder.mkdir(parents=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def transformers_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def backends() -> dict[str, tokenizers.Tokenizer]:
    return {split.name: learned(split) for split in splits.ALL}


@pytest.mark.parametrize("name", [split.name for split in splits.ALL])
def test_ids_of_transformers(name: str, backends: dict[str, tokenizers.Tokenizer], tmp_path: Path) -> None:
    folder = folder_of(backends[name], tmp_path / "model")
    ours, theirs = Tokenizer.from_pretrained(folder), transformers_of(folder)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text
        assert ours.encode_prompt(text) == theirs.encode(text), text
    assert ours.eod_token == "<|im_end|>"
    assert ours.decode(ours.encode(HARD)) == (unicodedata.normalize("NFC", HARD) if name == "qwen2" else HARD)


@pytest.mark.parametrize("name", PUBLISHED)
def test_ids_of_tiktoken(name: str, backends: dict[str, tokenizers.Tokenizer]) -> None:
    """Another implementation of both the pattern and the merges, with the published pattern."""
    backend = backends[name]
    letters = {letter: byte for byte, letter in enumerate(_byte_letters())}
    added = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
    ranks = {
        bytes(letters[letter] for letter in token): i
        for token, i in backend.get_vocab().items()
        if token not in added
    }  # fmt: skip
    theirs = tiktoken.Encoding(name, pat_str=PUBLISHED[name], mergeable_ranks=ranks, special_tokens=added)
    ours = Tokenizer(backend, name=name)
    for text in TEXTS:
        given = unicodedata.normalize("NFC", text) if name == "qwen2" else text
        assert ours.encode(text) == theirs.encode(given, allowed_special="all"), text


def _byte_letters() -> list[str]:
    """GPT-2's table, by its definition."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return [chr(byte) if byte in printing else chr(256 + others.index(byte)) for byte in range(256)]


@pytest.mark.parametrize("name", [split.name for split in splits.ALL])
def test_inside_a_gguf(name: str, backends: dict[str, tokenizers.Tokenizer]) -> None:
    """Tokens, types, merges and the name of the rules are enough."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    special = SpecialTokens(bos_token="<|begin_of_text|>", chat_template=template)
    ours = Tokenizer(backends[name], name="x", eod_token="<|eot_id|>", special=special)
    notes: list[str] = []
    settings = gguf_vocabulary.settings_of(ours, ours.vocab_size + 3, None, notes)
    assert notes == [] and settings["tokenizer.ggml.pre"] == name
    again = gguf_vocabulary.from_settings(without_json(settings), "x")
    assert again is not None
    assert (again.eod_token, again.special) == (ours.eod_token, ours.special)
    for text in TEXTS:
        assert again.encode_prompt(text) == ours.encode(text), text


def without_json(settings: dict[str, Any]) -> dict[str, Any]:
    """What other converters write."""
    return {key: value for key, value in settings.items() if key != "tokenizer.huggingface.json"}


# Pieces with scores


def learned_pieces() -> sentencepiece.SentencePieceProcessor:
    """Made as Llama's was: BPE, bytes for what is missing, blanks kept, a blank before the text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter((FIXTURES / "corpus.txt").read_text()[:60_000].splitlines() + HARD.splitlines() * 2),
        model_writer=model, model_type="bpe", vocab_size=1400, byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
        character_coverage=0.98, split_digits=True, allow_whitespace_only_pieces=True, max_sentence_length=100_000,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model.getvalue())
    return processor


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    return learned_pieces()


def settings_of_pieces(pieces: sentencepiece.SentencePieceProcessor, **more: Any) -> dict[str, Any]:
    """As llama.cpp's converter writes them."""
    rows = range(pieces.get_piece_size())
    types = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1 for i in rows
    ]  # fmt: skip
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [pieces.id_to_piece(i) for i in rows],
        "tokenizer.ggml.scores": np.array([pieces.get_score(i) for i in rows], dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **more,
    }


def without_special(text: str) -> str:
    """sentencepiece looks for no special tokens in a text."""
    return text.replace("<s>", "").replace("</s>", "").replace("<unk>", "")


def test_ids_of_sentencepiece(pieces: sentencepiece.SentencePieceProcessor) -> None:
    ours = gguf_vocabulary.from_settings(settings_of_pieces(pieces), "x")
    assert ours is not None and ours.vocab_size == 1400
    assert sum(pieces.is_byte(i) for i in pieces.encode(HARD)) > 20  # it does spell some in bytes
    for text in map(without_special, TEXTS):
        assert ours.encode(text) == pieces.encode(text), text
        assert ours.encode_prompt(text) == [1, *pieces.encode(text)]
        assert ours.decode(ours.encode(text)) == text.replace(scored_pieces.BLANK, " ")


def test_a_prompt_begins_with_a_token_unless_the_file_says_no(pieces: sentencepiece.SentencePieceProcessor) -> None:
    ours = gguf_vocabulary.from_settings(settings_of_pieces(pieces, **{"tokenizer.ggml.add_bos_token": False}), "x")
    assert ours is not None and ours.encode_prompt("a") == ours.encode("a")
    ours = gguf_vocabulary.from_settings(settings_of_pieces(pieces, **{"tokenizer.ggml.add_space_prefix": False}), "x")
    assert ours is not None and ours.decode(ours.encode("word")) == "word"
    assert ours.encode(" word") == pieces.encode("word")


def test_pieces_in_a_folder_and_back_in_a_gguf(pieces: sentencepiece.SentencePieceProcessor, tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    settings = settings_of_pieces(pieces, **{"tokenizer.chat_template": template})
    inside = gguf_vocabulary.from_settings(settings, "x")
    assert inside is not None
    inside.save(tmp_path / "model")
    ours, theirs = Tokenizer.from_pretrained(tmp_path / "model"), transformers_of(tmp_path / "model")
    assert ours.identity == inside.identity
    assert (ours.eod_token, ours.special.bos_token, ours.special.chat_template) == ("</s>", "<s>", template)
    for text in TEXTS:
        assert ours.encode_prompt(text) == inside.encode_prompt(text) == theirs.encode(text), text
    written = gguf_vocabulary.settings_of(ours, ours.vocab_size, None, [])
    assert written["tokenizer.ggml.add_bos_token"] is True
    again = gguf_vocabulary.from_settings(without_json(written), "x")
    assert again is not None
    for text in TEXTS:
        assert again.encode_prompt(text) == ours.encode_prompt(text), text


def test_pieces_that_are_too_long() -> None:
    with pytest.raises(TokenizerError, match="a piece of 5,000 characters"):
        scored_pieces.tokenizer_of(
            {"a" * 5000: 0}, {"a" * 5000: 0.0}, unknown=None, begins_with_blank=True, name="x"
        )  # fmt: skip


# The first token of a prompt


@pytest.mark.parametrize("said", [None, True, False])
@pytest.mark.parametrize("has_template", [True, False])
def test_the_rule_of_the_folder(
    said: bool | None, has_template: bool, backends: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    """tokenizer_config.json decides, and where it says nothing tokenizer.json's post_processor."""
    backend = tokenizers.Tokenizer.from_str(backends["llama-bpe"].to_str())
    first = "<|begin_of_text|>"
    bos_id = backend.token_to_id(first)
    if has_template:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, bos_id)]
        )
    config = {"bos_token": {"content": first}} | ({} if said is None else {"add_bos_token": said})
    ours = Tokenizer.from_pretrained(folder_of(backend, tmp_path / "model", **config))
    expected = [bos_id] if said or (said is None and has_template) else []
    assert ours.encode_prompt("Hello") == [*expected, *ours.encode("Hello")]
    ours.save(tmp_path / "again")
    assert Tokenizer.from_pretrained(tmp_path / "again").encode_prompt("Hello") == ours.encode_prompt("Hello")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"add_bos_token": "yes"}, 'add_bos_token is "yes", needed true or false'),
        ({"bos_token": 5}, "bos_token is 5, needed a text"),
        ({"chat_template": {"a": 1}}, "chat_template is"),
    ],
)
def test_settings_that_are_wrong(
    config: dict[str, Any], message: str, backends: dict[str, tokenizers.Tokenizer], tmp_path: Path
) -> None:
    folder = folder_of(backends["gpt-2"], tmp_path / "model", **config)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_pretrained(folder)


def test_a_gguf_that_is_damaged(pieces: sentencepiece.SentencePieceProcessor) -> None:
    whole = settings_of_pieces(pieces)
    for key, value in (
        ("tokenizer.ggml.scores", np.zeros(3)),
        ("tokenizer.ggml.token_type", [1]),
        ("tokenizer.ggml.tokens", 7),
        ("tokenizer.ggml.scores", "text"),
    ):
        with pytest.raises(CheckpointError, match="its tokenizer cannot be read"):
            gguf_vocabulary.from_settings({**whole, key: value}, "x")
