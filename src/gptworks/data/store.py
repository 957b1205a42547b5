"""A store: tokens on disk, who made them and with which tokenizer. Megatron's .bin/.idx pair and a JSON sidecar."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.data.formats import megatron
from gptworks.data.formats.megatron import beside
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

SIDECAR_VERSION = 1


@dataclass(frozen=True)
class Sidecar:
    """What `PREFIX.json` says. A pair made by Megatron has none."""

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
    format: str = "gptworks-store"
    version: int = SIDECAR_VERSION

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Sidecar":
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            version = values["version"]
            if version != SIDECAR_VERSION:
                raise DataError(f"{path}: version {version}, needed {SIDECAR_VERSION}. Prepare the data again.")
            sidecar = cls(**values)
            for name, kind in _SIDECAR_TYPES.items():
                if not isinstance(getattr(sidecar, name), kind):
                    raise ValueError(f"{name} is {getattr(sidecar, name)!r}")  # noqa: TRY004
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
}


class Store:
    """Read access to tokens by memory mapping."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(str(prefix).removesuffix(".bin").removesuffix(".idx"))
        self.index = megatron.read_index(self.prefix)
        self.tokens = megatron.map_tokens(self.prefix, self.index)
        sidecar = beside(self.prefix, ".json")
        self.sidecar = Sidecar.read(sidecar) if sidecar.is_file() else None
        if self.sidecar:
            self._check_against(self.sidecar, sidecar)

    def _check_against(self, sidecar: Sidecar, file: Path) -> None:
        for what, described, found in (
            ("tokens", sidecar.tokens, len(self.tokens)),
            ("documents", sidecar.documents, self.num_documents),
        ):
            if described != found:
                raise DataError(f"{file}: describes {described} {what}, the store has {found}. Prepare the data again.")
        index_file = beside(self.prefix, ".idx")
        found_hash = hashlib.sha256(index_file.read_bytes()).hexdigest()
        needed_hash = sidecar.sha256.get(".idx", found_hash)
        if found_hash != needed_hash:
            raise DataError(
                f"{index_file}: sha256 {found_hash[:12]}..., but {file.name} says {needed_hash[:12]}.... The file is "
                "damaged or belongs to another store: copy or prepare it again."
            )

    @property
    def num_documents(self) -> int:
        return len(self.index.documents) - 1

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """Token offset of each sequence, and of the end."""
        return np.concatenate([[0], np.cumsum(self.index.sizes, dtype=np.int64)])

    @cached_property
    def document_starts(self) -> np.ndarray:
        """Token offset of each document, and of the end."""
        return self.sequence_starts[self.index.documents]

    @cached_property
    def identity(self) -> str:
        """What a checkpoint remembers of the data: the hash of the sidecar's hashes, or of the index itself."""
        if self.sidecar and self.sidecar.sha256:
            text = json.dumps(self.sidecar.sha256, sort_keys=True).encode()
        else:
            text = self.index.sizes.tobytes() + bytes(self.tokens[:4096].tobytes())
        return hashlib.sha256(text).hexdigest()

    def load_tokenizer(self) -> Tokenizer | None:
        """The tokenizer this store was made with; None where nobody wrote it down."""
        if self.sidecar is None:
            return None
        name = self.sidecar.tokenizer
        tokenizer = Tokenizer.from_pretrained(name if name == "gpt2" else self.prefix.parent / name)
        tokenizer.require(self.sidecar.tokenizer_identity, what=f"{self.prefix}.bin")
        return tokenizer.with_eod(self.sidecar.eod_id)
