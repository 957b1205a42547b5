"""Text in: files to documents, one at a time, with what is wrong counted and named."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gptworks.data import sample_corpus
from gptworks.errors import DataError

TEXT_SUFFIXES = {".txt", ".text", ".md"}
JSON_SUFFIXES = {".jsonl", ".ndjson"}
BLANK_LINE = "\n\n"


@dataclass
class Skipped:
    """Lines that are not documents. In strict mode the first one stops everything."""

    strict: bool
    count: int = 0
    first: list[str] = field(default_factory=list)

    def report(self, where: str, problem: str) -> None:
        message = f"{where}: {problem}"
        if self.strict:
            raise DataError(f"{message}. Mend the line, or leave out --strict to skip such lines.")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)


@dataclass(frozen=True)
class TextRules:
    """How to find documents in files. Two keys mean prompt and completion."""

    keys: tuple[str, ...] = ("text",)
    separator: str = BLANK_LINE  # of plain text; empty = the whole file is one document
    keep_separator: bool = True  # it stays in the text unless an end-of-document token takes its place


def check_inputs(inputs: list[str]) -> None:
    """Complain about all unusable inputs before any work is done."""
    problems = []
    for name in inputs:
        path = Path(name)
        if name.startswith(sample_corpus.PREFIX):
            sample_corpus.check(name)
        elif not path.exists():
            problems.append(f"{name}: no such file. Check the path.")
        elif not path.is_file():
            problems.append(f"{name}: a folder, not a file. Give the files in it.")
        elif path.suffix not in TEXT_SUFFIXES | JSON_SUFFIXES:
            kinds = ", ".join(sorted(TEXT_SUFFIXES | JSON_SUFFIXES))
            problems.append(
                f"{name}: kind of file not known from its name. Needed: {kinds}, or {sample_corpus.PREFIX}NAME."
            )
    if problems:
        raise DataError("\n".join(problems))


def read_documents(inputs: list[str], rules: TextRules, skipped: Skipped) -> Iterator[tuple[str, ...]]:
    """Each document as a tuple with one text per key."""
    for name in inputs:
        path = Path(name)
        if name.startswith(sample_corpus.PREFIX):
            for text in sample_corpus.documents(name):
                yield (text,)
        elif path.suffix in JSON_SUFFIXES:
            yield from _json_lines(path, rules.keys, skipped)
        else:
            yield from ((text,) for text in _plain_text(path, rules, skipped))


def _json_lines(path: Path, keys: tuple[str, ...], skipped: Skipped) -> Iterator[tuple[str, ...]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError as error:
                skipped.report(where, f"not UTF-8 (byte {error.start})")
                continue
            except (ValueError, RecursionError) as error:
                skipped.report(where, f"not JSON ({error})")
                continue
            if not isinstance(record, dict):
                skipped.report(where, f"needs an object with key '{keys[0]}', got {type(record).__name__}")
                continue
            missing = [key for key in keys if not isinstance(record.get(key), str)]
            if missing:
                got = (
                    f"got {type(record[missing[0]]).__name__}"
                    if missing[0] in record
                    else f"keys here: {', '.join(record)}"
                )
                skipped.report(where, f"key '{missing[0]}' is not a text; {got}")
                continue
            texts = tuple(record[key] for key in keys)
            try:
                "".join(texts).encode()
            except UnicodeEncodeError as error:
                half = error.object[error.start]
                skipped.report(where, f"not a text: {half!r} is half of a surrogate pair, from a broken \\u escape")
                continue
            if len(keys) == 2 and not texts[1].strip():
                skipped.report(where, f"key '{keys[1]}' is empty: there is nothing to learn")
                continue
            yield texts


def _plain_text(path: Path, rules: TextRules, skipped: Skipped) -> Iterator[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        skipped.report(str(path), f"not UTF-8 text (byte {error.start})")
        return
    if not rules.separator:
        yield text
        return
    pieces = text.split(rules.separator)
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        document = piece + ("" if last or not rules.keep_separator else rules.separator)
        if document.strip():
            yield document
