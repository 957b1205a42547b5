"""What every dataset format comes down to: tokens in a row, cut into sequences, grouped into documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from gptworks.errors import DataError

_BLOCK_TOKENS = 4_000_000  # copied at a time: 8 to 32 MB


class Tokens(Protocol):
    """All tokens of a dataset. A memory map, or something that decodes the slice it is asked for."""

    @property
    def dtype(self) -> np.dtype: ...

    def __len__(self) -> int: ...

    def __getitem__(self, where: slice) -> np.ndarray: ...


@dataclass(frozen=True)
class Contents:
    tokens: Tokens
    sizes: np.ndarray  # int [n], tokens of each sequence; their sum is the number of tokens
    documents: np.ndarray  # int64 [documents + 1], first sequence of each document: from 0 to n
    has_documents: bool = True  # False: a bare stream, where nobody wrote down which document ends where
    is_rows: bool = False  # True: each sequence is one training sample, cut by whoever made the file

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1


def document_starts(contents: Contents) -> np.ndarray:
    """Token offset of each document, and of the end."""
    return np.concatenate([[0], np.cumsum(contents.sizes, dtype=np.int64)])[contents.documents]


def bare_stream(tokens: Tokens) -> Contents:
    """Tokens without an index: one sequence, documents unknown."""
    sizes = np.array([len(tokens)] if len(tokens) else [], np.int64)
    return Contents(tokens, sizes, np.arange(len(sizes) + 1, dtype=np.int64), has_documents=False)


class _First:
    """The first tokens of something that decodes what it is asked for."""

    def __init__(self, tokens: Tokens, count: int) -> None:
        self.tokens, self.count, self.dtype = tokens, count, tokens.dtype

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, where: slice) -> np.ndarray:
        first, end, _ = where.indices(self.count)
        return self.tokens[first:end]


def as_rows(contents: Contents, row_length: int, name: Path) -> Contents:
    """The tokens as rows of one length, each a training sample; what is left at the end is dropped."""
    rows = contents.num_tokens // row_length
    if not rows:
        raise DataError(f"{name}: {contents.num_tokens} tokens do not fill one row of {row_length}. Use more text.")
    sizes = np.full(rows, row_length, np.int64)
    return Contents(_First(contents.tokens, rows * row_length), sizes, np.arange(rows + 1), is_rows=True)


def blocks(tokens: Tokens, dtype: np.dtype, file: Path) -> Iterator[np.ndarray]:
    """All tokens as `dtype`, some millions at a time. An id that does not fit is refused, never cut off."""
    limits = np.iinfo(dtype)
    for start in range(0, len(tokens), _BLOCK_TOKENS):
        block = tokens[start : start + _BLOCK_TOKENS]
        fits = np.can_cast(block.dtype, dtype) or (limits.min <= block.min() and block.max() <= limits.max)
        if not fits:
            wrong = int(np.flatnonzero((block < limits.min) | (block > limits.max))[0])
            raise DataError(
                f"{file}: token {start + wrong} is id {block[wrong]}, which {dtype.name} does not hold (up to "
                f"{limits.max}). Choose a format with wider numbers, such as megatron."
            )
        yield block.astype(dtype, copy=False)


def check_ids_are_whole_numbers(dtype: np.dtype, file: Path, field: str) -> None:
    if dtype.kind not in "iu" or dtype.itemsize > 8:
        raise DataError(f"{file}: {field} is {dtype.name}, needed whole numbers such as uint16 or int32.")


def checked_sizes(sizes: np.ndarray, num_tokens: int, file: Path, field: str) -> np.ndarray:
    """`sizes` as int64, when they are lengths that fill `num_tokens` exactly."""
    check_ids_are_whole_numbers(sizes.dtype, file, field)
    if len(sizes) and (sizes.min() < 0 or sizes.max() > num_tokens):
        where = int(sizes.argmin() if sizes.min() < 0 else sizes.argmax())
        raise DataError(
            f"{file}: {field}[{where}] is {sizes[where]}, but there are {num_tokens} tokens. The file is damaged or "
            "belongs to another dataset: copy or prepare it again."
        )
    total = int(sizes.sum(dtype=np.int64))
    if total != num_tokens:
        raise DataError(
            f"{file}: {field} adds up to {total} tokens, but there are {num_tokens}. The file is damaged or belongs "
            "to another dataset: copy or prepare it again."
        )
    return sizes.astype(np.int64, copy=False)


def checked_documents(documents: np.ndarray, num_sequences: int, file: Path, field: str) -> np.ndarray:
    """`documents` as int64, when it runs from 0 to the number of sequences without ever falling."""
    check_ids_are_whole_numbers(documents.dtype, file, field)
    # Compared, not subtracted: the difference of two absurd numbers may wrap around and look fine.
    falls = np.flatnonzero(documents[1:] < documents[:-1])
    if not len(documents) or documents[0] != 0 or documents[-1] != num_sequences or len(falls):
        got = "nothing" if not len(documents) else f"{documents[0]} to {documents[-1]}"
        at = f", falling at {int(falls[0]) + 1}" if len(falls) else ""
        raise DataError(
            f"{file}: {field} runs from {got}{at}; needed 0 to {num_sequences} in rising order. The file is damaged: "
            "copy or prepare it again."
        )
    return documents.astype(np.int64, copy=False)


def check_sizes_fit_32_bits(sizes: np.ndarray, file: Path) -> None:
    if len(sizes) and sizes.max() > np.iinfo(np.int32).max:
        where = int(sizes.argmax())
        raise DataError(
            f"{file}: sequence {where} has {sizes[where]} tokens; this format counts them in 32 bits. Cut the "
            "stream into documents first: name its tokenizer with --tokenizer."
        )


def map_stream(file: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
    """`count` numbers from byte `start` on, mapped. The caller has compared them with the size of the file."""
    if count == 0:  # an empty map is an error to the system
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r", offset=start, shape=(count,))
