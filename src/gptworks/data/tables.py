"""CSV and TSV: one row after another, with the line of the file on which each begins.

A quoted field may hold delimiters, quotes (doubled) and line ends; a byte order mark is removed.
"""

import codecs
import csv
from collections.abc import Iterator

from gptworks import limits
from gptworks.data.columns import advice, all_columns, texts
from gptworks.data.text_files import TextStream
from gptworks.errors import DataError

# Lines of the file that a row takes; and its texts, one per key, or what is wrong with it, or None: no row.
Record = tuple[int, tuple[str, ...] | str | None]

_DELIMITERS = {"csv": ",;\t|", "tsv": "\t,;|"}  # the first with which the header has the column
_MOST_CHARACTERS = 1 << 28  # of one field: a quote that is not closed must not take all memory


class _Lines:
    """Lines of text, counted. Bytes that are not UTF-8 become surrogates, which are found in the fields again."""

    def __init__(self, stream: TextStream) -> None:
        self.stream, self.count, self.is_over = stream, 0, False
        self.kept: list[str] | None = []

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        most = limits.DOCUMENT_BYTES.value
        raw = self.stream.file.readline(most + 1)
        if len(raw) > most:
            raise DataError(
                f"{self.stream.name}: line {self.count + 1} has more than {most:,} bytes, which a document may have at "
                f"most. Look at what it is. {limits.DOCUMENT_BYTES.advice(4 * most)}"
            )
        if not raw:
            self.is_over = True
            raise StopIteration
        if self.count == 0:
            if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(
                    f"{self.stream.name}: is in UTF-16. Needed: UTF-8; Excel calls it 'CSV UTF-8 (comma delimited)'."
                )
            raw = raw.removeprefix(codecs.BOM_UTF8)
        self.count += 1
        text = raw.decode("utf-8", "surrogateescape")
        if self.kept is not None:
            self.kept.append(text)
        return text


def records(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Record]:
    """Every row, and before them the header; an error where the header does not have the columns of the keys."""
    limit = csv.field_size_limit(_MOST_CHARACTERS)
    try:
        yield from _records(stream, keys)
    finally:
        csv.field_size_limit(limit)


def _records(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Record]:
    lines = _Lines(stream)
    delimiter, header = _header(lines, stream, keys)
    lines.kept = None
    places = {column: header.index(column) for column in all_columns(keys, header)}
    yield lines.count, None
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        before = lines.count
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if lines.is_over:
                raise _not_closed(stream, before + 1, lines.count) from None
            yield lines.count - before, f"not a row of a table ({error})"
            continue
        yield lines.count - before, _texts(row, places, keys, len(header)) if row else None


def _texts(row: list[str], places: dict[str, int], keys: tuple[str, ...], num_columns: int) -> tuple[str, ...] | str:
    if len(row) != num_columns:
        return f"{len(row)} fields, the header has {num_columns}"
    fields = {column: row[place].replace("\r\n", "\n").replace("\r", "\n") for column, place in places.items()}
    of_key = texts(fields, keys)
    row_texts = tuple(of_key[key] for key in keys)
    try:
        "".join(row_texts).encode()
    except UnicodeEncodeError as error:
        return f"not UTF-8 text (byte 0x{ord(error.object[error.start]) & 0xFF:02x})"
    return row_texts


def _header(lines: _Lines, stream: TextStream, keys: tuple[str, ...]) -> tuple[str, list[str]]:
    """The delimiter, and the names of the columns."""
    try:
        first = next((row for row in csv.reader(lines) if row), None)
    except csv.Error as error:
        raise _not_a_header(stream, lines, str(error)) from None
    if first is None:
        raise DataError(
            f"{stream.name}: no header. Needed: a first line with the names of the columns, one of them '{keys[0]}'."
        )
    if "".join(lines.kept or []).count('"') % 2:
        raise _not_closed(stream, 1, lines.count)
    headers: dict[str, list[str]] = {}
    problem = ""
    for delimiter in _DELIMITERS[stream.kind]:
        try:
            rows = csv.reader(lines.kept or [], delimiter=delimiter, strict=True)
            headers[delimiter] = [name.strip() for name in next(row for row in rows if row)]
        except csv.Error as error:
            problem = problem or str(error)
            continue
        if _has_all(headers[delimiter], keys):
            break
    if not headers:
        raise _not_a_header(stream, lines, problem)
    if not _has_all(headers.get(delimiter, []), keys):
        delimiter = max(headers, key=lambda each: len(headers[each]))
    header = headers[delimiter]
    for column in all_columns(keys, header):
        if (number := header.count(column)) != 1:
            problem = f"{number} columns are named '{column}'" if number else f"no column '{column}'"
            raise DataError(
                f"{stream.name}:{lines.count}: {problem}. Columns: {', '.join(header)}. "
                + ("Rename all but one." if number else advice(column, header))
            )
    return delimiter, header


def _has_all(header: list[str], keys: tuple[str, ...]) -> bool:
    return all(column in header for column in all_columns(keys, header))


def _not_a_header(stream: TextStream, lines: _Lines, problem: str) -> DataError:
    return DataError(f"{stream.name}:{lines.count}: the header is not a row of a table ({problem}). Fix it.")


def _not_closed(stream: TextStream, line: int, last: int) -> DataError:
    return DataError(
        f'{stream.name}:{line}: a quote (") opens here and is not closed before the end of the file (line {last}). '
        'Close it, or double it ("") where it belongs to the text.'
    )
