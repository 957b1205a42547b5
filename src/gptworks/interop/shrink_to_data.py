"""More of making a run small: what depends on its data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def vocabulary_of_data(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As many words as the tokenizer of the data has, where a file beside them tells; never more than were asked."""
    paths = config.get("data.path") or ()
    sizes = [_size(folder / f"{path}.json") or _size(folder / f"{path}".replace(".bin", ".json")) for path in paths]
    if not sizes or not all(sizes):
        return {}
    unit = 128 * config.get("parallel.tp", 1)
    needed = -(-max(sizes) // unit) * unit
    return {"model.vocab_size": needed} if needed < config.get("model.vocab_size", 0) else {}


def _size(sidecar: Path) -> int:
    try:
        found = json.loads(sidecar.read_text(encoding="utf-8"))
        return int(found["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
