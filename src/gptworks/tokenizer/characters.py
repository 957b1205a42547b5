"""Tokenizers of single characters: each character of a text is a token, as in nanoGPT's shakespeare_char.

The file is an ordinary tokenizer.json, in which `tokenizers` finds one word per character; there too a character that
is not in the vocabulary is an error, and never lost. The ids are looked up here in a table, which is faster.
"""

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import tokenizers

from gptworks.errors import TokenizerError
from gptworks.tokenizer.tokenizer import GPT2_EOD, Tokenizer, require_text

_ONE_CHARACTER = r"[\s\S]"
_UNICODE = np.dtype("<u4")


def is_of_characters(backend: tokenizers.Tokenizer) -> bool:
    """Whether a tokenizer.json has one token per character and nothing else that decides ids."""
    if not isinstance(backend.model, tokenizers.models.WordLevel) or backend.normalizer is not None:
        return False
    cutter = json.loads(backend.to_str())["pre_tokenizer"]
    if cutter != {"type": "Split", "pattern": {"Regex": _ONE_CHARACTER}, "behavior": "Isolated", "invert": False}:
        return False
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    return all(len(token) == 1 for token in backend.get_vocab(with_added_tokens=True) if token not in added)


class CharacterTokenizer(Tokenizer):
    """One id per character.

    >>> CharacterTokenizer.learn(["hello"]).encode("hole")
    [1, 3, 2, 0]
    """

    library = "a table of characters"
    missing_bytes: tuple[int, ...] = ()  # type: ignore[assignment]  # what is missing is a character, and refused

    @classmethod
    def learn(cls, texts: Iterable[str], *, with_eod: bool = False, name: str = "characters") -> "CharacterTokenizer":
        """All characters of the texts in the order of their numbers, and behind them an end of document."""
        letters: set[str] = set()
        for text in texts:
            letters.update(text)
        if not letters:
            raise TokenizerError("a vocabulary of characters: the text has none. Give text with at least one.")
        return cls.from_ids({character: i for i, character in enumerate(sorted(letters))}, name=name, with_eod=with_eod)

    @classmethod
    def from_ids(cls, ids: Mapping[str, int], *, name: str, with_eod: bool = False) -> "CharacterTokenizer":
        """From the id of each character."""
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(ids)))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(_ONE_CHARACTER), "isolated")
        backend.decoder = tokenizers.decoders.Fuse()
        if with_eod:
            backend.add_special_tokens([tokenizers.AddedToken(GPT2_EOD, special=True, normalized=False)])
        return cls(backend, name=name)

    def encode(self, text: str) -> list[int]:
        require_text(text)
        ids: list[int] = []
        at = 0
        for piece in re.split(self._special_pattern, text) if self._special else [text]:
            ids += [self._special[piece]] if piece in self._special else self._lookup(piece, at)
            at += len(piece)
        return ids

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def _added_before(self) -> list[int]:
        return []

    def _lookup(self, text: str, start: int) -> list[int]:
        wanted = np.frombuffer(text.encode("utf-32-le"), _UNICODE)
        characters, ids = self._table
        places = np.minimum(np.searchsorted(characters, wanted), len(characters) - 1)
        unknown = np.flatnonzero(characters[places] != wanted)
        if len(unknown):
            at = int(unknown[0])
            raise TokenizerError(
                f"{self.name}: {text[at]!r} (U+{ord(text[at]):04X}), character {start + at + 1} of the text, is not "
                f"among its {len(characters)} characters. Leave it out, or use a tokenizer that was learned from text "
                "which has it."
            )
        return ids[places].tolist()

    @cached_property
    def _special(self) -> dict[str, int]:
        return {token.content: i for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _special_pattern(self) -> str:
        return f"({'|'.join(re.escape(token) for token in self._special)})"

    @cached_property
    def _table(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the characters, rising, and the id of each."""
        known = sorted((ord(token), i) for token, i in self._vocabulary().items() if token not in self._special)
        characters, ids = zip(*known, strict=True)
        return np.array(characters, _UNICODE), np.array(ids, np.int64)

    @cached_property
    def byte_lengths(self) -> np.ndarray:  # type: ignore[override]
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self._vocabulary().items():
            lengths[i] = 0 if token in self._special else len(token.encode())
        return lengths
