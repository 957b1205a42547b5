"""Loss on text of a dataset that the model was not trained on."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UsageError
from gptworks.evaluate.task import Metric, Option, Task

if TYPE_CHECKING:
    from gptworks.data.dataset import Dataset
    from gptworks.evaluate.measurement import Measurement

SPLITS = {"train": "train", "held-out": "held_out", "test": "test", "all": "train"}  # as users say it -> as datasets do


def _measure(measurement: "Measurement") -> dict[str, Any]:
    from gptworks.data.store import is_raw_text
    from gptworks.evaluate.heldout_dataset import as_store

    data, key = measurement.request.data, measurement.request.settings["key"]
    if not is_raw_text(data):
        if key:
            raise UsageError(f"--key: got '{key}', but {data} is not text. Leave it out.")
        return _measure_store(measurement, data)
    with as_store(data, measurement.tokenizer, key) as store:
        return _measure_store(measurement, store)


def _measure_store(measurement: "Measurement", store: str) -> dict[str, Any]:
    from gptworks.evaluate import identity
    from gptworks.evaluate.heldout_dataset import default_split, measure

    request = measurement.request
    asked = request.settings["split"] or default_split(request.data)
    dataset, split = _open(measurement, store, asked), SPLITS[asked]
    measured = measure(
        measurement.model,
        dataset,
        split,
        batch_size=request.batch_size,
        limit=request.limit,
        name=measurement.path,
        watcher=measurement.watcher,
    )
    shares = list(dataset.cfg.split)
    cut = ",".join(f"{share:g}" for share in shares)
    protocol = f"{asked} text (shares {cut}), windows of {dataset.cfg.seq_len} tokens side by side"
    head = measurement.head(protocol, identity.of_stores(dataset.stores))
    values = {name: getattr(measured, name) for name in TASK.metrics} | {
        "tokens": measured.tokens,
        "bytes": measured.text_bytes,
        "samples": measured.samples,
    }
    if request.per_document:
        values["documents"] = _per_document(measurement, head, dataset, split)
    rows = [values]
    if request.settings["baselines"]:
        from gptworks.evaluate.heldout_baselines import baseline_rows

        rows += baseline_rows(dataset, split, dataset.tokenizer or measurement.model.tokenizer)
    counts = {"split": asked, "shares": shares, "tokens": measured.tokens, "bytes": measured.text_bytes}
    return measurement.result(head, rows) | counts


def _open(measurement: "Measurement", store: str, split: str) -> "Dataset":
    from gptworks.checkpoint import folder
    from gptworks.evaluate.heldout_dataset import data_section, open_dataset

    model, settings = measurement.model, measurement.request.settings
    trained = folder.config_of(Path(measurement.path))
    section = data_section(trained, model.cfg.max_positions, store, split, settings["shares"])
    if settings["seq_len"] is not None:
        section |= {"seq_len": settings["seq_len"], "too_long": "truncate"}
    return open_dataset(model, section, trained, "eval")


def _per_document(measurement: "Measurement", head: Mapping[str, Any], dataset: "Dataset", split: str) -> int:
    from gptworks.evaluate.documents import Document, StoreDocuments

    documents: list[Document] = []
    limit = measurement.request.limit
    for store, numbers in dataset.documents(split):
        left = limit - len(documents) if limit else len(numbers)
        documents += StoreDocuments(store, numbers[:left], dataset.cfg.seq_len)
    measurement.score(head, documents)
    return len(documents)


def _check_data(_: Task, data: str) -> None:
    from gptworks.data.store import is_raw_text, locate_stores

    if not is_raw_text(data):
        locate_stores(data)


def _own_data(model: str, settings: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """What a run was trained on, and the split of it; text that it held out of its own is all held out."""
    from gptworks.checkpoint import folder

    section = folder.config_of(Path(model)).get("data", {})
    split = settings["split"] or "held-out"
    is_apart = split == "held-out" and section.get("held_out_path")
    paths = section.get("held_out_path" if is_apart else "path") or []
    if len(paths) != 1:
        listed = f" It has {', '.join(paths)}: name one." if paths else ""
        raise UsageError(f"--data: not given, and {model} does not name one dataset.{listed} Needed: a store.")
    return str(paths[0]), {**settings, "split": "all" if is_apart else split}


TASK = Task(
    name="heldout",
    title="held-out loss",
    data="a store, or a file, folder or pattern of text (default: what the run was trained on)",
    metrics={
        "loss": Metric("loss"),
        "perplexity": Metric("perplexity"),
        "bits_per_byte": Metric("bits per byte"),
    },
    counts=("documents", "samples", "tokens", "bytes"),
    measure=_measure,
    options=(
        Option("split", "which documents (default: held-out of a store, all of text)", choices=tuple(SPLITS)),
        Option("key", "key or column of text (default: text)", default="", metavar="NAME"),
        Option("shares", "shares of the split (default: those the model was trained with)", metavar="A,B,C"),
        Option("seq_len", "tokens predicted per sample; longer rows are cut off", parse=int, metavar="N"),
        Option("baselines", "measure unigram, bigram and gzip too", default=False),
    ),
    check_data=_check_data,
    own_data=_own_data,
)
