"""The tokenizer everybody uses: Hugging Face `tokenizers` with an identity that travels with data and weights."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from gptworks import file_errors, json_text, limits, model_hub, tokenizer_files
from gptworks.errors import TokenizerError
from gptworks.tokenizer import special_tokens
from gptworks.tokenizer.bundled import IDENTITY, PADDING, SIZE, gpt2_files
from gptworks.tokenizer.rows import arrange
from gptworks.tokenizer.special_tokens import SpecialTokens

GPT2_EOD = "<|endoftext|>"
# Settings of a model and of an added token that change ids where they are set; most files leave them out or off.
_RARE_SETTINGS = ("continuing_subword_prefix", "dropout", "end_of_word_suffix", "fuse_unk", "ignore_merges", "unk_id")
_RARE_FLAGS = ("lstrip", "rstrip", "single_word")


@dataclass(frozen=True)
class KindOfFile:
    """A file, other than tokenizer.json and vocabulary with merges, that a tokenizer can be read from."""

    suffix: str
    find: Callable[[Path], Path | None]  # in a folder
    read: Callable[[Path], "Tokenizer"]


# Filled by `kinds.py`, since each kind is a Tokenizer itself.
KINDS_OF_FILES: list[KindOfFile] = []
KINDS_OF_VOCABULARIES: list[tuple[Callable[[tokenizers.Tokenizer], bool], type["Tokenizer"]]] = []  # of tokenizer.json


class Tokenizer:
    """Text to ids and back.

    >>> tokenizer = Tokenizer.from_pretrained("gpt2")
    >>> tokenizer.encode("Hello world")
    [15496, 995]
    """

    library = "tokenizers"  # that encodes
    file_suffix = ".tokenizer.json"  # of what save_file writes, beside a store
    # Tried in this order when a tokenizer does not say which token ends a document.
    eod_names: tuple[str, ...] = (GPT2_EOD, "<|end_of_text|>", "</s>", "<eod>", "<|eos|>", "[EOS]", "<eos>")

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eod_token: str | None = None,
        special: SpecialTokens = SpecialTokens(),  # noqa: B008
    ) -> None:
        self.backend, self.name, self.special = backend, name, special
        vocab = self._vocabulary()
        if not vocab:
            raise TokenizerError(f"{name}: the vocabulary is empty. Needed: at least one token.")
        self.vocab_size = max(vocab.values()) + 1
        _require_few_gaps(vocab, self.vocab_size, name)
        names = (eod_token,) if eod_token else self.eod_names
        self.eod_token = next((token for token in names if token in vocab), None)
        if eod_token and self.eod_token is None:
            raise TokenizerError(f"{name}: the end-of-document token {eod_token!r} is not in the vocabulary.")
        self.eod_id = vocab[self.eod_token] if self.eod_token else None

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where something says which it is: `encode_prompt` may put it there."""
        return self._vocabulary().get(self.special.bos_token or "")

    def _vocabulary(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    # Where tokenizers come from

    @classmethod
    def from_pretrained(cls, source: str | Path) -> "Tokenizer":
        """`gpt2` (a folder of that name is `./gpt2`), a folder with a tokenizer, a `tokenizer.json`, `.model` or
        nanoGPT's `meta.pkl`, the folder of a run or of one of its checkpoints.

        Other names of OpenAI's GPT-2 (gpt2-medium-en, openai-community/gpt2-xl, ...) mean the same tokenizer unless
        there is such a folder; any other name is looked for in $GPTWORKS_HOME/models and the Hugging Face cache.

        >>> Tokenizer.from_pretrained("gpt2-medium-en")
        Tokenizer('gpt2', vocab_size=50257, eod='<|endoftext|>')
        """
        if str(source) == "gpt2":
            vocab_file, merge_file = gpt2_files()
            tokenizer = cls.from_files(vocab_file, merge_file, name="gpt2")
            tokenizer.__dict__["identity"] = IDENTITY  # where the cached property would put it
            return tokenizer
        path = Path(source)
        if path.is_file():
            read = next((kind.read for kind in KINDS_OF_FILES if kind.suffix == path.suffix), cls._from_json)
            return read(path)
        if path.is_dir():
            if (path / tokenizer_files.JSON).is_file():
                return cls._from_json(path / tokenizer_files.JSON)
            for vocab, merges in tokenizer_files.PAIRS:
                if (path / vocab).is_file() and (path / merges).is_file():
                    return cls.from_files(path / vocab, path / merges)
            for kind in KINDS_OF_FILES:
                if file := kind.find(path):
                    return kind.read(file)
            if (inside := model_hub.tokenizer_in_run(path)) is not None:
                return cls.from_pretrained(inside)
            file_errors.refuse_unreadable(path)
            raise TokenizerError(
                f"{path}: no tokenizer in this folder. Needed: tokenizer.json, or vocab.json with merges.txt, "
                "or one sentencepiece .model, or nanoGPT's meta.pkl, or the folder of a run."
            )
        if str(source) in model_hub.GPT2_NAMES:
            return cls.from_pretrained("gpt2")
        if folder := model_hub.find_tokenizer(str(source)):
            return cls.from_pretrained(folder)
        file_errors.refuse_unreadable(Path(source))
        hint = " Characters are learned from a text: `gptworks prepare --train-tokenizer chars`, data.tokenizer=chars."
        raise TokenizerError(
            f"{source}: not a tokenizer. Needed: 'gpt2', a folder, a tokenizer.json or a sentencepiece .model file."
            + (hint if str(source).lower() in ("char", "chars", "character", "characters") else "")
        )

    @classmethod
    def from_files(cls, vocab_file: str | Path, merge_file: str | Path, *, name: str = "") -> "Tokenizer":
        """Byte-level BPE from `vocab.json` and `merges.txt`."""
        for file in (vocab_file, merge_file):
            if not Path(file).is_file():
                raise TokenizerError(f"{file}: no such file. Needed: a vocabulary (json) and a merges file (text).")
            require_small(Path(file))
        with _refusing(f"{vocab_file} and {merge_file} are not a BPE vocabulary and merges"):
            model = tokenizers.models.BPE.from_file(str(vocab_file), str(merge_file))
        backend = _byte_level(model)
        if GPT2_EOD in backend.get_vocab():
            backend.add_special_tokens([tokenizers.AddedToken(GPT2_EOD, special=True, normalized=True)])
        return cls(backend, name=name or str(vocab_file))

    @classmethod
    def _from_json(cls, path: Path) -> "Tokenizer":
        file_errors.refuse_unreadable(path)
        require_small(path)
        with _refusing(f"{path}: not a tokenizer.json"):
            backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        kind = next((kind for is_it, kind in KINDS_OF_VOCABULARIES if is_it(backend)), cls)
        beside = path.with_name(special_tokens.CONFIG)
        special = special_tokens.special_tokens_of(beside)
        return kind(backend, name=str(path), eod_token=special_tokens.eos_of(beside), special=special)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, *, name: str = "trained") -> "Tokenizer":
        """A new byte-level BPE of `vocab_size` tokens, the last of which is the end of document."""
        alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
        smallest = len(alphabet) + 1
        if vocab_size < smallest:
            raise TokenizerError(
                f"vocabulary of {vocab_size} tokens is too small: 256 bytes and the end of document need {smallest}."
            )
        learner = _byte_level(tokenizers.models.BPE())
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size - 1, initial_alphabet=alphabet, show_progress=False, special_tokens=[]
        )
        learner.train_from_iterator(texts, trainer)
        learner.add_special_tokens([tokenizers.AddedToken(GPT2_EOD, special=True, normalized=True)])
        return cls(learner, name=name)

    def with_eod(self, eod_id: int | None) -> "Tokenizer":
        """The same tokenizer with another end of document: what a store was made with, whatever would be guessed."""
        if eod_id is None or eod_id == self.eod_id:
            return self
        token = next((token for token, i in self._vocabulary().items() if i == eod_id), None)
        if token is None:
            raise TokenizerError(
                f"{self.name}: the end-of-document id {eod_id} is not in its {self.vocab_size} tokens."
            )
        other = copy.copy(self)
        other.eod_token, other.eod_id = token, eod_id
        return other

    # Text and ids

    def __call__(
        self,
        text: str | Iterable[str],
        *,
        padding: bool | str = False,
        max_length: int | None = None,
        truncation: bool = False,
        return_tensors: str | None = None,
    ) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of one text or of several, which models take.

        `padding`: True fills up to the longest row, "max_length" to `max_length`; on the right, with the id of the end
        of document and mask 0. A text longer than `max_length` is an error, or cut with `truncation=True`.
        `return_tensors`: lists (None), numpy ("np") or torch ("pt").

        >>> Tokenizer.from_pretrained("gpt2")(["Hello world", "Hi"], padding=True)
        {'input_ids': [[15496, 995], [17250, 50256]], 'attention_mask': [[1, 1], [1, 0]]}
        """
        texts = [text] if isinstance(text, str) or not isinstance(text, Iterable) else list(text)
        for item in texts:
            if not isinstance(item, str):
                raise TokenizerError(f"text: got {item!r}; needs a text or a list of texts.")
        arranged = arrange(
            self.encode_batch(texts),
            pad_id=self.eod_id,
            padding=padding,
            max_length=max_length,
            truncation=truncation,
            return_tensors=return_tensors,
        )
        if isinstance(text, str) and return_tensors is None:
            return {name: rows[0] for name, rows in arranged.items()}
        return arranged

    def encode(self, text: str) -> list[int]:
        """The ids of a text, and nothing else: no token is put before or after them."""
        self._require_encodable(text)
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that a model is to go on with: where its tokenizer has it so, a first token before them.

        >>> Tokenizer.from_pretrained("gpt2").encode_prompt("Hello world")
        [15496, 995]
        """
        return [*self.prompt_start, *self.encode(text)]

    @cached_property
    def prompt_start(self) -> list[int]:
        """What comes before a prompt: as tokenizer_config.json says, else as tokenizer.json's post_processor has it."""
        if self.special.adds_bos is not None:
            return [self.bos_id] if self.special.adds_bos and self.bos_id is not None else []
        return self._added_before()

    def _added_before(self) -> list[int]:
        plain, whole = (self.backend.encode("a", add_special_tokens=added).ids for added in (False, True))
        starts = range(len(whole) - len(plain) + 1)
        return whole[: next((at for at in starts if whole[at : at + len(plain)] == plain), 0)]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        for text in texts:
            self._require_encodable(text)
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def _require_encodable(self, text: str) -> None:
        require_text(text)
        if self.missing_bytes and not set(self.missing_bytes).isdisjoint(text.encode()):
            self._require_no_missing_byte(text)

    def _require_no_missing_byte(self, text: str) -> None:
        """Added tokens are matched before the bytes are looked at, and a normalizer may have replaced a character."""
        added = sorted((token.content for token in self.backend.get_added_tokens_decoder().values()), key=len)
        between = re.split("|".join(re.escape(token) for token in reversed(added)), text) if added else [text]
        normalizer = self.backend.normalizer
        for part in between:
            for character in normalizer.normalize_str(part) if normalizer else part:
                byte = next((byte for byte in character.encode() if byte in self.missing_bytes), None)
                if byte is not None:
                    raise TokenizerError(
                        f"{self.name}: no token for byte 0x{byte:02x} of {character!r}, which would vanish from the "
                        "text. Remove such characters, or use a tokenizer with all 256 bytes: gpt2, or one made with "
                        "--train-tokenizer."
                    )

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens included.

        >>> Tokenizer.from_pretrained("gpt2").decode([15496, 995, 50256])
        'Hello world<|endoftext|>'
        """
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=False))

    @cached_property
    def byte_lengths(self) -> np.ndarray | None:
        """How many bytes of text each id stands for (special tokens: none); None where the vocabulary does not tell."""
        alphabet = set(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        added = {token.content: token.special for token in self.backend.get_added_tokens_decoder().values()}
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.backend.get_vocab(with_added_tokens=True).items():
            if token in added:
                lengths[i] = 0 if added[token] else len(token.encode())
            elif alphabet.issuperset(token):
                lengths[i] = len(token)  # one letter of the alphabet is one byte
            else:
                return None
        return lengths

    @cached_property
    def missing_bytes(self) -> tuple[int, ...]:
        """Bytes that a byte-level BPE drops without a word: it has no token for them, nor one for the unknown."""
        model = self.backend.model
        missing = tuple(byte for byte, letter in enumerate(_byte_letters()) if model.token_to_id(letter) is None)
        if not missing:
            return ()
        spec = self.spec
        is_bpe = spec["model"]["type"] == "BPE" and _has_byte_level(spec["pre_tokenizer"])
        has_other_way = spec["model"].get("unk_token") or spec["model"].get("byte_fallback")
        return missing if is_bpe and not has_other_way else ()

    # Identity and files

    @cached_property
    def spec(self) -> dict[str, Any]:
        """What tokenizer.json says."""
        return json_text.loads(self.backend.to_str())

    @cached_property
    def identity(self) -> str:
        """sha256 of all that decides the ids. Equal for the same tokenizer read from different kinds of file."""
        spec = self.spec
        model = spec["model"]
        parts = {
            "model": {
                "type": model["type"],
                "unk": model.get("unk_token"),
                "byte_fallback": model.get("byte_fallback"),
                **{name: model[name] for name in _RARE_SETTINGS if model.get(name)},
            },
            "vocab": sorted(model["vocab"].items()) if isinstance(model["vocab"], dict) else model["vocab"],
            "merges": [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])],
            "added": sorted(
                [token["id"], token["content"], *(flag for flag in _RARE_FLAGS if token[flag])]
                for token in spec["added_tokens"]
            ),
            "normalizer": spec["normalizer"],
            "pre_tokenizer": _what_decides_ids(spec["pre_tokenizer"]),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    def save(self, folder: str | Path) -> None:
        """tokenizer.json and what `transformers` wants beside it."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.save_file(folder / "tokenizer.json")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.special.as_config(self.eod_token)}
        (folder / special_tokens.CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    def save_file(self, path: Path) -> None:
        """The tokenizer in one file, which `from_pretrained` reads; not its choice of the end of document."""
        self.backend.save(str(path))

    def require(self, identity: str, *, source: str) -> None:
        """Stop unless this is the tokenizer that `source` was made with."""
        if identity and identity != self.identity:
            raise TokenizerError(
                f"{source} was made with another tokenizer: got {self.name} ({self.identity[:12]}), "
                f"needed {identity[:12]}. Prepare the data again with this tokenizer, or use the one it was made with."
            )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, vocab_size={self.vocab_size}, eod={self.eod_token!r})"


