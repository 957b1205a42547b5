"""A translation as our YAML, with the notes as comments."""

import json

from gptworks.interop.translation import Translation


def as_yaml(translation: Translation) -> str:
    """Each value with the key it came from; what was ignored is listed above, with the reason."""
    lines = [f"# Translated from {translation.system}."]
    lines += [f"# {_line(remark)}" for remark in translation.remarks]
    if not translation.config:
        return "\n".join([*lines, f"# gptworks {translation.verb} {' '.join(translation.arguments)}", ""])
    origin: dict[str, str] = {}
    for note in translation.notes:
        if not note.ours:
            became = "ignored" if note.how == "ignored" else "the same here"
            lines.append(_line(f"# {note.theirs}={note.value}: {became}, {note.why}"))
            continue
        for told in note.ours.split(", "):
            reason = f" ({note.why})" if note.why else ""
            origin.setdefault(told.partition("=")[0], _line(f"{note.theirs}={note.value}{reason}"))
    for section, values in translation.sections().items():
        lines.append(f"{section}:")
        lines += _lines(values, section, origin, "  ")
    return "\n".join(lines) + "\n"


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
