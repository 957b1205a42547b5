"""A store: tokens on disk in one of the known formats and, in a JSON sidecar, who made them with which tokenizer."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptworks import json_text
from gptworks.data.formats import registry
from gptworks.data.formats.contents import Tokens, document_starts
from gptworks.data.formats.registry import Located
from gptworks.data.text_files import is_text, matching
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer, nanogpt_meta
from gptworks.tokenizer.special_tokens import SpecialTokens

SIDECAR_VERSION = 1
INDEX_SUFFIXES = {".idx", "_idx.npz"}


@dataclass(frozen=True)
class Sidecar:
    """What the JSON file beside a dataset says. Datasets made by others have none."""

    kind: str  # "text", or "examples": each document is a prompt and a completion
    tokenizer: str  # "gpt2", or the name of the tokenizer file beside the store
    tokenizer_identity: str
    vocab_size: int
    eod_id: int | None
    eod_appended: bool
    documents: int
    tokens: int
    dtype: str
    sha256: dict[str, str] = field(default_factory=dict)  # file suffix -> hash
    data_format: str = "megatron"  # of the files it describes
    special: dict[str, Any] = field(default_factory=dict)  # of the tokenizer: what its own file does not say
    format: str = "gptworks-store"
    version: int = SIDECAR_VERSION

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self._values(), indent=2) + "\n", encoding="utf-8")

    def write_unfinished(self, path: Path) -> None:
        """What stands beside a dataset while its files are being put in place."""
        path.write_text(json.dumps({**self._values(), "unfinished": True}, indent=2) + "\n", encoding="utf-8")

    def _values(self) -> dict[str, Any]:
        """Without special tokens where there are none: earlier versions do not know of them."""
        return {name: value for name, value in asdict(self).items() if name != "special" or value}

    @classmethod
    def read(cls, path: Path) -> "Sidecar":
        try:
            values: dict[str, Any] = json_text.loads(path.read_text(encoding="utf-8"))
            version = values["version"]
            if version != SIDECAR_VERSION:
                raise DataError(f"{path}: version {version}, needed {SIDECAR_VERSION}. Prepare the data again.")
            if values.get("unfinished"):
                raise DataError(
                    f"{path}: this dataset is being written, or that was interrupted, and its files may be of two "
                    "datasets. Wait for it, or give the same command again."
                )
            sidecar = cls(**values)
            for name, kind in _SIDECAR_TYPES.items():
                if not isinstance(getattr(sidecar, name), kind):
                    raise ValueError(f"{name} is {getattr(sidecar, name)!r}")  # noqa: TRY004
            SpecialTokens.from_dict(sidecar.special)
            return sidecar
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}: not a store's sidecar ({error}). Remove it, or prepare the data again.") from None


_SIDECAR_TYPES: dict[str, Any] = {
    "kind": str,
    "tokenizer": str,
    "tokenizer_identity": str,
    "vocab_size": int,
    "eod_id": int | None,
    "eod_appended": bool,
    "documents": int,
    "tokens": int,
    "sha256": dict,
    "special": dict,
}


class Store:
    """Read access to the tokens of one dataset, whatever its format."""

    def __init__(self, path: str | Path | Located) -> None:
        self.located = path if isinstance(path, Located) else registry.locate(Path(path))
        self.contents = self.located.format.read(self.located.main)
        file = self.located.sidecar
        self.sidecar = Sidecar.read(file) if file.is_file() else None
        if self.sidecar:
            self._check_against(self.sidecar, file)

    def _check_against(self, sidecar: Sidecar, file: Path) -> None:
        if sidecar.data_format != self.located.format.NAME:
            raise DataError(
                f"{file}: describes a dataset of format {sidecar.data_format}, but {self.file} is of format "
                f"{self.located.format.NAME}. Remove it, or prepare the data again."
            )
        described = [("tokens", sidecar.tokens, len(self.tokens))]
        if self.contents.has_documents:
            described.append(("documents", sidecar.documents, self.num_documents))
        for unit, wanted, actual in described:
            if wanted != actual:
                raise DataError(f"{file}: describes {wanted} {unit}, the store has {actual}. Prepare the data again.")
        # The index is small and decides everything; the tokens themselves are hashed by `gptworks verify`.
        for suffix in set(sidecar.sha256) & INDEX_SUFFIXES:
            index = next(each for each in self.located.files if each.name.endswith(suffix))
            found_hash, needed_hash = sha256_of(index), sidecar.sha256[suffix]
            if found_hash != needed_hash:
                raise DataError(
                    f"{index}: sha256 {found_hash[:12]}..., but {file.name} says {needed_hash[:12]}.... The file is "
                    "damaged or belongs to another store: copy or prepare it again."
                )

    @property
    def file(self) -> Path:
        """The file of the tokens; the name to use in messages."""
        return self.located.files[0]

    @property
    def tokens(self) -> Tokens:
        return self.contents.tokens

    def facts(self) -> dict[str, Any]:
        """What is said of it to the reader of a run."""
        documents = self.num_documents if self.contents.has_documents else None
        return {"path": str(self.file), "tokens": len(self.tokens), "documents": documents}

    @property
    def num_documents(self) -> int:
        return self.contents.num_documents

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """Token offset of each sequence, and of the end."""
        return np.concatenate([[0], np.cumsum(self.contents.sizes, dtype=np.int64)])

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Token offset of each document, and of the end."""
        return document_starts(self.contents)

    @cached_property
    def identity(self) -> str:
        """What a checkpoint remembers of the data: the hash of the sidecar's hashes, or of the index itself."""
        if self.sidecar and self.sidecar.sha256:
            text = json.dumps(self.sidecar.sha256, sort_keys=True).encode()
        else:
            text = self.contents.sizes.tobytes() + bytes(self.tokens[:4096].tobytes())
        return hashlib.sha256(text).hexdigest()

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer this store was made with; None where nobody wrote it down."""
        if self.sidecar is None and (meta := self._meta_of_nanogpt()):
            return nanogpt_meta.read_tokenizer(meta) if nanogpt_meta.read(meta).ids else None
        if self.sidecar is None or not self.sidecar.tokenizer:
            return None
        name = self.sidecar.tokenizer
        tokenizer = Tokenizer.from_pretrained(name if name == "gpt2" else self.located.main.parent / name)
        tokenizer.require(self.sidecar.tokenizer_identity, source=str(self.file))
        if self.sidecar.special:
            tokenizer.special = SpecialTokens.from_dict(self.sidecar.special)
        return tokenizer.with_eod(self.sidecar.eod_id)

    def _meta_of_nanogpt(self) -> Path | None:
        """The file in which nanoGPT keeps the characters of the data in its folder."""
        file = self.located.main.with_name(nanogpt_meta.NAME)
        return file if self.located.format.NAME == "nanogpt" and file.is_file() else None


def vocabulary_of(paths: Sequence[str], tokenizer_name: str = "") -> int | None:
    """How many tokens the tokenizer of datasets has; where they do not say, the one that is named. None: not known."""
    sizes = []
    try:
        for located in (each for path in paths for each in locate_stores(path)):
            if located.sidecar.is_file():
                sizes.append(Sidecar.read(located.sidecar).vocab_size)
            elif (tokenizer := Store(located).load_tokenizer()) is not None:
                sizes.append(tokenizer.vocab_size)
    except DataError:
        return None  # opening them to train says what is wrong
    if not sizes and tokenizer_name:
        sizes.append(Tokenizer.from_pretrained(tokenizer_name).vocab_size)
    return max(sizes, default=None)


def sha256_of(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def locate_stores(path: str) -> list[Located]:
    """Every dataset that a path of the configuration means: a prefix or file, all in a folder, or all that a pattern
    such as `shards/train_*.bin` matches; in the order of their names."""
    if Path(path).is_dir():
        located = registry.locate_all(Path(path))
        if not located:
            kinds = ", ".join(registry.FORMATS)
            raise DataError(f"{path}: no dataset in this folder. Formats: {kinds}. `gptworks prepare` makes one.")
        return located
    if (files := matching(path)) is not None:
        matched = {each.main: each for each in map(registry.locate, map(Path, files))}
        if not matched:
            raise DataError(f"{path}: no file matches this pattern.")
        return [matched[main] for main in sorted(matched)]
    return [registry.locate(Path(path), also="a file or folder of text, or ")]


def is_raw_text(path: str) -> bool:
    """A file, folder or pattern of text in which there is no dataset."""
    if not is_text(path):
        return False
    if (matched := matching(path)) is not None:
        return all(is_raw_text(each) for each in matched)
    if Path(path).is_dir():
        return not registry.locate_all(Path(path))
    return all(format_.find(Path(path)) is None for format_ in registry.FORMATS.values())
