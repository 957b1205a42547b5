"""Texts in memory, made into a store as `gptworks prepare` makes one of files."""

import json
from collections.abc import Iterable
from pathlib import Path

from gptworks.data.prepare import prepare
from gptworks.errors import DataError, UsageError
from gptworks.tokenizer import Tokenizer


def as_texts(data: object, what: str) -> list[str] | None:
    """The texts of a list; None for a path."""
    if isinstance(data, str | Path):
        return None
    if not isinstance(data, Iterable):
        raise UsageError(f"{what}: got {data!r}; needs the path of a dataset, or a list of texts.")
    texts = list(data)
    for number, text in enumerate(texts, 1):
        if not isinstance(text, str):
            raise UsageError(f"{what}: item {number} is {text!r}; needs a text.")
        if _names_a_file(text):
            raise UsageError(
                f"{what}: item {number} is {text!r}, which is a file and not a text. Give the path without the list; "
                "several paths go into data.path of the configuration."
            )
    if not texts:
        raise DataError(f"{what}: an empty list. Needed: at least one text.")
    return texts


def _names_a_file(text: str) -> bool:
    """A path in a list would be learned as a text of a few words."""
    if not text.strip() or "\n" in text or len(text) > 1000:
        return False
    try:
        return any(Path(text + ending).exists() for ending in ("", ".bin", ".idx"))
    except (OSError, ValueError):
        return False


def write_store(texts: list[str], prefix: Path, tokenizer: Tokenizer) -> str:
    """One document per text, each with its end marked."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    file = prefix.with_name(f"{prefix.name}.texts.jsonl")
    with file.open("w", encoding="utf-8") as lines:
        for text in texts:
            lines.write(json.dumps({"text": text}) + "\n")
    try:
        prepare([str(file)], prefix, tokenizer, append_eod=tokenizer.eod_id is not None, strict=True)
    finally:
        file.unlink()
    return str(prefix)
