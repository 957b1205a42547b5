"""Writes X.mindrecord and X.mindrecord.db, for MindSpore to read. The layout is told in mindrecord.

A row is `input_ids`, `attention_mask` (all ones) and `labels` (the same as input_ids): what MindFormers' GPT-2 wants.
"""

import json
import sqlite3
import struct
from array import array
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gptworks.data.formats import mindrecord_integers as integers
from gptworks.data.formats.contents import Contents, blocks
from gptworks.errors import DataError

FIELDS = ("attention_mask", "input_ids", "labels")  # in this order: MindSpore sorts them
# Where every field is an array, MindSpore still wants a map of the others for each row: {"id": 0} in msgpack.
NO_SCALARS = struct.pack("<Q", 5) + b"\x81\xa2id\x00"
SMALLEST_HEADER, SMALLEST_PAGE, USUAL_PAGE, LARGEST_PAGE = 16 << 10, 32 << 10, 32 << 20, 256 << 20
_ENTRY_BYTES = 320  # at most, of one page in the header
_INDEXES = (
    "CREATE TABLE INDEXES(  ROW_ID               INT  NOT NULL, PAGE_ID_RAW          INT  NOT NULL, "
    "PAGE_OFFSET_RAW      INT  NOT NULL, PAGE_OFFSET_RAW_END  INT  NOT NULL, ROW_GROUP_ID         INT  NOT NULL, "
    "PAGE_ID_BLOB         INT  NOT NULL, PAGE_OFFSET_BLOB     INT  NOT NULL, PAGE_OFFSET_BLOB_END INT  NOT NULL, "
    "PRIMARY KEY(ROW_ID))"
)


@dataclass
class BlobPage:
    """Arrays of some rows. Its rows are one row group: their maps stay together in one raw page as well."""

    first_row: int
    ends: "array[int]" = field(default_factory=lambda: array("q"))  # of each row, in bytes from the start of the page

    @property
    def used(self) -> int:
        return self.ends[-1] if self.ends else 0


@dataclass
class RawPage:
    groups: list[tuple[int, int]] = field(default_factory=list)  # (row group, where it begins)
    used: int = 0


