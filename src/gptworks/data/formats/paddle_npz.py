"""Paddle's older single file `X_ids.npz`: `ids`, all tokens, and `lens`, tokens of each document, in the same type.

With uint16 a document of more than 65535 tokens has a length that does not fit; the tool that made these files let it
wrap around. Such a file is refused: where its documents end is lost.
"""

import zipfile
from pathlib import Path

import numpy as np

from gptworks.data.formats import npy
from gptworks.data.formats.contents import Contents, blocks, checked_sizes
from gptworks.data.formats.file_names import beside, files_of_one, sidecar_of_one
from gptworks.errors import DataError

NAME = "paddle-npz"
TITLE = "Paddle _ids.npz, the older single file"
KEEPS_SEQUENCES = False
NEEDS_ROWS = False
LARGEST_ID: int | None = None
SUFFIX, INDEX_OF_THE_PAIR = "_ids.npz", "_idx.npz"


def find(path: Path) -> Path | None:
    """X_ids.npz, when `path` is it or X; also any other .npz with exactly these two arrays."""
    if path.name.endswith(SUFFIX):
        return path if path.is_file() else None
    if path.name.endswith(".npz") and path.is_file():
        return path if _has_exactly_ids_and_lens(path) else None
    file = beside(path, SUFFIX)
    return file if file.is_file() else None


def _has_exactly_ids_and_lens(file: Path) -> bool:
    if file.name.endswith(INDEX_OF_THE_PAIR):
        return False
    try:
        return sorted(npy.members(file)) == ["ids", "lens"]
    except DataError:
        return False


files, sidecar = files_of_one, sidecar_of_one


def read(main: Path) -> Contents:
    if not main.is_file():
        raise DataError(f"{main}: no such file.")
    tokens = npy.read_member(main, "ids")
    lens = npy.read_small_member(main, "lens")
    missing = len(tokens) - int(lens.sum(dtype=np.int64))
    if missing and missing % 65536 == 0:
        raise DataError(
            f"{main}: lens adds up to {len(tokens) - missing} tokens, ids has {len(tokens)}. The difference is a "
            f"multiple of 65536: documents of more than 65535 tokens overflowed {lens.dtype.name} when it was made, "
            "and their ends are lost. Prepare the text again."
        )
    sizes = checked_sizes(lens, len(tokens), main, "lens")
    return Contents(tokens, sizes, np.arange(len(sizes) + 1, dtype=np.int64))


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    """One length a document: where its sequences end has no place in this format."""
    file = beside(prefix, SUFFIX)
    dtype = dtype_of(contents, vocab_size)
    starts = np.concatenate([[0], np.cumsum(contents.sizes, dtype=np.int64)])
    lens = np.diff(starts[contents.documents])
    if len(lens) and lens.max() > np.iinfo(dtype).max:
        where = int(lens.argmax())
        raise DataError(
            f"{file}: document {where} has {lens[where]} tokens, and this format holds lengths in {dtype.name} (up to "
            f"{np.iinfo(dtype).max}). Choose the newer pair: --to paddle."
        )
    with zipfile.ZipFile(file, "w") as archive:  # the bytes of np.savez, block by block
        with archive.open("ids.npy", "w", force_zip64=True) as member:
            npy.write_array(member, dtype, contents.num_tokens, blocks(contents.tokens, dtype, file))
        with archive.open("lens.npy", "w", force_zip64=True) as member:
            npy.write_array(member, dtype, len(lens), [lens.astype(dtype)])
    return [file]


def dtype_of(contents: Contents, vocab_size: int | None) -> np.dtype:
    if vocab_size is not None:
        return np.dtype("<u2" if vocab_size < 65500 else "<i4")
    return np.dtype("<u2" if contents.tokens.dtype == np.uint16 else "<i4")
