"""MindSpore's MindRecord: rows of named arrays. `X.mindrecord`, little-endian:

u64  length of a JSON text, then that text: header_size, page_size, version, schema, page (a list), ...
at header_size + page_id * page_size: that page, of which `page_size` of its list entry are used.
A BLOB_DATA page: u64 length and that many bytes for each row. With several array fields the bytes are, for each in the
order of `blob_fields`: u64 *big-endian* length, then its data. Integers are packed (mindrecord_integers), not in 2.0.
RAW_DATA pages hold the fields that are not arrays, and `X.mindrecord.db` is an SQLite index: neither is needed.
"""

import json
import re
import struct
from array import array
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gptworks import json_text
from gptworks.data.formats import mindrecord_integers as integers
from gptworks.data.formats import mindrecord_writer
from gptworks.data.formats.contents import Contents
from gptworks.errors import DataError

NAME = "mindrecord"
TITLE = "MindSpore MindRecord, one training sample a row"
KEEPS_SEQUENCES = False
NEEDS_ROWS = True
LARGEST_ID: int | None = None
SUFFIX = ".mindrecord"
FIELD = "input_ids"
VERSIONS = ("3.0", "2.0")
HEADER_SIZES = (16 << 10, 128 << 20)
PAGE_SIZES = (32 << 10, 256 << 20)
LENGTH = struct.Struct("<Q")
FIELD_LENGTH = struct.Struct(">Q")
# Several files of one writer are X.mindrecord0, X.mindrecord1, ...: each is a dataset of its own.
_FILE_NAME = re.compile(r"\.mindrecord\d*$")


def find(path: Path) -> Path | None:
    """`path` itself, or PATH.mindrecord, when it is such a file."""
    for file in (path, path.with_name(path.name + SUFFIX)):
        if _FILE_NAME.search(file.name) and _looks_right(file):
            return file
    return None


def files(main: Path) -> list[Path]:
    index = main.with_name(main.name + ".db")
    return [main, index] if index.is_file() else [main]


def sidecar(main: Path) -> Path:
    return main.with_name(main.name + ".json")


def read(main: Path) -> Contents:
    if not main.is_file():
        raise DataError(f"{main}: no such file. Needed: a MindRecord file.")
    header = read_header(main)
    tokens = Rows(main, header)
    return Contents(tokens, tokens.sizes, np.arange(len(tokens.sizes) + 1, dtype=np.int64), is_rows=True)


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    """The fields of MindFormers' GPT-2 data; one row for each sequence."""
    return mindrecord_writer.write(prefix.with_name(prefix.name + SUFFIX), contents)


@dataclass(frozen=True)
class Page:
    """Rows in one place of the file: so many between these two bytes."""

    rows: int
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    dtype: np.dtype  # of FIELD
    fields: int  # arrays in each row
    position: int  # of FIELD among them
    is_packed: bool
    pages: list[Page]  # with arrays, in the order of their rows


class Rows:
    """The tokens of all rows, one after the other; a slice unpacks the rows it touches."""

    def __init__(self, file: Path, header: Header) -> None:
        self.dtype = header.dtype
        self._file = file
        self._is_packed = header.is_packed
        has_rows = any(page.rows for page in header.pages)
        # As a plain array: slicing a memmap object costs more than unpacking a short row.
        self._data = np.asarray(np.memmap(file, np.uint8, "r")) if has_rows else np.empty(0, np.uint8)
        self._starts, self._ends, self.sizes = _find_rows(file, self._data.data, header)
        self._tokens_before = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])

    def __len__(self) -> int:
        return int(self._tokens_before[-1])

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, step = where.indices(len(self))
        if step != 1:
            raise ValueError(f"step {step}: rows are read in order, one token after the other")
        if stop <= start:
            return np.empty(0, self.dtype)
        first = int(self._tokens_before.searchsorted(start, "right")) - 1
        last = int(self._tokens_before.searchsorted(stop, "left"))
        begins = int(self._tokens_before[first])
        rows = [self._row(row) for row in range(first, last)]
        tokens = rows[0] if len(rows) == 1 else np.concatenate(rows)
        return tokens[start - begins : stop - begins]

    def _row(self, row: int) -> np.ndarray:
        start, end = int(self._starts[row]), int(self._ends[row])
        if not self._is_packed:
            return self._data[start:end].view(self.dtype.newbyteorder("<")).astype(self.dtype)
        try:
            return integers.unpack(self._data, start, end, self.dtype)
        except integers.Damaged as damage:
            raise _damaged_row(self._file, row, str(damage)) from None


