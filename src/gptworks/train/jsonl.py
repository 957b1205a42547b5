"""Files of one JSON entry per line, which a crash may have cut off and a disk may have damaged."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.durable import sync


def entries(path: Path, needs: str = "step") -> tuple[list[dict[str, Any]], list[bytes]]:
    """The entries of a file, and its lines that are none. A last line that was cut off by a crash is neither.

    `needs`: the key whose whole number an entry must have.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    good, bad = [], []
    for line in lines[:-1]:
        entry = _parsed(line, needs)
        if entry is not None:
            good.append(entry)
        elif line.strip():
            bad.append(line)
    last = _parsed(lines[-1], needs)
    return good + ([last] if last is not None else []), bad


class Tail:
    """A file that grows: each look reads what was added since the one before, and all of it where the file is another
    one of the same name, as after a resume, or was cut."""

    def __init__(self, path: Path, needs: str = "step") -> None:
        self.path, self.needs = path, needs
        self._file, self._read = 0, 0  # which one, and how many of its bytes

    def look(self) -> tuple[bool, list[dict[str, Any]], int]:
        """Whether it begins anew, the entries that are new, and how many lines among them are none."""
        try:
            with self.path.open("rb") as file:
                facts = os.fstat(file.fileno())
                is_another = facts.st_ino != self._file or facts.st_size < self._read
                if is_another:
                    self._file, self._read = facts.st_ino, 0
                file.seek(self._read)
                *lines, last = file.read().split(b"\n")
        except FileNotFoundError:
            self._file, self._read = 0, 0
            return True, [], 0
        parsed = [(line, _parsed(line, self.needs)) for line in lines]
        self._read += sum(len(line) + 1 for line in lines)
        if (ended := _parsed(last, self.needs)) is not None:  # else the rest of it may still come
            parsed.append((last, ended))
            self._read += len(last)
        entries = [entry for _, entry in parsed if entry is not None]
        return is_another, entries, sum(1 for line, entry in parsed if entry is None and line.strip())


def _parsed(line: bytes, needs: str) -> dict[str, Any] | None:
    try:
        entry = json_text.loads_record(line.decode("utf-8"))
    except ValueError:  # not UTF-8 is one, too
        return None
    is_entry = isinstance(entry, dict) and type(entry.get(needs)) is int and entry[needs] >= 0
    return entry if is_entry else None


def rewrite(path: Path, kept: Iterable[dict[str, Any]]) -> None:
    """In one go: a crash leaves the old lines or the new ones."""
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    sync(replacement)  # else the power may go between the new name and what is behind it, and all lines with it
    replacement.replace(path)


def keep(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], int]:
    """Drops the other entries; lines that are none are put into a file beside. Returns the entries that were dropped,
    and how many lines were none."""
    if not path.exists():
        return [], 0
    lines, bad = entries(path)
    if bad:
        with aside(path).open("ab") as file:
            file.write(b"\n".join(bad) + b"\n")
    kept = [entry for entry in lines if is_kept(entry)]
    rewrite(path, kept)
    return [entry for entry in lines if not is_kept(entry)], len(bad)


def aside(path: Path) -> Path:
    """Where the lines of a file are put that are no entries."""
    return path.with_name(f"{path.name}.bad")


def about_bad(path: Path, number: int) -> str:
    """What the user is told of them."""
    return f"{path}: {number} line{'s' * (number > 1)} that cannot be read set aside in {aside(path)}"


def append(path: Path, entry: dict[str, Any]) -> None:
    """One that is rare and must not be lost."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
    sync(path)
