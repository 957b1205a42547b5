"""`gptworks.evaluate`: a model measured on data, by the name of a task."""

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptworks.api.tasks import require_task
from gptworks.api.texts import as_texts, write_store
from gptworks.checkpoint import folder as folders
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.data.store import is_raw_text
from gptworks.errors import TokenizerError, UsageError
from gptworks.evaluate import heldout_dataset, registry, run
from gptworks.evaluate.heldout import HeldOut
from gptworks.evaluate.heldout_dataset import as_store, data_section, default_split, open_dataset
from gptworks.evaluate.request import Request
from gptworks.evaluate.task import Task
from gptworks.evaluate.tasks.heldout import SPLITS
from gptworks.python_words import in_python_words


@in_python_words
def evaluate(
    model: str | Path | PretrainedGPT, data: str | Path | Iterable[Any], *, task: str = "heldout", **settings: Any
) -> Any:
    """How well a model predicts data. The model is a folder, a name or a `GPT`; the data a dataset, a file or folder of
    text, or a list of texts, of {"text": ...} or of {"prompt": ..., "completion": ...}.

    Tasks: `heldout`, whose result has loss, perplexity, bits_per_byte, tokens. Its settings: `split` (train, held-out,
    test or all; by default held-out of a dataset and all of texts), `shares` of the split and `seq_len` (by default
    those of training), `key` or column of the text, or several with commas between (by default text), `batch_size`,
    `device`. `wikitext` and `lambada` take a folder or name and a file, and give what `gptworks eval --json` prints;
    settings: `protocol`, `overlap`, `limit`, `batch_size`.

    >>> result = gptworks.evaluate("runs/quickstart", "data/corpus", split="test")   # doctest: +SKIP
    >>> print(result.loss, result.perplexity)   # doctest: +SKIP
    """
    name = require_task(task, registry.TASKS, "evaluate")
    if name == "heldout":  # also of models in memory and of texts
        return held_out(model, data, **settings)
    return measure_file(registry.TASKS[name], model, data, **settings)


def held_out(
    model: str | Path | PretrainedGPT,
    data: str | Path | Iterable[Any],
    *,
    split: str | None = None,
    shares: str | None = None,
    seq_len: int | None = None,
    key: str = "",
    batch_size: int = 8,
    device: str = "auto",
) -> HeldOut:
    """As `gptworks eval --task heldout`."""
    texts = as_texts(data, "evaluate: data", key)
    split = split or ("all" if texts is not None else default_split(str(data)))
    if split not in SPLITS:
        raise UsageError(f"evaluate: split: got {split!r}; needs one of {', '.join(SPLITS)}.")
    loaded = model if isinstance(model, PretrainedGPT) else PretrainedGPT.from_pretrained(model, device=device)
    trained = folders.config_of(loaded.folder) if loaded.folder else {}
    cut = data_section(trained, loaded.cfg.max_positions, str(data) if texts is None else "", split, shares)
    if seq_len is not None:
        cut["seq_len"] = seq_len
    seed = trained.get("train", {}).get("seed", 0)
    if texts is None and not is_raw_text(str(data)):
        if key:
            raise UsageError(f"evaluate: key: got {key!r}, but {data} is not text. Leave it out.")
        return measure(loaded, cut, split=SPLITS[split], batch_size=batch_size, seed=seed)
    if loaded.tokenizer is None:
        raise TokenizerError("evaluate: the model has no tokenizer to read texts with. Put one beside its weights.")
    if texts is None:
        with as_store(str(data), loaded.tokenizer, key) as path:
            return measure(loaded, cut | {"path": path}, split=SPLITS[split], batch_size=batch_size, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "texts")
        write_store(texts, Path(path), loaded.tokenizer)
        return measure(loaded, cut | {"path": path}, split=SPLITS[split], batch_size=batch_size, seed=seed)


def measure(model: PretrainedGPT, data: dict[str, Any], *, split: str, batch_size: int, seed: int) -> HeldOut:
    """`data`: the section of a configuration. The seed decides where the samples of another system's order begin."""
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise UsageError(f"evaluate: batch_size: got {batch_size!r}; needs 1 or more.")
    dataset = open_dataset(model, data, {"train": {"seed": seed}}, "evaluate")
    name = str(model.folder or "the model")
    return heldout_dataset.measure(model, dataset, split, batch_size=batch_size, name=name)


def measure_file(task: Task, model: Any, data: Any, **settings: Any) -> dict[str, Any]:
    """As `gptworks eval --task NAME`: what it prints with --json."""
    if not isinstance(model, str | Path):
        raise UsageError(f"evaluate: task {task.name} takes a folder or a name, got a {type(model).__name__}.")
    own = [option.name for option in registry.accepted(task)]
    known = ("protocol", *own, "limit", "batch_size", "device", "weights", "per_document")
    for name, value in settings.items():
        if name not in known:
            raise UsageError(f"evaluate: task {task.name} has no setting {name!r}. Settings: {', '.join(known)}.")
        if name in ("limit", "batch_size") and (isinstance(value, bool) or not isinstance(value, int)):
            raise UsageError(f"evaluate: {name}: got {value!r}; needs a whole number.")
    if settings.get("per_document"):
        settings["per_document"] = Path(settings["per_document"])
    its_own = {name: settings.pop(name) for name in own if name in settings}
    return run.evaluate([str(model)], Request(task=task.name, data=str(data), settings=its_own, **settings))