def require_text(text: str) -> None:
    """Half of a surrogate pair is what is left of a broken \\uXXXX escape or of bytes that were not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(
            f"text has {text[error.start]!r} at character {error.start}, which is not a character. Fix or remove it."
        ) from None


def require_small(file: Path) -> None:
    """Libraries read a tokenizer's file into memory, and take many times its size."""
    size, most = file.stat().st_size, limits.TOKENIZER_BYTES.value
    if size > most:
        raise TokenizerError(
            f"{file}: {size:,} bytes, and a tokenizer has at most {most:,}. Name another file. "
            + limits.TOKENIZER_BYTES.advice(size)
        )


def _require_few_gaps(vocab: dict[str, int], vocab_size: int, name: str) -> None:
    """Tables are as long as the largest id, whoever has it."""
    gap = vocab_size - len(vocab)
    if gap > limits.VOCAB_GAP.value:
        highest = max(vocab, key=lambda token: vocab[token])
        raise TokenizerError(
            f"{name}: the token {highest[:40]!r} has the id {vocab_size - 1:,}, but there are only {len(vocab):,} "
            f"tokens: {gap:,} ids are of none, needed at most {limits.VOCAB_GAP.value:,}. Fix the id. "
            + limits.VOCAB_GAP.advice(gap)
        )


