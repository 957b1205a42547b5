"""A text of several columns: the key `title,steps` asks for both, one below the other."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any


def columns_of(key: str, names: Collection[str]) -> tuple[str, ...]:
    """The columns that a key asks for. One whose own name has a comma is taken for what it is."""
    return (key,) if key in names or "," not in key else tuple(part.strip() for part in key.split(","))


def all_columns(keys: Sequence[str], names: Collection[str]) -> tuple[str, ...]:
    """The columns of all keys, each once."""
    return tuple(dict.fromkeys(column for key in keys for column in columns_of(key, names)))


def texts(record: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """The value of each key that the record has in full; one that is no text stays what it is, for the message."""
    by_key: dict[str, Any] = {}
    for key in keys:
        columns = columns_of(key, record)
        if all(column in record for column in columns):
            values = [record[column] for column in columns]
            by_key[key] = values[0] if len(columns) == 1 else _joined(values)
    return by_key


def _joined(values: list[Any]) -> Any:
    """Numbers are written out; what is empty leaves no line."""
    parts = [str(value) if isinstance(value, int | float) else value for value in values if value is not None]
    return next((part for part in parts if not isinstance(part, str)), "\n".join(part for part in parts if part))


def advice(missing: str, names: Collection[str]) -> str:
    """How to name what is there."""
    near = difflib.get_close_matches(missing, list(names), 1, 0.6)
    meant = f"Did you mean {near[0]}? " if near else ""
    return f"{meant}Choose one with --key, or several with commas between."
