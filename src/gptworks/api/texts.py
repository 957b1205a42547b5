"""Texts in memory, made into a store as `gptworks prepare` makes one of files."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gptworks.data.columns import columns_of, texts
from gptworks.data.prepare import PrepareJob, Summary, prepare
from gptworks.data.text_blocks import TextRules
from gptworks.errors import DataError, UsageError
from gptworks.tokenizer import Tokenizer

_TEXT, _PAIR = ("text",), ("prompt", "completion")
_NEEDED = 'needs a text, {"text": ...} or {"prompt": ..., "completion": ...}'


@dataclass(frozen=True)
class Texts:
    """Documents: one text each, or a prompt and its completion, of which only the second is scored."""

    keys: tuple[str, ...]
    rows: list[tuple[str, ...]]


def as_texts(data: object, where: str, key: str = "") -> Texts | None:
    """The texts of a list of texts or dictionaries; None for a path. `key`: under which dictionaries have them, or
    several with commas between."""
    if isinstance(data, str | Path):
        return None
    if isinstance(data, Mapping):  # also a DatasetDict of Hugging Face
        raise UsageError(
            f"{where}: got a {type(data).__name__} with {', '.join(map(str, data))}; needs one list. Give one of them, "
            f"such as [{next(iter(data), 'train')!r}]."
        )
    if hasattr(data, "iterrows"):  # a table of pandas, which gives the names of its columns when it is walked through
        raise UsageError(f"{where}: got a {type(data).__name__}; needs a list. Give its rows: .to_dict('records').")
    if not isinstance(data, Iterable):
        raise UsageError(f"{where}: got {data!r}; needs the path of a dataset, or a list of texts.")
    items = list(data)
    if not items:
        raise DataError(f"{where}: an empty list. Needed: at least one text.")
    if key:
        return Texts(_TEXT, [_row_of_key(item, number, key, where) for number, item in enumerate(items, 1)])
    keys = _keys(items[0], where)
    return Texts(keys, [_row(item, number, keys, where) for number, item in enumerate(items, 1)])


def _keys(first: object, where: str) -> tuple[str, ...]:
    """The keys of the first item, which all the others must have too."""
    if not isinstance(first, Mapping) or "text" in first:
        return _TEXT
    if set(_PAIR) <= set(first):
        return _PAIR
    named = ",".join(str(key) for key, value in first.items() if isinstance(value, str)) or "NAME"
    chosen = f'key="{named}"' if where.startswith("evaluate") else f'data={{"key": "{named}"}}'
    raise UsageError(
        f"{where}: item 1 has the keys {', '.join(map(str, first))}; {_NEEDED}. Rename them, or choose some: {chosen}."
    )


def _row_of_key(item: object, number: int, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(item, Mapping):
        raise UsageError(f"{where}: item {number} is {item!r}, which has no key {key!r}. Leave the key out.")
    missing = [column for column in columns_of(key, item) if column not in item]
    text = texts(item, (key,)).get(key)
    if missing or not isinstance(text, str):
        wrong = f"no key {missing[0]!r}" if missing else f"{repr(text)[:40]} under {key!r}, which is not text"
        raise UsageError(f"{where}: item {number} has {wrong}. Its keys: {', '.join(map(str, item))}.")
    return (text,)


def _row(item: object, number: int, keys: tuple[str, ...], where: str) -> tuple[str, ...]:
    values = tuple(item.get(key) for key in keys) if isinstance(item, Mapping) else (item,)
    if len(values) != len(keys) or not all(isinstance(text, str) for text in values):
        wanted = _NEEDED if keys == _TEXT else "needs a prompt and a completion, as those before it"
        raise UsageError(f"{where}: item {number} is {item!r}; {wanted}.")
    texts = tuple(str(text) for text in values)
    if keys == _TEXT and isinstance(item, str) and _names_a_file(item):
        raise UsageError(
            f"{where}: item {number} is {item!r}, which is a file and not a text. Give the path without the list; "
            "several paths go into data.path of the configuration."
        )
    return texts


def _names_a_file(text: str) -> bool:
    """A path in a list would be learned as a text of a few words."""
    if not text.strip() or "\n" in text or len(text) > 1000:
        return False
    try:
        return any(Path(text + ending).exists() for ending in ("", ".bin", ".idx"))
    except (OSError, ValueError):
        return False


def write_store(texts: Texts, prefix: Path, tokenizer: Tokenizer) -> Summary:
    """One document per item, each with its end marked."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    file = prefix.with_name(f"{prefix.name}.texts.jsonl")
    with file.open("w", encoding="utf-8") as lines:
        for row in texts.rows:
            lines.write(json.dumps(dict(zip(texts.keys, row, strict=True))) + "\n")
    has_eod = tokenizer.eod_id is not None
    try:
        return prepare(
            PrepareJob([str(file)], prefix, tokenizer, rules=TextRules(texts.keys), append_eod=has_eod, strict=True)
        )
    finally:
        file.unlink()