@contextmanager
def _refusing(action: str) -> Iterator[None]:
    """The library raises bare Exception, or panics, which is not even that."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise TokenizerError(f"{action}: {error}") from None


def _byte_level(model: tokenizers.models.Model) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def _byte_letters() -> list[str]:
    """The letter that stands for each byte: itself where it prints, else the next one from U+0100 on."""
    printing = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def _has_byte_level(pre_tokenizer: Any) -> bool:
    if not isinstance(pre_tokenizer, dict):
        return False
    parts = pre_tokenizer.get("pretokenizers", [])
    return pre_tokenizer.get("type") == "ByteLevel" or any(_has_byte_level(part) for part in parts)


def _what_decides_ids(pre_tokenizer: Any) -> Any:
    """Offsets do not change ids, and older files leave out use_regex, which is then on."""
    if isinstance(pre_tokenizer, dict) and pre_tokenizer.get("type") == "ByteLevel":
        return {
            "type": "ByteLevel",
            "add_prefix_space": pre_tokenizer.get("add_prefix_space", True),
            "use_regex": pre_tokenizer.get("use_regex", True),
        }
    return pre_tokenizer


def gpt2_for(vocab_size: int) -> Tokenizer | None:
    """GPT-2's, where a model has as many rows, or has been padded from there: for weights that come without any."""
    return Tokenizer.from_pretrained("gpt2") if SIZE <= vocab_size < SIZE + PADDING else None