def read_header(file: Path) -> Header:
    """All that the header says about where FIELD is, checked against the file."""
    size = file.stat().st_size
    header = _json_header(file, size)
    version = header.get("version")
    if version not in VERSIONS:
        raise DataError(f"{file}: version {_short(version)}, needed {' or '.join(VERSIONS)}.")
    position, fields, dtype = _find_field(file, header.get("schema"))
    return Header(dtype, fields, position, version != "2.0", _blob_pages(file, header, size))


def _json_header(file: Path, size: int) -> dict[str, Any]:
    with file.open("rb") as opened:
        start = opened.read(LENGTH.size)
        length = LENGTH.unpack(start)[0] if len(start) == LENGTH.size else 0
        if not 2 <= length <= min(HEADER_SIZES[1], size) - LENGTH.size:
            raise DataError(
                f"{file}: {size} bytes, with a header of {length} bytes. It is cut off or damaged, or not a MindRecord "
                "file: copy or write it again."
            )
        text = opened.read(length)
    try:
        header = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: the header is not JSON ({error}). It is damaged: copy or write it again.") from None
    if not isinstance(header, dict):
        raise DataError(f"{file}: the header is a JSON {type(header).__name__}, needed an object.")
    used = LENGTH.size + length
    header_size = _number(file, header, "header_size", HEADER_SIZES)
    _number(file, header, "page_size", PAGE_SIZES)
    if used > header_size:
        raise DataError(f"{file}: header_size {header_size}, but the header takes {used} bytes. It is damaged.")
    return header


def _find_field(file: Path, schemas: Any) -> tuple[int, int, np.dtype]:
    """Where among the arrays of a row FIELD is, how many they are, and its type."""
    schema = schemas[0] if isinstance(schemas, list) and len(schemas) == 1 else None
    kinds = schema.get("schema") if isinstance(schema, dict) else None
    blobs = schema.get("blob_fields") if isinstance(schema, dict) else None
    if not isinstance(kinds, dict) or not isinstance(blobs, list) or not all(isinstance(name, str) for name in blobs):
        raise DataError(
            f"{file}: schema {_short(schemas)}, needed a list of one object with `blob_fields` and `schema`."
        )
    if FIELD not in kinds:
        raise DataError(
            f"{file}: no field {FIELD}; found {_short(sorted(kinds))}. Write the tokens of a row in a field of that "
            "name, as MindFormers' GPT-2 data does."
        )
    kind = kinds[FIELD]
    type_, shape = (kind.get("type"), kind.get("shape")) if isinstance(kind, dict) else (None, None)
    if blobs.count(FIELD) != 1 or type_ not in ("int32", "int64") or not isinstance(shape, list) or len(shape) != 1:
        raise DataError(
            f"{file}: field {FIELD} is {_short(kind)}, needed an int32 or int64 array of one dimension, such as "
            '{"type": "int32", "shape": [-1]}.'
        )
    return blobs.index(FIELD), len(blobs), np.dtype(type_)


