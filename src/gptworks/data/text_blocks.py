"""Streams of text cut into blocks of some megabytes: the unit of work, of memory and of going on after a stop.

Where the cuts fall depends on the text alone, so any number of workers gives the same blocks, and so does a second run.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from gptworks import limits
from gptworks.data import row_files, sample_corpus, tables
from gptworks.data.text_files import InputFile, TextStream, open_streams
from gptworks.errors import DataError

BLOCK_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_EDGE = 4096  # longer than any separator or heading
_BOM = b"\xef\xbb\xbf"

# Where a pre-tokenizer of GPT-2's kind always cuts, and gives the same on both sides when it sees one side only: before
# the space between two words, behind a single line break between two visible characters (of several, the last one
# depends on what follows), between a Chinese full stop and a common Chinese character (U+5000 to U+8FFF: all letters)
# or hiragana. There a document may be encoded in pieces.
# Letters: Latin, Cyrillic U+0400 to U+047F, Greek from alpha to omicron, Arabic without marks, most of Hangul.
_LETTER = (
    rb"(?:[A-Za-z]|[\xd0\xd1][\x80-\xbf]|\xce[\xb1-\xbf]|\xd8[\xa7-\xba]|\xd9[\x81-\x8a]|[\xeb\xec][\x80-\xbf]{2})"
)
SAFE_CUT = re.compile(
    _LETTER + rb"(?= " + _LETTER + rb")|[!-~]\n(?=[!-~])|\xe3\x80\x82(?=[\xe5-\xe8]|\xe3\x81[\x81-\xbf])"
)


@dataclass(frozen=True)
class TextRules:
    """How to find documents in files."""

    keys: tuple[str, ...] = ("text",)  # two mean prompt and completion
    separator: str = "\n\n"  # of plain text; empty = the whole file is one document
    keep_separator: bool = True  # it stays in the text unless an end-of-document token takes its place
    strip: bool = False  # take off the blanks around each document
    kind: str = "auto"  # of all inputs: text, jsonl, wikitext, csv, ...; auto = by name


@dataclass(frozen=True)
class FileRange:
    """Bytes that the worker reads itself."""

    path: Path
    start: int
    length: int

    def read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                data = file.read(self.length)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror}).") from None
        if len(data) != self.length:
            raise DataError(f"{self.path}: became shorter while it was read. Start again when it is complete.")
        return data


@dataclass(frozen=True)
class Block:
    name: str  # of the stream
    kind: str  # lines (JSON, one object each), array (the same, from a JSON array), text, wikitext, rows, table
    data: bytes | FileRange | list[Any]
    position: int  # bytes of the inputs read up to its end
    is_first: bool  # of its stream
    continues: bool = False  # its first document began in the block before
    unfinished: bool = False  # its last document goes on in the next block

    @property
    def checksum(self) -> int:
        """To know text from a pipe or a compressed file again; 0 for a plain file, which has a date and a size."""
        return zlib.crc32(self.data) if isinstance(self.data, bytes) else 0


def cut(
    files: list[InputFile], rules: TextRules, passed_over: list[str], *, may_cut_documents: bool = False
) -> Iterator[Block]:
    """All blocks of all inputs. `may_cut_documents`: a long document of plain text may span blocks, at safe cuts."""
    for stream in open_streams(files, rules.kind, passed_over):
        if len(rules.keys) > 1 and stream.kind in ("text", "wikitext", "sample"):
            raise DataError(
                f"{stream.name}: plain text has no keys, so no prompts and completions. Needed: JSON lines, a JSON "
                "array, a table (.csv, .tsv), parquet or arrow."
            )
        if stream.kind == "jsonl" and stream.path is not None:
            yield from _ranges_of_lines(stream)
        elif stream.kind == "jsonl":
            yield from _lines(stream)
        elif stream.kind == "json":
            yield from _array_elements(stream)
        elif stream.kind in ("parquet", "arrow"):
            yield from _batches(stream, row_files.rows(stream, rules.keys))
        elif stream.kind in ("csv", "tsv"):
            yield from _table(stream, rules.keys)
        elif stream.kind == "sample":
            yield from _batches(stream, iter(sample_corpus.documents(stream.name)))
        else:
            yield from _plain_text(stream, rules, may_cut_documents)


def _ranges_of_lines(stream: TextStream) -> Iterator[Block]:
    """Ranges of a file that end with a line."""
    assert stream.path is not None
    with stream.path.open("rb") as file:
        size = file.seek(0, 2)
        start = 0
        before = stream.position() - stream.file.tell()
        while start < size:
            end = start + BLOCK_BYTES
            file.seek(end - 1)
            while end < size:
                piece = file.readline(_READ_BYTES)
                end = file.tell()
                if piece.endswith(b"\n") or not piece:  # nothing: the file has become shorter; its reader will tell
                    break
                _require_short(stream.name, "a line", end - start - BLOCK_BYTES)
            end = min(end, size)
            yield Block(stream.name, "lines", FileRange(stream.path, start, end - start), before + end, start == 0)
            start = end


def _lines(stream: TextStream) -> Iterator[Block]:
    first = True
    most = limits.DOCUMENT_BYTES.value
    while data := stream.file.read(BLOCK_BYTES):
        if not data.endswith(b"\n"):
            rest = stream.file.readline(most + 1)
            _require_short(stream.name, "a line", len(rest))
            data += rest
        yield Block(stream.name, "lines", data, stream.position(), first)
        first = False


def _require_short(name: str, kind: str, size: int) -> None:
    """A document is held in memory and encoded as a whole, which takes many times its size."""
    most = limits.DOCUMENT_BYTES.value
    if size > most:
        raise DataError(
            f"{name}: {kind} of more than {most:,} bytes, which one document may have at most. Cut it into several, or "
            f"look at what it is. {limits.DOCUMENT_BYTES.advice(4 * most)}"
        )


_JSON_MARKS = re.compile(rb'["\\\[\]{},]')
_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # up to its end, or as far as it is known
_QUOTE = re.compile(rb'"')


def _array_elements(stream: TextStream) -> Iterator[Block]:
    """The elements of one JSON array as lines, without holding the array. Line breaks become tabs: blanks between
    tokens, and as little allowed in a JSON string as they are."""
    elements: list[bytes] = []
    size, first = 0, True
    for element in _split_array(stream.file, stream.name):
        elements.append(element.replace(b"\n", b"\t").replace(b"\r", b"\t"))
        size += len(element)
        if size >= BLOCK_BYTES:
            yield Block(stream.name, "array", b"\n".join(elements), stream.position(), first)
            elements, size, first = [], 0, False
    if elements:
        yield Block(stream.name, "array", b"\n".join(elements), stream.position(), first)


def _split_array(file: IO[bytes], name: str) -> Iterator[bytes]:
    def broken(why: str) -> DataError:
        return DataError(f"{name}: not a JSON array: {why} after {count} elements. Fix it, or give one object a line.")

    buffer = file.read(max(_READ_BYTES, len(_BOM))).removeprefix(_BOM).lstrip()
    while not buffer and (more := file.read(_READ_BYTES)):
        buffer = more.lstrip()
    at, start, depth, count = 1, 1, 1, 0  # behind the opening bracket
    in_string = False
    while depth:
        mark = None if in_string else _JSON_MARKS.search(buffer, at)
        if in_string or (mark and mark[0] == b'"'):
            at = _STRING.match(buffer, mark.end() if mark else at).end()  # type: ignore[union-attr]  # it may be empty
            in_string = buffer[at : at + 1] != b'"'
            mark = None if in_string else _QUOTE.match(buffer, at)
            at += not in_string
        elif mark:
            at = mark.end()
            if mark[0] in b"[{":
                depth += 1
            elif mark[0] in b"]}":
                depth -= 1
            elif mark[0] == b"\\":
                raise broken(f"a backslash outside a string at {buffer[mark.start() : mark.start() + 10]!r}")
            if depth == 0 and mark[0] != b"]":
                raise broken("a } that closes nothing")
            ends = (mark[0] == b"," and depth == 1) or depth == 0
            if ends:
                element = buffer[start : mark.start()].strip()
                if element:
                    count += 1
                    yield element
                elif depth or count:
                    raise broken("a comma with nothing before it" if depth else "a comma at the end")
                start = at
        if not mark:
            more = file.read(_READ_BYTES)
            if not more:
                raise broken("the file ends")
            at = at if in_string else len(buffer)  # no mark before the end
            buffer = buffer[start:] + more
            at, start = at - start, 0
            _require_short(name, "an element", len(buffer) - _READ_BYTES)
    rest = buffer[at:] or file.read(_READ_BYTES)
    while rest:  # to the very end, where a compressed file has its checksum
        if rest.strip():
            raise broken(f"more text behind its end, {rest.strip()[:20]!r},")
        rest = file.read(_READ_BYTES)


def _table(stream: TextStream, keys: tuple[str, ...]) -> Iterator[Block]:
    batch: list[tables.Record] = []
    size, first = 0, True
    for record in tables.records(stream, keys):
        batch.append(record)
        size += sum(map(len, record[1])) if isinstance(record[1], tuple) else 1
        if size >= BLOCK_BYTES:
            yield Block(stream.name, "table", batch, stream.position(), first)
            batch, size, first = [], 0, False
    if batch:
        yield Block(stream.name, "table", batch, stream.position(), first)


def _batches(stream: TextStream, rows: Iterator[Any]) -> Iterator[Block]:
    batch: list[Any] = []
    size, first = 0, True
    for row in rows:
        batch.append(row)
        size += len(str(row)) if not isinstance(row, str) else len(row)
        if size >= BLOCK_BYTES:
            yield Block(stream.name, "rows", batch, stream.position(), first)
            batch, size, first = [], 0, False
    if batch:
        yield Block(stream.name, "rows", batch, stream.position(), first)


# A border finder: where the first document that begins at or after `start` begins, or -1. Exact whatever came before.
Border = Callable[[bytearray, int], int]


def _separator_finder(separator: bytes) -> Border:
    if not separator:
        return lambda data, start: -1
    length = len(separator)
    # The piece whose repetition makes the separator overlap itself: "\n" of "\n\n".
    shift = next(n for n in range(1, length + 1) if separator.startswith(separator[n:]))
    run = re.compile(rb"(?:" + re.escape(separator[:shift]) + rb")*+")

    def find(data: bytearray, start: int) -> int:
        at = data.find(separator, start)
        # "\n\n" within a longer run of line breaks may belong to an earlier pair: take one that overlaps no other.
        while at > 0 and 0 <= data.find(separator, max(0, at - length + 1), at + length - 1) < at:
            end = run.match(data, at).end()  # type: ignore[union-attr]  # of the run, in which all overlap
            at = data.find(separator, max(at + 1, end - length + 1))
        return at + length if at >= 0 else -1

    return find


_HEADING = re.compile(rb"\n[ \t]*\n(?= ?= [^=\n](?:[^\n]*[^=\n])? = ?\n[ \t]*\n)")


def _heading(data: bytes | bytearray, start: int) -> int:
    """WikiText: ` = Title = ` between blank lines begins an article; ` = = Section = = ` does not."""
    heading = _HEADING.search(data, max(0, start - 1))
    return heading.end() if heading else -1


def split_articles(data: bytes) -> list[bytes]:
    starts = [0, *(heading.end() for heading in _HEADING.finditer(data)), len(data)]
    return [data[begin:end] for begin, end in pairwise(starts)]


def _safe_cut(data: bytearray, start: int, wanted: str, separator: bytes) -> int:
    """Where a long document may be cut so that no separator or heading is cut with it; -1: not known yet."""
    for cut in SAFE_CUT.finditer(data, start):
        at = cut.end()
        if wanted == "wikitext":
            is_safe = not data.startswith((b"=", b" ="), data.rfind(b"\n", 0, at) + 1)
        else:
            is_safe = not separator or data.find(separator, max(0, at - len(separator)), at + len(separator)) < 0
        if is_safe and at + len(separator) <= len(data):
            return at
    return -1


def _plain_text(stream: TextStream, rules: TextRules, may_cut_documents: bool) -> Iterator[Block]:
    may_cut_documents = (
        may_cut_documents and not rules.strip
    )  # a piece does not know where its document begins and ends
    wanted = "wikitext" if stream.kind == "wikitext" else "text"
    separator = rules.separator.encode()
    border = _heading if wanted == "wikitext" else _separator_finder(separator)
    edge = max(_EDGE, 2 * len(separator))
    buffer = bytearray()
    first, continues, is_open, at_start = True, False, True, True
    searched = 0  # no border begins before here, counted from the block's size on
    while is_open or buffer:
        if is_open:
            piece = _newlines(stream.file)
            is_open = bool(piece)
            buffer += piece
            if at_start and len(buffer) >= len(_BOM):
                at_start = False
                if buffer.startswith(_BOM):
                    del buffer[: len(_BOM)]
        if is_open and len(buffer) < BLOCK_BYTES + _READ_BYTES:
            continue
        end = border(buffer, max(BLOCK_BYTES, searched)) if len(buffer) > BLOCK_BYTES else -1
        # A border at the very edge may look different once more is known.
        end = end if end < len(buffer) - edge or not is_open else -1
        unfinished = False
        if end < 0 and is_open and may_cut_documents:
            end = _safe_cut(buffer, max(BLOCK_BYTES, searched), wanted, separator)
            unfinished = end >= 0
        if end < 0 and is_open:
            searched = len(buffer) - edge
            _require_short(stream.name, "a document", len(buffer) - BLOCK_BYTES)
            continue
        end = end if end >= 0 else len(buffer)
        if end:
            yield Block(stream.name, wanted, bytes(buffer[:end]), stream.position(), first, continues, unfinished)
        del buffer[:end]
        first, continues, searched = False, unfinished, 0


def _newlines(file: IO[bytes]) -> bytes:
    """Some bytes with every kind of line break made \\n."""
    data = file.read(_READ_BYTES)
    if b"\r" not in data:
        return data
    while data.endswith(b"\r") and (more := file.read(1)):
        data += more
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
