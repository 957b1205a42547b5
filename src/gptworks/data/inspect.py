"""What is in a dataset, and what is wrong with it."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.data.store import Store, sha256_of
from gptworks.tokenizer import Tokenizer

_SCAN_TOKENS = 200_000_000  # ids looked at by `inspect`; `verify` looks at all
_STEP = 1 << 22
_SHOWN_TOKENS = 120


@dataclass(frozen=True)
class Report:
    store: Store
    tokenizer: Tokenizer | None
    lowest: int
    highest: int
    scanned: int  # tokens that were looked at
    eod_count: int | None  # among them
    damage: list[str] = field(default_factory=list)  # what cannot be right
    remarks: list[str] = field(default_factory=list)  # what the user may want to know

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, up to, how many) documents by their number of tokens, in powers of two; empty ones apart."""
        lengths = np.diff(self.store.document_starts)
        bins = np.where(lengths > 0, np.floor(np.log2(np.maximum(lengths, 1))).astype(int) + 1, 0)
        counts = np.bincount(bins)
        return [(0, 0, int(n)) if k == 0 else (2 ** (k - 1), 2**k - 1, int(n)) for k, n in enumerate(counts) if n]

    def first_document(self) -> np.ndarray:
        starts = self.store.document_starts
        end = int(starts[1]) if len(starts) > 1 else 0
        return self.store.tokens[0 : min(end, _SHOWN_TOKENS)]

    def as_dict(self) -> dict[str, Any]:
        store, lengths = self.store, np.diff(self.store.document_starts)
        first = self.first_document()
        return {
            "format": store.located.format.NAME,
            "files": {str(file): file.stat().st_size for file in store.located.files},
            "sidecar": str(store.located.sidecar) if store.sidecar else None,
            "dtype": store.tokens.dtype.name,
            "documents": store.num_documents if store.contents.has_documents else None,
            "sequences": len(store.contents.sizes),
            "tokens": len(store.tokens),
            "kind": "rows" if store.contents.is_rows else store.sidecar.kind if store.sidecar else "text",
            "shortest": int(lengths.min()) if len(lengths) else 0,
            "mean": float(lengths.mean()) if len(lengths) else 0.0,
            "longest": int(lengths.max()) if len(lengths) else 0,
            "histogram": self.histogram() if store.contents.has_documents else [],
            "lowest_id": self.lowest,
            "highest_id": self.highest,
            "tokens_scanned": self.scanned,
            "eod_count": self.eod_count,
            "tokenizer": self.tokenizer.name if self.tokenizer else None,
            "vocab_size": self.tokenizer.vocab_size if self.tokenizer else None,
            "first_document": first.tolist(),
            "first_text": self.tokenizer.decode(first) if self.tokenizer and not self.damage else None,
            "problems": self.damage,
            "remarks": self.remarks,
        }


def inspect(store: Store, tokenizer: Tokenizer | None = None, *, everything: bool = False) -> Report:
    """Look at the ids (`everything`: at all of them) and at what is said about them."""
    tokenizer = tokenizer or store.load_tokenizer()
    limit = len(store.tokens) if everything else min(len(store.tokens), _SCAN_TOKENS)
    eod_id = tokenizer.eod_id if tokenizer else store.sidecar.eod_id if store.sidecar else None
    lowest = highest = 0
    eods = scanned = 0
    for block in _blocks(store, limit):
        lowest = int(block.min()) if not scanned else min(lowest, int(block.min()))
        highest = max(highest, int(block.max()))
        eods += int((block == eod_id).sum()) if eod_id is not None else 0
        scanned += len(block)
    report = Report(store, tokenizer, lowest, highest, scanned, eods if eod_id is not None else None)
    report.damage.extend(_damage(report))
    report.remarks.extend(_remarks(report))
    return report


def _blocks(store: Store, limit: int) -> Iterator[np.ndarray]:
    for start in range(0, limit, _STEP):
        yield store.tokens[start : min(limit, start + _STEP)]


def _damage(report: Report) -> Iterator[str]:
    store, tokenizer = report.store, report.tokenizer
    vocab_size = tokenizer.vocab_size if tokenizer else store.sidecar.vocab_size if store.sidecar else None
    if report.lowest < 0:
        yield f"id {report.lowest} is negative"
    if vocab_size is not None and report.highest >= vocab_size:
        yield f"id {report.highest} is outside the vocabulary of {vocab_size}"
    if store.sidecar and store.sidecar.eod_appended and len(store.tokens) and report.eod_count == 0:
        yield "the sidecar says that documents end with the end-of-document token, but it does not occur"


def _remarks(report: Report) -> Iterator[str]:
    store = report.store
    empty = int((np.diff(store.document_starts) == 0).sum())
    if not len(store.tokens):
        yield "it has no tokens"
    elif empty:
        yield f"{empty:,} documents have no tokens"
    if store.sidecar is None:
        known = "checksums" if report.tokenizer else "tokenizer and checksums"
        yield f"no sidecar: {known} are not known"


def damage_in(store: Store, tokenizer: Tokenizer | None = None, *, checksums: bool = True) -> list[str]:
    """All that is wrong with a store that could be opened: hashes first, and every id where those agree."""
    wrong = checksum_problems(store) if checksums else []
    return wrong or [f"{store.file}: {each}" for each in inspect(store, tokenizer, everything=True).damage]


def checksum_problems(store: Store) -> list[str]:
    """Files that are not what the sidecar says. Empty also where there is no sidecar."""
    if store.sidecar is None:
        return []
    problems = []
    for suffix, needed in sorted(store.sidecar.sha256.items()):
        file = _named(store, suffix)
        if file is None:
            problems.append(f"{store.located.sidecar}: speaks of a file ending in '{suffix}', which is not there")
        elif (actual := sha256_of(file)) != needed:
            problems.append(f"{file}: sha256 {actual[:12]}..., but the sidecar says {needed[:12]}...")
    return problems


def _named(store: Store, suffix: str) -> Path | None:
    return next((file for file in store.located.files if file.name.endswith(suffix) and file.is_file()), None)
