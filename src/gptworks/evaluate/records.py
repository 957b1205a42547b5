"""One line per document (passage, window), written while an evaluation runs: an interrupted one goes on from there."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from gptworks import json_text
from gptworks.errors import DataError

FORMAT, VERSION = "gptworks-evaluation", 1


@dataclass
class Records:
    """A file of JSON lines: what was measured, then a line per document. Without a file, in memory only."""

    file: Path | None
    header: dict[str, Any]  # hashes and settings: whoever goes on must do the same
    total: int
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    _open: TextIO | None = None

    def __enter__(self) -> "Records":
        if self.file is None:
            return self
        first = {"format": FORMAT, "version": VERSION, **self.header, "total": self.total}
        whole = list(self._read(first)) if self.file.exists() and self.file.stat().st_size else []
        self.lines = {line["index"]: line for line in whole}
        # Written anew in one go: a line torn by a crash must not be continued in its middle.
        self._write(first)
        self._open = self.file.open("a", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self._open.close()
            if kind is None:  # in the order of the data, whatever order they were computed in
                self._write({"format": FORMAT, "version": VERSION, **self.header, "total": self.total})

    @property
    def missing(self) -> list[int]:
        return [index for index in range(self.total) if index not in self.lines]

    def add(self, index: int, values: dict[str, Any]) -> None:
        self.lines[index] = {"index": index, **values}
        if self._open:
            self._open.write(json.dumps(self.lines[index]) + "\n")

    def flush(self) -> None:
        if self._open:
            self._open.flush()

    def in_order(self) -> list[dict[str, Any]]:
        return [self.lines[index] for index in range(self.total)]

    def _write(self, first: dict[str, Any]) -> None:
        assert self.file is not None
        temporary = self.file.with_name(f".{self.file.name}.new")
        try:
            with temporary.open("w", encoding="utf-8") as file:
                file.write(json.dumps(first) + "\n")
                file.writelines(json.dumps(self.lines[index]) + "\n" for index in sorted(self.lines))
            os.replace(temporary, self.file)  # noqa: PTH105
        except FileNotFoundError:
            raise DataError(
                f"--per-document: {self.file.parent} is not a folder. Make it, or name another file."
            ) from None
        except OSError as error:
            raise DataError(
                f"--per-document: {self.file} cannot be written ({error.strerror}). Name another file."
            ) from None

    def _read(self, needed: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The whole lines of an earlier, interrupted evaluation of the same."""
        assert self.file is not None
        try:
            first, *others = self.file.read_bytes().split(b"\n")
            header = json_text.loads(first)
            is_ours = isinstance(header, dict) and header.get("format") == FORMAT
        except OSError as error:
            raise DataError(
                f"--per-document: {self.file} cannot be read ({error.strerror}). Name another file."
            ) from None
        except ValueError:
            is_ours = False
        if not is_ours:
            raise DataError(
                f"--per-document: {self.file} exists, but not as an evaluation of gptworks. Name another file, or "
                "remove it."
            )
        for name, value in needed.items():
            if header.get(name) != value:
                raise DataError(
                    f"--per-document: {self.file} was written with {name} {_short(header.get(name))}, now "
                    f"{_short(value)}. "
                    "Name another file, or remove it to begin anew."
                )
        for line in others[:-1]:  # what follows the last line break was not finished
            try:
                record = json_text.loads(line)
                index = record["index"]
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"--per-document: {self.file} is damaged at {line[:40]!r}. Remove it to begin anew."
                ) from None
            if not isinstance(index, int) or not 0 <= index < self.total:
                raise DataError(
                    f"--per-document: {self.file} has number {index!r} of {self.total}. Remove it to begin anew."
                )
            yield record


def _short(value: Any) -> str:
    text = str(value)
    return text[:12] + "..." if len(text) == 64 else text
