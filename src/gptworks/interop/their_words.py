"""Errors of a command that was translated: named is what the user wrote, with our word for it in brackets."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Any

from gptworks.errors import GPTWorksError, UsageError
from gptworks.interop.translation import Translation

_QUOTED = re.compile(r"(`[^`]*`)")  # a command of ours that is shown stays as it is
_KEY = re.compile(r"(?<![\w.=/-])(--[a-z][a-z-]*|[a-z]+(?:\.[a-z][a-z0-9_]*)+)(?![\w./=-]|\.\w)")
_BEGINS = re.compile(r"(?P<before>(?:rank \d+ of \d+: )?)(?P<value>\S+?): ")


def reworded(text: str, translation: Translation) -> str:
    """
    >>> from gptworks.interop.notes import Note
    >>> about = Translation("x", "train", notes=[Note("--input_dir", "d", "mapped", "data.path=[d]")],
    ...                     their_names={"data.path": "--input_dir"})
    >>> reworded("data.path: not set.", about)
    '--input_dir (data.path): not set.'
    >>> reworded("d: no such dataset.", about)
    '--input_dir d (data.path): no such dataset.'
    """
    return _by_key(_by_value(text, translation), translation.their_names)


def _by_value(text: str, translation: Translation) -> str:
    """A message that begins with a value, such as a path: which key has it, or has a path around it or within it."""
    begins = _BEGINS.match(text)
    if begins is None:
        return text
    value = PurePosixPath(begins["value"])
    names, notes = translation.their_names, [note for note in translation.notes if note.value != note.theirs]
    rest = f": {text[begins.end() :]}"
    for note in notes:
        if note.value and PurePosixPath(note.value) == value:
            ours = next((key for key, theirs in names.items() if theirs == note.theirs), "")
            beside = f" ({ours})" if ours and ours != note.theirs else ""
            return f"{begins['before']}{note.theirs} {begins['value']}{beside}{rest}"
    # A path of ours that stands for one of theirs, such as the checkpoint that a run goes on from.
    option = next((key for key, path in pairwise(translation.arguments) if PurePosixPath(path) == value), "")
    stands_for = [note for note in notes if option in names and names[option] == note.theirs]
    paths = [(note, PurePosixPath(note.value)) for note in notes if note.value not in ("", ".", "/")]
    around = [note for note, path in paths if path in value.parents]
    within = [note for note, path in paths if value.name and value in path.parents]
    for note in [*stands_for, *around, *within][:1]:
        return f"{begins['before']}{note.theirs} {note.value} ({begins['value']}){rest}"
    return text


def _by_key(text: str, names: Mapping[str, str]) -> str:
    named: set[str] = set()

    def theirs(match: re.Match[str]) -> str:
        ours = match[1]
        name = names.get("run.out" if ours == "--out" else ours)
        bracketed = match.string[: match.start()].endswith("(") and match.string[match.end() :].startswith(")")
        if name is None or name == ours or bracketed:
            return ours
        if ours in named:
            return name
        named.add(ours)
        return f"{name} ({ours})"

    pieces = _QUOTED.split(text)
    return "".join(piece if number % 2 else _KEY.sub(theirs, piece) for number, piece in enumerate(pieces))


class _Errors:
    """A stream on which messages of errors are reworded; the rest passes."""

    def __init__(self, stream: Any, translation: Translation) -> None:
        self._stream, self._translation = stream, translation

    def write(self, text: str) -> int:
        begins, error, message = text.partition("error: ")
        if error and not begins:
            text = error + reworded(message, self._translation)
        self._stream.write(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def in_their_words(translation: Translation) -> Iterator[None]:
    """What is told on standard error, by us or by processes that were started, and errors that pass."""
    import sys

    before = sys.stderr
    sys.stderr = _Errors(before, translation)  # type: ignore[assignment]
    try:
        yield
    except GPTWorksError as error:
        raise UsageError(reworded(str(error), translation)) from None
    finally:
        sys.stderr = before
