"""A store of few documents is cut by position, so that a share of it can be held out."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from gptworks.data.formats import megatron
from gptworks.data.formats.contents import Contents
from gptworks.data.split import boundaries
from gptworks.data.store import Sidecar, Store, sha256_of


def cut_by_position(prefix: Path, shares: Sequence[float]) -> int:
    """Into how many pieces of equal length the text was cut; 0 where its documents can be shared out as they are.

    The tokens stay as they are; the index of the store has the pieces where it had the documents.
    """
    store = Store(prefix)
    pieces = _pieces_needed(shares, store.num_documents, len(store.tokens))
    if not pieces or (store.sidecar and store.sidecar.kind != "text"):
        return 0
    edges = np.linspace(0, len(store.tokens), pieces + 1).round().astype(np.int64)
    contents = Contents(store.tokens, np.diff(edges), np.arange(pieces + 1, dtype=np.int64))
    file, dtype = store.located.sidecar, store.tokens.dtype
    index = megatron.write_index_file(prefix, dtype, contents)
    sidecar = Sidecar.read(file)
    replace(sidecar, documents=pieces, sha256={**sidecar.sha256, ".idx": sha256_of(index)}).write(file)
    return pieces


def _pieces_needed(shares: Sequence[float], documents: int, tokens: int) -> int:
    """The least number of pieces of which training and the held-out split both get some; 0: so they do already."""
    held_out = shares[1] if len(shares) > 1 else 0.0
    if not held_out or not shares[0] or _has_both(shares, documents):
        return 0
    needed = max(2, math.ceil(sum(shares) / held_out))
    while needed < tokens and not _has_both(shares, needed):
        needed += 1
    return needed if needed <= tokens else 0


def _has_both(shares: Sequence[float], documents: int) -> bool:
    first, end_of_train, end_of_held_out, _ = boundaries(shares, documents)
    return first < end_of_train < end_of_held_out
