"""Where a sample came from: its store, its documents, the characters in them, and the text itself."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from gptworks.data.store import Store
from gptworks.data.windows import LocatedSamples
from gptworks.tokenizer import Tokenizer

_MOST_DECODED = 2**20  # tokens before a piece that are decoded to count its characters


@dataclass(frozen=True)
class Piece:
    """What a sample has of one document."""

    document: int | None  # None where the store does not say where documents end
    tokens: tuple[int, int]  # first and end, counted within the document, or within the store
    characters: tuple[int, int] | None  # the same; None where nobody knows the tokenizer, or too many come before
    text: str | None


@dataclass(frozen=True)
class Origin:
    store: str
    pieces: list[Piece]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def origins(
    stores: Sequence[Store], samples: LocatedSamples, places: Sequence[int], tokenizer: Tokenizer | None
) -> list[Origin]:
    """Where the samples at those places in the order come from; `stores` are those of its sources."""
    origins = []
    for place in places:
        ((source, number),) = samples.where(place, 1)
        store = stores[source]
        pieces = [
            piece
            for first, end in samples.sources[source].spans(number)
            for piece in _pieces(store, first, end, tokenizer)
        ]
        origins.append(Origin(str(store.file), pieces))
    return origins


def _pieces(store: Store, first: int, end: int, tokenizer: Tokenizer | None) -> Iterator[Piece]:
    """Tokens of a store, cut where its documents end."""
    if not store.contents.has_documents:
        yield _piece(store, None, 0, first, end, tokenizer)
        return
    starts = store.document_starts
    for document in range(int(np.searchsorted(starts, first, side="right")) - 1, len(starts) - 1):
        begin, stop = int(starts[document]), int(starts[document + 1])
        if begin >= end:
            return
        if begin < stop:
            yield _piece(store, document, begin, max(first, begin), min(end, stop), tokenizer)


def _piece(store: Store, document: int | None, begin: int, first: int, end: int, tokenizer: Tokenizer | None) -> Piece:
    tokens = (first - begin, end - begin)
    if tokenizer is None:
        return Piece(document, tokens, None, None)
    text = tokenizer.decode(store.tokens[first:end].tolist())
    if first - begin > _MOST_DECODED:
        return Piece(document, tokens, None, text)
    # A token may end within a character, which then begins the piece: it is not counted as one that came before.
    before = len(tokenizer.decode(store.tokens[begin:first].tolist()).rstrip("\ufffd"))
    until = len(tokenizer.decode(store.tokens[begin:end].tolist()).rstrip("\ufffd"))
    return Piece(document, tokens, (before, until), text)
