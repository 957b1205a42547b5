"""A translation as our YAML, with the notes as comments."""

import json
import shlex
from collections.abc import Sequence

from gptworks.interop.notes import Note
from gptworks.interop.translation import Translation


def as_yaml(translation: Translation) -> str:
    """Each value with the key it came from; what was ignored is listed above, with the reason."""
    lines = [f"# Translated from {translation.system}."]
    lines += [f"# {_line(remark)}" for remark in translation.remarks]
    if not translation.config:
        lines += [_line(f"# {note.theirs}={note.value}: {became(note)}") for note in translation.notes]
        return "\n".join([*lines, f"# {in_one_line(['gptworks', translation.verb, *translation.arguments])}", ""])
    origin: dict[str, str] = {}
    for note in translation.notes:
        if not note.ours:
            lines.append(_line(f"# {note.theirs}={note.value}: {became(note)}"))
            continue
        for setting in note.ours.split(", "):
            reason = f" ({note.why})" if note.why else ""
            origin.setdefault(setting.partition("=")[0], _line(f"{note.theirs}={note.value}{reason}"))
    for section, values in translation.sections().items():
        lines.append(f"{section}:")
        lines += _lines(values, section, origin, "  ")
    return "\n".join(lines) + "\n"


def became(note: Note) -> str:
    if note.ours:
        return f"-> {note.ours}" + (f" ({note.why})" if note.why else "")
    return ("ignored" if note.how == "ignored" else "the same here") + (f", {note.why}" if note.why else "")


def in_one_line(words: Sequence[str]) -> str:
    """For a shell, whatever is in the words."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if "\n" not in word:
        return shlex.quote(word)
    escaped = word.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"$'{escaped}'"


def _lines(values: dict[str, object], path: str, origin: dict[str, str], indent: str) -> list[str]:
    lines = []
    for key, value in values.items():
        if isinstance(value, dict):
            lines.append(f"{indent}{key}:")
            lines += _lines(value, f"{path}.{key}", origin, indent + "  ")
            continue
        comment = f"  # {origin[f'{path}.{key}']}" if f"{path}.{key}" in origin else ""
        lines.append(f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}{comment}")  # JSON is YAML
    return lines


def _line(text: str) -> str:
    """A comment ends with its line."""
    return " ".join(text.split())
