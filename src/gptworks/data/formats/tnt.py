"""Megatron's older pair, for `--dataset-impl cached` and `lazy`. `PREFIX.bin`: tokens. `PREFIX.idx`, little-endian:

8 bytes  "TNTIDX" and two zero bytes     u64 version, 1     u64 dtype code     u64 bytes of an element
u64 n, number of sequences     u64 s, length of sizes     u64 c, length of the document index
int64[n+1] first of `sizes` for each sequence     int64[n+1] offset of each in .bin, in elements
int64[s] sizes (PaddleNLP: int32[s])     int64[c] sequences before each document, starting at 0
"""

import struct
from pathlib import Path

import numpy as np

from gptworks.data.formats.contents import Contents, blocks, checked_documents, checked_sizes, map_stream
from gptworks.data.formats.file_names import begins_with, beside, files_of_pair, prefix_of, sidecar_of_pair
from gptworks.data.formats.megatron import CODES, DTYPES
from gptworks.errors import DataError

NAME = "tnt"
TITLE = "Megatron .bin/.idx of the older kind (cached, lazy)"
KEEPS_SEQUENCES = True
NEEDS_ROWS = False
LARGEST_ID: int | None = None
MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<8s6Q")


def find(path: Path) -> Path | None:
    """PREFIX.idx, when `path` is the prefix, the .idx or the .bin of such a pair."""
    index = beside(prefix_of(path), ".idx")
    return index if begins_with(index, MAGIC) else None


files, sidecar = files_of_pair, sidecar_of_pair


def read(main: Path) -> Contents:
    bin_ = beside(prefix_of(main), ".bin")
    for file in (main, bin_):
        if not file.is_file():
            raise DataError(f"{file}: no such file. Needed: the pair {bin_.name} and {main.name}.")
    data = main.read_bytes()
    if len(data) < HEADER.size:
        raise DataError(
            f"{main}: {len(data)} bytes, but the header alone has {HEADER.size}. The file is cut off: copy or prepare "
            "it again."
        )
    magic, version, code, element, n, s, c = HEADER.unpack_from(data)
    if magic != MAGIC:
        raise DataError(f"{main}: begins with {magic!r}, needed {MAGIC!r}. This is not an index of the older kind.")
    if version != 1:
        raise DataError(f"{main}: version {version}, needed 1.")
    if code not in DTYPES:
        raise DataError(f"{main}: dtype code {code}, needed one of {sorted(DTYPES)} (integers).")
    dtype = np.dtype(DTYPES[code]).newbyteorder("<")
    if element != dtype.itemsize:
        raise DataError(
            f"{main}: {element} bytes an element, but {dtype.name} (dtype code {code}) has {dtype.itemsize}."
        )
    if s != n:
        raise DataError(f"{main}: {s} sizes for {n} sequences; needed one each: tokens are a row, not a table.")
    width = _width_of_sizes(main, len(data), n, c)
    at = HEADER.size
    dims = np.frombuffer(data, "<i8", n + 1, at)
    offsets = np.frombuffer(data, "<i8", n + 1, at + 8 * (n + 1))
    sizes = np.frombuffer(data, f"<i{width}", n, at + 16 * (n + 1))
    documents = np.frombuffer(data, "<i8", c, at + 16 * (n + 1) + width * n)
    wrong = np.flatnonzero(dims != np.arange(n + 1))
    if len(wrong):
        where = int(wrong[0])
        raise DataError(
            f"{main}: the dimensions of sequence {where} begin at {dims[where]}, needed {where}: one dimension each."
        )
    size = bin_.stat().st_size
    if size % element or size // element != offsets[-1]:
        raise DataError(
            f"{bin_}: {size} bytes, but {main.name} describes {offsets[-1]} tokens of {element} bytes. One of the two "
            "is cut off or belongs to another dataset."
        )
    count = size // element
    sizes = checked_sizes(sizes, count, main, "sizes")
    _check_offsets(offsets, sizes, main)
    documents = checked_documents(documents, n, main, "the document index")
    # Merging in 2021 wrote the border between two parts twice. A document without a sequence is nothing to lose.
    return Contents(map_stream(bin_, dtype, 0, count), sizes, np.unique(documents))


def _width_of_sizes(idx: Path, length: int, n: int, c: int) -> int:
    """8 (Megatron) or 4 (PaddleNLP): the header is the same, so the length of the file decides."""
    without = HEADER.size + 16 * (n + 1) + 8 * c
    for width in (8, 4):
        if length == without + width * n:
            return width
    raise DataError(
        f"{idx}: {length} bytes, but its header ({n} sequences, {c} document borders) needs {without + 8 * n} (or "
        f"{without + 4 * n} as PaddleNLP writes it). Copy or prepare it again."
    )


def _check_offsets(offsets: np.ndarray, sizes: np.ndarray, idx: Path) -> None:
    # The sizes are known to add up to what .bin has: their sum cannot wrap around.
    starts = np.concatenate([[0], np.cumsum(sizes)])
    wrong = np.flatnonzero(offsets != starts)
    if len(wrong):
        where = int(wrong[0])
        raise DataError(
            f"{idx}: sequence {where} begins at token {offsets[where]}, but those before it have {starts[where]}. "
            "The file is damaged: prepare the data again."
        )


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    """Tokens are int32 whatever the vocabulary, as Megatron's builder has them."""
    bin_, idx = beside(prefix, ".bin"), beside(prefix, ".idx")
    dtype = np.dtype("<i4")
    with bin_.open("wb") as file:
        for block in blocks(contents.tokens, dtype, bin_):
            file.write(block.tobytes())
    n = len(contents.sizes)
    sizes = contents.sizes.astype("<i8")
    with idx.open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, CODES[np.dtype(np.int32)], dtype.itemsize, n, n, len(contents.documents)))
        file.write(np.arange(n + 1, dtype="<i8").tobytes())
        file.write(np.concatenate([[0], np.cumsum(sizes)]).astype("<i8").tobytes())
        file.write(sizes.tobytes())
        file.write(contents.documents.astype("<i8").tobytes())
    return [bin_, idx]
