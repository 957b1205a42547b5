"""More of making a run small: what depends on files, its data and the checkpoint that it starts from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.errors import GPTWorksError
from gptworks.interop import shrink


def vocabulary_of_data(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """As many words as the tokenizer of the data has, where a file beside them tells; never more than were asked."""
    paths = config.get("data.path") or ()
    sizes = [_size(folder / f"{path}.json") or _size(folder / f"{path}".replace(".bin", ".json")) for path in paths]
    if not sizes or not all(sizes):
        return {}
    unit = 128 * config.get("parallel.tp", 1)
    needed = -(-max(sizes) // unit) * unit
    return {"model.vocab_size": needed} if needed < config.get("model.vocab_size", 0) else {}


def heads_of_checkpoint(config: Mapping[str, Any], small: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """How many heads, where the checkpoint to start from does not say: those of the command if it is as wide as the
    command says, else those of a model that was shrunk, too."""
    from gptworks.checkpoint.inspect import inspect

    source = str(config.get("init.checkpoint") or "")
    if not source or "model.num_heads" in small:
        return {}
    try:
        report = inspect(folder / source)
    except GPTWorksError:  # it is told when it is opened
        return {"model.num_heads": shrink.num_heads(config)} if source.endswith(".ckpt") else {}
    if report.heads_known:
        return {}
    is_whole = report.opened.model.hidden_size == config.get("model.hidden_size")
    heads = config.get("model.num_heads") if is_whole else None
    return {"model.num_heads": heads or shrink.num_heads(config)}


def _size(sidecar: Path) -> int:
    try:
        content = json_text.loads(sidecar.read_text(encoding="utf-8"))
        return int(content["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0