def write(file: Path, contents: Contents) -> list[Path]:
    header_size, page_size = _sizes_for(file, contents)
    with file.open("wb") as opened:
        blob_pages, saved = _write_blob_pages(opened, file, contents, header_size, page_size)
        raw_pages = _plan_raw_pages(blob_pages, page_size)
        for number, page in enumerate(raw_pages, len(blob_pages)):
            opened.seek(header_size + number * page_size)
            opened.write(NO_SCALARS * (page.used // len(NO_SCALARS)))
        text = _header(file.name, blob_pages, raw_pages, header_size, page_size, saved)
        if 8 + len(text) > header_size:
            raise DataError(f"{file}: its header would take {len(text)} bytes, which is too many. Write several files.")
        opened.seek(0)
        opened.write(struct.pack("<Q", len(text)) + text)
    index = file.with_name(file.name + ".db")
    _write_index(index, file.name, blob_pages, raw_pages)
    return [file, index]


def _sizes_for(file: Path, contents: Contents) -> tuple[int, int]:
    """Header and page size: as small as MindSpore allows for few data, its usual page for many."""
    sizes = contents.sizes.astype(np.int64)
    if len(sizes) and sizes.min() == 0:
        raise DataError(
            f"{file}: sequence {int(sizes.argmin())} has no tokens. MindSpore's datasets give a random number for such "
            "a row. Leave it out."
        )
    widest = np.result_type(contents.tokens.dtype, np.int8).itemsize  # numbers are signed: 40000 takes 4 bytes
    most = 8 + len(FIELDS) * (8 + integers.COUNT.size + -(-sizes // 4)) + sizes + 2 * widest * sizes
    largest = int(most.max(initial=0))
    page_size = SMALLEST_PAGE
    while page_size < max(largest, min(int(most.sum()), USUAL_PAGE)):
        page_size *= 2
    if page_size > LARGEST_PAGE:
        where = int(most.argmax())
        raise DataError(
            f"{file}: sequence {where} has {sizes[where]} tokens, up to {largest} bytes; a page of this format has at "
            f"most {LARGEST_PAGE}. Cut the tokens into rows of the training length first."
        )
    # Two neighbouring pages are always more than one full page.
    pages = 2 * (int(most.sum()) + len(NO_SCALARS) * len(sizes)) // page_size + 4
    header_size = SMALLEST_HEADER
    while header_size < 4096 + _ENTRY_BYTES * pages:
        header_size *= 2
    return header_size, page_size


def _write_blob_pages(
    opened: BinaryIO, file: Path, contents: Contents, header_size: int, page_size: int
) -> tuple[list[BlobPage], int]:
    """The pages, and how many bytes packing the integers has saved."""
    pages: list[BlobPage] = []
    saved = 0
    for number, tokens in enumerate(_rows(contents, file)):
        ids, ones = integers.pack(tokens), _packed_ones(len(tokens))
        row = b"".join(struct.pack(">Q", len(each)) + each for each in (ones, ids, ids))
        saved += 8 * len(FIELDS) * (1 + len(tokens)) - len(row)
        if not pages or pages[-1].used + 8 + len(row) > page_size:
            opened.seek(header_size + len(pages) * page_size)
            pages.append(BlobPage(number))
        pages[-1].ends.append(pages[-1].used + 8 + len(row))
        opened.write(struct.pack("<Q", len(row)) + row)
    return pages, saved


@lru_cache(maxsize=4)
def _packed_ones(count: int) -> bytes:
    return integers.pack(np.ones(count, np.int64))


def _rows(contents: Contents, file: Path) -> Iterator[np.ndarray]:
    """The tokens of each sequence, read some millions at a time."""
    sizes = iter(contents.sizes.tolist())
    needed = next(sizes, None)
    held = np.empty(0, np.int64)
    for block in blocks(contents.tokens, np.dtype(np.int64), file):
        held = np.concatenate([held, block])
        at = 0
        while needed is not None and at + needed <= len(held):
            yield held[at : at + needed]
            at += needed
            needed = next(sizes, None)
        held = held[at:]


def _plan_raw_pages(blob_pages: list[BlobPage], page_size: int) -> list[RawPage]:
    pages: list[RawPage] = []
    for group, blob_page in enumerate(blob_pages):
        needed = len(NO_SCALARS) * len(blob_page.ends)
        if not pages or pages[-1].used + needed > page_size:
            pages.append(RawPage())
        pages[-1].groups.append((group, pages[-1].used))
        pages[-1].used += needed
    return pages


def _header(
    name: str, blob_pages: list[BlobPage], raw_pages: list[RawPage], header_size: int, page_size: int, saved: int
) -> bytes:
    """Keys in the order of MindSpore, so that the same rows give the same bytes."""
    entries = [
        _entry(number, "BLOB_DATA", number, page.used, [(0, 0)], (page.first_row, page.first_row + len(page.ends)))
        for number, page in enumerate(blob_pages)
    ]
    entries += [
        _entry(len(blob_pages) + number, "RAW_DATA", number, page.used, page.groups, (0, 0))
        for number, page in enumerate(raw_pages)
    ]
    kinds = {field_name: {"shape": [-1], "type": "int64"} for field_name in FIELDS}
    header = {
        "header_size": header_size,
        "index_fields": None,
        "page": entries or None,
        "page_size": page_size,
        "compression_size": saved,
        "schema": [{"blob_fields": list(FIELDS), "desc": "lm-schema", "schema": kinds}],
        "shard_addresses": [name],
        "shard_id": 0,
        "statistics": None,
        "version": "3.0",
    }
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def _entry(
    page_id: int, kind: str, number: int, used: int, groups: list[tuple[int, int]], rows: tuple[int, int]
) -> dict[str, object]:
    return {
        "end_row_id": rows[1],
        "page_id": page_id,
        "page_size": used,
        "page_type": kind,
        "page_type_id": number,
        "row_group_ids": [{"id": group, "offset": offset} for group, offset in groups],
        "shard_id": 0,
        "start_row_id": rows[0],
    }


def _write_index(index: Path, name: str, blob_pages: list[BlobPage], raw_pages: list[RawPage]) -> None:
    index.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(index)) as database, database:
            database.execute(_INDEXES)
            database.execute("CREATE TABLE SHARD_NAME(NAME TEXT NOT NULL)")
            database.execute("INSERT INTO SHARD_NAME VALUES (?)", (name,))
            rows = _index_rows(blob_pages, raw_pages)
            database.executemany("INSERT INTO INDEXES VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
    except sqlite3.Error as error:
        raise DataError(f"{index}: cannot be written ({error}). Is the disk full?") from None


def _index_rows(blob_pages: list[BlobPage], raw_pages: list[RawPage]) -> Iterator[tuple[int, ...]]:
    for raw_id, raw_page in enumerate(raw_pages, len(blob_pages)):
        for group, raw_at in raw_page.groups:
            page = blob_pages[group]
            for number, (start, end) in enumerate(zip([0, *page.ends], page.ends, strict=False)):
                raw = raw_at + number * len(NO_SCALARS)
                yield page.first_row + number, raw_id, raw, raw + len(NO_SCALARS), group, group, start, end
