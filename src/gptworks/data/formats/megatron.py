"""Megatron's memory-mapped pair. `PREFIX.bin`: the tokens. `PREFIX.idx`, little-endian:

9 bytes  "MMIDIDX" and two zero bytes     u64  version, 1      u8  dtype code
u64 n, number of sequences                u64  m, length of the document index
int32[n] sizes (tokens)   int64[n] byte offsets in .bin   int64[m] sequences before each document, starting at 0
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gptworks.data.formats.contents import Contents, blocks, check_sizes_fit_32_bits
from gptworks.data.formats.file_names import begins_with, beside, files_of_pair, prefix_of, sidecar_of_pair
from gptworks.errors import DataError

NAME = "megatron"
TITLE = "Megatron .bin/.idx, memory-mapped"
KEEPS_SEQUENCES = True
NEEDS_ROWS = False
LARGEST_ID: int | None = None
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
_INDEX_PIECE = 1 << 18
# 6 and 7 mean float and double in some versions and the reverse in others: never token data.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}


@dataclass(frozen=True)
class Index:
    dtype: np.dtype
    sizes: np.ndarray  # int32 [n], tokens of each sequence
    documents: np.ndarray  # int64 [documents + 1], first sequence of each document

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum(dtype=np.int64))


def find(path: Path) -> Path | None:
    """PREFIX.idx, when `path` is the prefix, the .idx or the .bin of such a pair."""
    prefix = prefix_of(path)
    index = beside(prefix, ".idx")
    return index if begins_with(index, MAGIC) else None


files, sidecar = files_of_pair, sidecar_of_pair


def read(main: Path) -> Contents:
    prefix = prefix_of(main)
    index = read_index(prefix)
    return Contents(map_tokens(prefix, index), index.sizes, index.documents)


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    dtype = dtype_of(contents, vocab_size)
    bin_ = beside(prefix, ".bin")
    index = write_index_file(prefix, dtype, contents)
    with bin_.open("wb") as file:
        for block in blocks(contents.tokens, dtype, bin_):
            file.write(block.tobytes())
    return [bin_, index]


def write_index_file(prefix: Path, dtype: np.dtype, contents: Contents) -> Path:
    index = beside(prefix, ".idx")
    check_sizes_fit_32_bits(contents.sizes, index)
    with index.open("wb") as file:
        write_index(file, Index(dtype, contents.sizes, contents.documents))
    return index


def dtype_of(contents: Contents, vocab_size: int | None) -> np.dtype:
    """As for a new store when the vocabulary is known, else what the tokens already are, in a type Megatron knows."""
    if vocab_size is not None:
        return dtype_for(vocab_size)
    return contents.tokens.dtype if contents.tokens.dtype in CODES else np.dtype(np.int32)


def dtype_for(vocab_size: int) -> np.dtype:
    """Megatron's rule, so that the same text gives the same bytes."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def write_index(file: BinaryIO, index: Index) -> None:
    """Piece by piece: with many documents, arrays of the whole index would be most of the memory in use."""
    n, width = len(index.sizes), index.dtype.itemsize
    file.write(HEADER.pack(MAGIC, 1, CODES[index.dtype], n, len(index.documents)))
    pieces = [slice(start, start + _INDEX_PIECE) for start in range(0, n, _INDEX_PIECE)]
    for piece in pieces:
        file.write(index.sizes[piece].astype("<i4").tobytes())
    before = 0
    for piece in pieces:
        ends = np.cumsum(index.sizes[piece], dtype=np.int64) * width + before
        file.write(np.concatenate([[before], ends[:-1]]).astype("<i8").tobytes())
        before = int(ends[-1])
    for start in range(0, len(index.documents), _INDEX_PIECE):
        file.write(index.documents[start : start + _INDEX_PIECE].astype("<i8").tobytes())


def read_index(prefix: Path) -> Index:
    """The checked contents of PREFIX.idx, in agreement with PREFIX.bin."""
    idx, bin_ = beside(prefix, ".idx"), beside(prefix, ".bin")
    for file in (idx, bin_):
        if not file.is_file():
            raise DataError(
                f"{file}: no such file. Needed: the pair {prefix}.bin and {prefix}.idx; `gptworks prepare` makes it."
            )
    data = idx.read_bytes()
    if len(data) < HEADER.size:
        raise DataError(
            f"{idx}: {len(data)} bytes, but the header alone has {HEADER.size}. The file is cut off: copy or "
            "prepare it again."
        )
    magic, version, code, n, m = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DataError(f"{idx}: begins with {magic!r}, needed {MAGIC!r}. This is not a Megatron .idx file.")
    if version != 1:
        raise DataError(f"{idx}: version {version}, needed 1.")
    if code not in DTYPES:
        raise DataError(f"{idx}: dtype code {code}, needed one of {sorted(DTYPES)} (integers).")
    needed = HEADER.size + 12 * n + 8 * m
    # Files with a `modes` array (one byte a sequence) are read as well; anything else is damage.
    if len(data) not in (needed, needed + n):
        raise DataError(
            f"{idx}: {len(data)} bytes, but its header ({n} sequences, {m} document borders) needs {needed}. Copy "
            "or prepare it again."
        )
    dtype = np.dtype(DTYPES[code])
    at = HEADER.size
    sizes = np.frombuffer(data, "<i4", n, at)
    offsets = np.frombuffer(data, "<i8", n, at + 4 * n)
    documents = np.frombuffer(data, "<i8", m, at + 12 * n)
    if n and sizes.min() < 0:
        raise DataError(
            f"{idx}: sequence {int(sizes.argmin())} has {sizes.min()} tokens. The file is damaged: prepare it again."
        )
    if m < 1 or documents[0] != 0 or documents[-1] != n or (documents[1:] < documents[:-1]).any():
        raise DataError(
            f"{idx}: the document index does not run from 0 to {n} in rising order. The file is damaged: prepare "
            "it again."
        )
    ends = np.cumsum(sizes, dtype=np.int64) * dtype.itemsize
    wrong = np.flatnonzero(offsets[1:] != ends[:-1]) if n else np.array([])
    if n and (offsets[0] != 0 or len(wrong)):
        where = 0 if offsets[0] != 0 else int(wrong[0]) + 1
        raise DataError(
            f"{idx}: sequence {where} begins at byte {offsets[where]}, not where sequence {where - 1} ends. "
            "Prepare the data again."
        )
    expected = int(ends[-1]) if n else 0
    size = bin_.stat().st_size
    if size != expected:
        raise DataError(
            f"{bin_}: {size} bytes, but {idx.name} describes {expected}. One of the two is cut off or belongs to "
            "another store."
        )
    return Index(dtype, sizes, documents)


def map_tokens(prefix: Path, index: Index) -> np.ndarray:
    if index.num_tokens == 0:
        return np.empty(0, dtype=index.dtype)
    return np.memmap(beside(prefix, ".bin"), dtype=index.dtype, mode="r")