def _blob_pages(file: Path, header: dict[str, Any], size: int) -> list[Page]:
    if "page" not in header:
        raise DataError(f"{file}: the header has no page. It is damaged: copy or write it again.")
    entries = header["page"]
    if entries is None:  # a file without rows
        entries = []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{file}: page is {_short(entries)}, needed a list of objects.")
    room = header["page_size"]
    seen: set[int] = set()
    pages = []
    for number, entry in enumerate(entries):
        where = f"page[{number}]."
        page_id = _number(file, entry, "page_id", (0, len(entries) - 1), where)
        if page_id in seen:
            raise DataError(f"{file}: {where}page_id {page_id} is there twice. The header is damaged.")
        seen.add(page_id)
        used = _number(file, entry, "page_size", (0, room), where)
        start = header["header_size"] + page_id * room
        if start + used > size:
            raise DataError(
                f"{file}: {size} bytes, but {where[:-1]} ends at byte {start + used}. The file is cut off: copy or "
                "write it again."
            )
        kind = entry.get("page_type")
        if kind not in ("BLOB_DATA", "RAW_DATA"):
            raise DataError(f"{file}: {where}page_type {_short(kind)}, needed BLOB_DATA or RAW_DATA.")
        if kind == "BLOB_DATA":
            first = _number(file, entry, "start_row_id", (0, size), where)
            last = _number(file, entry, "end_row_id", (first, first + used // LENGTH.size), where)
            pages.append((first, last, start, start + used))
    pages.sort()
    for (_, before, *_), (first, *_) in pairwise([(0, 0, 0, 0), *pages]):
        if first != before:
            raise DataError(
                f"{file}: rows up to {before} are followed by a page from row {first}. A page is missing from the "
                "header, or start_row_id is damaged."
            )
    return [Page(last - first, start, end) for first, last, start, end in pages]


def _find_rows(file: Path, data: memoryview, header: Header) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First byte, end and number of tokens of FIELD in each row. Touches only the heads of the rows."""
    starts, ends, sizes = array("q"), array("q"), array("q")
    for page in header.pages:
        at = page.start
        for _ in range(page.rows):
            row_end = _end(file, len(sizes), data, at, page.end, LENGTH)
            at += LENGTH.size
            start, end = at, row_end
            if header.fields > 1:
                for field in range(header.fields):
                    field_end = _end(file, len(sizes), data, at, row_end, FIELD_LENGTH)
                    if field == header.position:
                        start, end = at + FIELD_LENGTH.size, field_end
                    at = field_end
                if at != row_end:
                    raise _damaged_row(file, len(sizes), f"its fields leave {row_end - at} bytes over")
            sizes.append(_size(file, len(sizes), data, start, end, header))
            starts.append(start)
            ends.append(end)
            at = row_end
        if at != page.end:
            raise DataError(
                f"{file}: {page.rows} rows end at byte {at}, but their page ends at {page.end}. The page list of the "
                "header or the length of a row is damaged."
            )
    return tuple(np.array(values, np.int64) for values in (starts, ends, sizes))  # type: ignore[return-value]


def _end(file: Path, row: int, data: memoryview, at: int, limit: int, length: struct.Struct) -> int:
    """Where the bytes end whose length stands at `at`."""
    begin = at + length.size
    if begin > limit:
        raise _damaged_row(file, row, f"it should begin at byte {at}, past the end of its page or row at {limit}")
    end: int = begin + length.unpack_from(data, at)[0]
    if end > limit:
        raise _damaged_row(file, row, f"{end - begin} bytes at byte {begin}, but its page or row ends at {limit}")
    return end


def _size(file: Path, row: int, data: memoryview, start: int, end: int, header: Header) -> int:
    length = end - start
    try:
        if not header.is_packed:
            if length % header.dtype.itemsize:
                raise integers.Damaged(f"{length} bytes, which is not a whole number of {header.dtype.name}")
            return length // header.dtype.itemsize
        return integers.count_of(data, start, end)
    except integers.Damaged as damage:
        raise _damaged_row(file, row, str(damage)) from None


def _damaged_row(file: Path, row: int, problem: str) -> DataError:
    return DataError(f"{file}: row {row}, field {FIELD}: {problem}. The file is damaged: copy or write it again.")


def _number(file: Path, where: dict[str, Any], name: str, limits: tuple[int, int], path: str = "") -> int:
    value = where.get(name)
    if type(value) is not int or not limits[0] <= value <= limits[1]:  # bool is an int, but not here
        raise DataError(
            f"{file}: {path}{name} is {_short(value)}, needed a whole number from {limits[0]} to {limits[1]}. The "
            "header is damaged, or this is not a MindRecord file."
        )
    return value


def _short(value: Any) -> str:
    """A value of the header for a message."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else text[:117] + "..."


def _looks_right(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(LENGTH.size + 1)[LENGTH.size :] == b"{"
