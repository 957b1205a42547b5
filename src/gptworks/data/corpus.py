"""Blocks of text to documents, with what is wrong counted and named."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gptworks.data.columns import columns_of, texts
from gptworks.data.tables import Record
from gptworks.data.text_blocks import Block, FileRange, TextRules, cut, split_articles
from gptworks.data.text_files import list_inputs
from gptworks.errors import DataError

_SHOWN = 5
_BOM = b"\xef\xbb\xbf"


@dataclass
class Skipped:
    """Lines that are not documents. In strict mode the first one stops everything."""

    strict: bool
    count: int = 0
    first: list[str] = field(default_factory=list)
    passed_over: list[str] = field(default_factory=list)  # files that are no known kind of text

    def report(self, where: str, problem: str) -> None:
        message = f"{where}: {problem}"
        if self.strict:
            raise DataError(f"{message}. Fix the line, or leave out --strict to skip such lines.")
        self.count += 1
        if len(self.first) < _SHOWN:
            self.first.append(message)

    def report_all(self, block: Block, problems: list[tuple[int, str]], lines_before: int) -> None:
        for line, problem in problems:
            number = lines_before + line
            where = {"array": f"{block.name}[{number - 1}]", "rows": f"{block.name} row {number}"}
            self.report(where.get(block.kind, f"{block.name}:{number}"), problem)


@dataclass
class Parsed:
    """What is in a block: documents, each with one text per key, and the lines that are none."""

    documents: list[tuple[str, ...]] = field(default_factory=list)
    problems: list[tuple[int, str]] = field(default_factory=list)  # line within the block, from 1; what is wrong
    num_lines: int = 0


def parse(block: Block, rules: TextRules) -> Parsed:
    parsed = _parse(block, rules)
    if rules.strip:
        parsed.documents = [tuple(text.strip() for text in document) for document in parsed.documents]
    return parsed


def _parse(block: Block, rules: TextRules) -> Parsed:
    if isinstance(block.data, list):
        return (_parse_table if block.kind == "table" else _parse_rows)(block.data, rules.keys)
    data = block.data.read() if isinstance(block.data, FileRange) else block.data
    if block.kind in ("text", "wikitext"):
        return _parse_text(block, data, rules)
    return _parse_lines(data.removeprefix(_BOM) if block.is_first else data, rules.keys)


def read_documents(inputs: list[str], rules: TextRules, skipped: Skipped) -> Iterator[tuple[str, ...]]:
    """Each document as a tuple with one text per key, read in this process."""
    files, skipped.passed_over = list_inputs(inputs, rules.kind)
    lines = 0
    for block in cut(files, rules, skipped.passed_over):
        parsed = parse(block, rules)
        lines = 0 if block.is_first else lines
        skipped.report_all(block, parsed.problems, lines)
        lines += parsed.num_lines
        yield from parsed.documents


def _parse_lines(data: bytes, keys: tuple[str, ...]) -> Parsed:
    parsed = Parsed()
    lines = data.split(b"\n")  # not splitlines, which also cuts at rarer characters
    if not lines[-1]:
        lines.pop()
    parsed.num_lines = len(lines)
    single = keys[0] if len(keys) == 1 else None
    is_strict = _quick_loads is not _standard_loads
    for number, line in enumerate(lines, 1):
        is_sound = is_strict
        try:
            record = _quick_loads(line)
        except (ValueError, RecursionError):
            is_sound = False
            try:  # the standard library has the last word on what JSON is
                record = json.loads(line.decode())
            except UnicodeDecodeError as error:
                parsed.problems.append((number, f"not UTF-8 (byte {error.start})"))
                continue
            except (ValueError, RecursionError) as error:
                if line and not line.isspace():
                    parsed.problems.append((number, f"not JSON ({error})"))
                continue
        text = record.get(single) if type(record) is dict and single is not None else None
        # Half of a surrogate pair, which is no character, can come from a \\u escape only; orjson refuses it itself.
        if type(text) is str and (is_sound or (b"\\ud" not in line and b"\\uD" not in line)):
            parsed.documents.append((text,))
        else:
            _take_record(parsed, number, record, keys)
            if parsed.problems and parsed.problems[-1][0] == number:
                with suppress(ValueError, RecursionError):  # the same words, whichever library read the line
                    record = json.loads(line.decode())
                    parsed.problems.pop()
                    _take_record(parsed, number, record, keys)
    return parsed


def _standard_loads(line: bytes) -> Any:
    return json.loads(line.decode())


try:
    from orjson import loads as _quick_loads
except ImportError:
    _quick_loads = _standard_loads  # type: ignore[assignment]


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _take_record(parsed: Parsed, number: int, record: Any, keys: tuple[str, ...]) -> None:
    there = texts(record, keys) if isinstance(record, dict) else {}
    if not isinstance(record, dict):
        problem = f"needs an object with key '{keys[0]}', got {type(record).__name__}"
    elif wrong := [key for key in keys if not isinstance(there.get(key), str)]:
        problem = _not_a_text(record, wrong[0], there, has_one_key=len(keys) == 1)
    elif broken := [key for key in keys if not _is_text(there[key])]:
        problem = f"key '{broken[0]}' is not valid Unicode: half of a surrogate pair, from a broken \\u escape"
    elif len(keys) == 2 and not there[keys[1]].strip():
        problem = f"key '{keys[1]}' is empty: there is nothing to learn"
    else:
        parsed.documents.append(tuple(there[key] for key in keys))
        return
    parsed.problems.append((number, problem))


def _not_a_text(record: dict[str, Any], key: str, there: dict[str, Any], *, has_one_key: bool) -> str:
    if key in there:
        value = there[key]
        why = "got list: join its texts into one" if isinstance(value, list) else f"got {type(value).__name__}"
        return f"key '{key}' is not a string; {why}"
    missing = next(column for column in columns_of(key, record) if column not in record)
    why = f"keys here: {', '.join(record)}"
    others = [name for name, each in record.items() if isinstance(each, str)]
    if others and has_one_key:
        why += f"; --key {max(others, key=lambda name: len(record[name]))} takes that one"
    return f"key '{missing}' is missing; {why}"


def _parse_rows(rows: list[Any], keys: tuple[str, ...]) -> Parsed:
    parsed = Parsed(num_lines=len(rows))
    for number, row in enumerate(rows, 1):
        values = row if isinstance(row, tuple) else (row,)
        _take_record(parsed, number, dict(zip(keys, values, strict=True)), keys)
    return parsed


def _parse_table(records: list[Record], keys: tuple[str, ...]) -> Parsed:
    parsed = Parsed()
    for num_lines, record in records:
        number = parsed.num_lines + 1
        if isinstance(record, str):
            parsed.problems.append((number, record))
        elif record is not None:
            _take_record(parsed, number, dict(zip(keys, record, strict=True)), keys)
        parsed.num_lines += num_lines
    return parsed


def _parse_text(block: Block, data: bytes, rules: TextRules) -> Parsed:
    parsed = Parsed(num_lines=data.count(b"\n"))
    if block.kind == "wikitext":
        pieces, kept = split_articles(data), b""
    elif not rules.separator:
        pieces, kept = [data], b""
    else:
        separator = rules.separator.encode()
        pieces, kept = data.split(separator), separator if rules.keep_separator else b""
    at = 0
    for number, piece in enumerate(pieces):
        is_last = number == len(pieces) - 1
        is_part = (block.continues and number == 0) or (block.unfinished and is_last)
        try:
            text = (piece if is_last else piece + kept).decode()
            if is_part or not (text.isspace() or not text):
                parsed.documents.append((text,))
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, at + error.start) + 1
            parsed.problems.append((line, f"not UTF-8 text (byte {error.start} of its document)"))
            if is_part:
                parsed.documents.append(("",))  # the document goes on without this part
        at += len(piece) + (len(rules.separator.encode()) if block.kind == "text" and rules.separator else 0)
    return parsed
