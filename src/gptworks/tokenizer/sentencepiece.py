"""Tokenizers whose file is a sentencepiece `.model`, plain or with CPM's rules around it."""

import hashlib
import json
import warnings
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.errors import TokenizerError
from gptworks.tokenizer import cpm
from gptworks.tokenizer.special_tokens import SpecialTokens, eos_of, read_config, special_tokens_of
from gptworks.tokenizer.tokenizer import Tokenizer, require_small, require_text

SAVED_NAME = "sentencepiece.model"
_KNOWN_NAMES = (SAVED_NAME, "chinese_vocab.model", "tokenizer.model", "spiece.model")
_RULES = ("plain", "cpm")
_RULES_FIELD = "sentencepiece_rules"


def model_in(folder: Path) -> Path | None:
    """The sentencepiece model of a folder: one of the usual names, or the only `.model` there is."""
    for name in _KNOWN_NAMES:
        if (folder / name).is_file():
            return folder / name
    models = sorted(path for path in folder.glob("*.model") if path.is_file())
    return models[0] if len(models) == 1 else None


class SentencePieceTokenizer(Tokenizer):
    """Text to ids and back by sentencepiece.

    `rules` is "cpm" or "plain"; where nobody says, a model whose vocabulary has U+2582, U+2583 and <eod> has CPM's.
    """

    backend: Any  # sentencepiece's processor: the package need not be installed
    library = "sentencepiece"
    file_suffix = ".tokenizer.model"
    eod_names = (cpm.EOD, "</s>", *Tokenizer.eod_names)
    byte_lengths: np.ndarray | None = None  # type: ignore[assignment]  # pieces are of normalized text
    missing_bytes: tuple[int, ...] = ()  # type: ignore[assignment]  # what is not in the vocabulary is <unk>

    def __init__(
        self,
        model: bytes,
        *,
        name: str,
        eod_token: str | None = None,
        rules: str | None = None,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008
    ) -> None:
        self.model = model
        processor, self.pieces = _load(model, name)
        super().__init__(processor, name=name, eod_token=eod_token, special=special)
        self.rules = rules or ("cpm" if cpm.are_rules_of(self.pieces) else "plain")

    @classmethod
    def read(cls, path: Path) -> "SentencePieceTokenizer":
        """From a `.model` file; a tokenizer_config.json beside it may name the end of document and the rules."""
        require_small(path)
        config_file = path.with_name("tokenizer_config.json")
        rules = read_config(config_file).get(_RULES_FIELD)
        if rules is not None and rules not in _RULES:
            raise TokenizerError(
                f"{config_file}: {_RULES_FIELD} is {json.dumps(rules)}, needed one of {', '.join(_RULES)}."
            )
        special = special_tokens_of(config_file)
        return cls(path.read_bytes(), name=str(path), eod_token=eos_of(config_file), rules=rules, special=special)

    def _vocabulary(self) -> dict[str, int]:
        return {piece: i for i, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            require_text(text)
        return self.backend.encode([cpm.to_words(text) for text in texts] if self.rules == "cpm" else texts)

    def decode(self, ids: Iterable[int]) -> str:
        known = [int(i) for i in ids]
        beyond = next((i for i in known if not 0 <= i < self.vocab_size), None)
        if beyond is not None:
            raise TokenizerError(f"{self.name}: the id {beyond} is not in its {self.vocab_size} tokens.")
        text = self.backend.decode(known)
        return cpm.from_words(text) if self.rules == "cpm" else text

    def _added_before(self) -> list[int]:
        return []

    @cached_property
    def identity(self) -> str:
        return hashlib.sha256(f"sentencepiece {self.rules}\n".encode() + self.model).hexdigest()

    def save(self, folder: str | Path) -> None:
        """The model under the name PaddleNLP gives it, and beside it what it and we want to know."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_file(folder / SAVED_NAME)
        config = {_RULES_FIELD: self.rules}
        if self.rules == "cpm":
            config["tokenizer_class"] = "GPTChineseTokenizer"
        if self.eod_token:
            config["eos_token"] = self.eod_token
        (folder / "tokenizer_config.json").write_text(
            json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )

    def save_file(self, path: Path) -> None:
        """The model alone: it shows by its vocabulary which rules it has."""
        path.write_bytes(self.model)


def _load(model: bytes, name: str) -> tuple[Any, list[str]]:
    """sentencepiece's processor, and the pieces in the order of their ids."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the types that SWIG makes displease newer Pythons
            import sentencepiece
    except ImportError:
        raise TokenizerError(
            f"{name}: a sentencepiece model needs the package sentencepiece, which is not installed. "
            'Install it: pip install "gptworks[interop]"'
        ) from None
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(model)
        return processor, [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
    except (RuntimeError, OSError, ValueError):  # ValueError: a piece that is not UTF-8
        raise TokenizerError(
            f"{name}: not a sentencepiece model, or a damaged one ({len(model):,} bytes). "
            "Copy it again, or name another file."
        ) from None
