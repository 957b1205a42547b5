"""A task on one or several models, and the result as a dictionary: what `gptworks eval` does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gptworks.errors import UsageError
from gptworks.evaluate import registry
from gptworks.evaluate.measurement import Measurement
from gptworks.evaluate.progress import Watcher
from gptworks.evaluate.report import published_beside
from gptworks.evaluate.request import Request


def evaluate(models: Sequence[str], request: Request, watcher: Watcher | None = None) -> dict[str, Any]:
    """One row per model. With `per_document` an interrupted evaluation is continued by the same call."""
    task = registry.find(request.task)
    _check(models, request)
    settings = registry.settings_of(task, request.settings)
    request = replace(request, protocol=task.protocol(request.protocol), settings=settings)
    task.check_data(task, request.data)
    result: dict[str, Any] = {}
    for path in models:  # one after the other: two need not fit into memory together
        measured = task.measure(Measurement.load(path, request, watcher or Watcher()))
        if not result:
            result = measured
        else:
            if measured["protocol"] != result["protocol"]:
                measured["remarks"].append(f"{path} was measured otherwise: {measured['protocol']}")
            known = [row for row in result["rows"] if "weights_sha256" not in row]
            result["rows"] += [row for row in measured["rows"] if row not in known]  # baselines once
            result["remarks"] += [remark for remark in measured["remarks"] if remark not in result["remarks"]]
    result["rows"].sort(key=lambda row: "weights_sha256" not in row)  # the simple models last
    return result | {"published": published_beside(task) if request.published else []}


def _check(models: Sequence[str], request: Request) -> None:
    if not models:
        raise UsageError("--model: none given. Needed: at least one.")
    if request.batch_size < 1:
        raise UsageError(f"--batch-size: got {request.batch_size}; needs 1 or more.")
    if request.limit < 0:
        raise UsageError(f"--limit: got {request.limit}; needs 1 or more, or 0 for everything.")
    if request.per_document and len(models) > 1:
        raise UsageError(f"--per-document: one file holds one model's documents, but {len(models)} models were given.")
