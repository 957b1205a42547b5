"""Paddle's pair (PaddleNLP, FleetX). `X_ids.npy`: the tokens. `X_idx.npz`: `lens`, tokens of each sequence (int32), and
`docs`, sequences before each document, starting at 0 (int64). Both exactly as numpy saves them.
"""

from pathlib import Path

import numpy as np

from gptworks.data.formats import npy
from gptworks.data.formats.contents import Contents, blocks, check_sizes_fit_32_bits, checked_documents, checked_sizes
from gptworks.data.formats.file_names import beside
from gptworks.errors import DataError

NAME = "paddle"
TITLE = "Paddle _ids.npy/_idx.npz"
KEEPS_SEQUENCES = True
NEEDS_ROWS = False
LARGEST_ID: int | None = None
TOKENS, INDEX = "_ids.npy", "_idx.npz"


def find(path: Path) -> Path | None:
    """X_ids.npy, when `path` is X or either file. Half a pair is claimed too: reading it says what is missing."""
    prefix = prefix_of(path)
    tokens, index = beside(prefix, TOKENS), beside(prefix, INDEX)
    return tokens if tokens.is_file() or index.is_file() else None


def files(main: Path) -> list[Path]:
    return [main, beside(prefix_of(main), INDEX)]


def sidecar(main: Path) -> Path:
    return beside(main, ".json")


def read(main: Path) -> Contents:
    index = beside(prefix_of(main), INDEX)
    for file in (main, index):
        if not file.is_file():
            raise DataError(f"{file}: no such file. Needed: the pair {main.name} and {index.name}.")
    tokens = npy.map_array(main)
    sizes = checked_sizes(npy.read_small_member(index, "lens"), len(tokens), index, "lens")
    if set(npy.members(index)) <= {"lens", "sents"}:  # older tools: each sequence is a document
        return Contents(tokens, sizes, np.arange(len(sizes) + 1, dtype=np.int64))
    documents = checked_documents(npy.read_small_member(index, "docs"), len(sizes), index, "docs")
    return Contents(tokens, sizes, documents)


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    tokens, index = beside(prefix, TOKENS), beside(prefix, INDEX)
    check_sizes_fit_32_bits(contents.sizes, index)
    dtype = dtype_of(contents, vocab_size)
    with tokens.open("wb") as file:
        npy.write_array(file, dtype, contents.num_tokens, blocks(contents.tokens, dtype, tokens))
    with index.open("wb") as file:  # opened here: given a name, numpy may add another suffix
        np.savez(file, lens=contents.sizes.astype("<i4"), docs=contents.documents.astype("<i8"))
    return [tokens, index]


def dtype_of(contents: Contents, vocab_size: int | None) -> np.dtype:
    """Paddle's rule, which is not Megatron's: 65500 to 65534 tokens fit uint16 here and not there."""
    if vocab_size is not None:
        return np.dtype("<u2" if vocab_size < 65535 else "<i4")
    return np.dtype("<u2" if contents.tokens.dtype == np.uint16 else "<i4")


def prefix_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(TOKENS).removesuffix(INDEX))
