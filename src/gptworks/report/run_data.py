"""What a run folder tells of a run: its curves, configuration, machine, data and checkpoints."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.config import yaml_text
from gptworks.config.load import flatten
from gptworks.config.schema import RunConfig
from gptworks.data.store import Store, locate_stores
from gptworks.errors import GPTWorksError, UsageError
from gptworks.report.thinning import Points
from gptworks.train import metrics


@dataclass(frozen=True)
class StoreFacts:
    """A dataset of the run, as far as it is still there."""

    path: str
    tokens: int | None
    documents: int | None
    missing: str = ""


@dataclass(frozen=True)
class CheckpointFacts:
    step: int
    layout: str
    held_out_loss: float | None
    bytes: int
    is_latest: bool
    is_best: bool


@dataclass(frozen=True)
class RunData:
    """One run. `curves` has the numbers of metrics.jsonl by their field, as (step, value)."""

    name: str
    folder: Path
    curves: dict[str, Points]
    nonfinite: list[dict[str, Any]]  # steps that were not finite
    num_unreadable: int
    config: dict[str, Any]  # dotted key -> value
    changed: dict[str, Any]  # those that differ from the defaults
    environment: dict[str, Any]
    stores: list[StoreFacts]
    checkpoints: list[CheckpointFacts]
    notes: list[str] = field(default_factory=list)  # what could not be read, and why

    def last(self, name: str) -> float | None:
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def lowest(self, name: str) -> tuple[float, float] | None:
        points = self.curves.get(name)
        return min(points, key=lambda point: point[1]) if points else None


def read(folder: Path, name: str = "") -> RunData:
    """The run in that folder; UsageError where there is none."""
    try:
        next(folder.iterdir(), None)  # or an OSError that says why not
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder. Needed: the folder of a training run.") from None
    entries = metrics.read(folder)
    if not entries and not (folder / "environment.json").is_file():
        raise UsageError(f"{folder}: no {metrics.NAME} and no environment.json. Needed: the folder of a training run.")
    notes: list[str] = []
    config = _config(folder, notes)
    environment = _environment(folder, notes)
    return RunData(
        name or folder.resolve().name,
        folder,
        _curves(entries),
        metrics.read_nonfinite(folder),
        metrics.num_unreadable(folder),
        config,
        _changed(config),
        environment,
        [facts for path in config.get("data.path", []) for facts in _stores(str(path))],
        _checkpoints(folder, notes),
        notes,
    )


def _curves(entries: list[dict[str, Any]]) -> dict[str, Points]:
    found: dict[str, Points] = {}
    for entry in entries:
        for key, value in entry.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if key != "step" and is_number and math.isfinite(value):
                found.setdefault(key, []).append((float(entry["step"]), float(value)))
    return found


def _config(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / "config.yaml"
    if not path.is_file():
        notes.append(f"{path}: not there")
        return {}
    try:
        found = yaml_text.read_plain(path)
    except GPTWorksError as error:
        notes.append(str(error))
        return {}
    return flatten(found) if isinstance(found, dict) else {}


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    usual = flatten(RunConfig().model_dump(mode="json"))
    return {key: value for key, value in config.items() if key not in usual or usual[key] != value}


def _environment(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / "environment.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path}: not there")
        return {}
    except (ValueError, RecursionError) as error:
        notes.append(f"{path}: not JSON ({error})")
        return {}
    return found if isinstance(found, dict) else {}


def _stores(path: str) -> list[StoreFacts]:
    try:
        stores = [Store(located) for located in locate_stores(path)]
    except (GPTWorksError, OSError) as error:
        return [StoreFacts(path, None, None, str(error))]
    return [
        StoreFacts(str(each.file), len(each.tokens), each.num_documents if each.contents.has_documents else None)
        for each in stores
    ]


def _checkpoints(folder: Path, notes: list[str]) -> list[CheckpointFacts]:
    checkpoints = CheckpointFolder(folder)
    latest, best = checkpoints.pointed("latest"), checkpoints.pointed("best")
    found = []
    for step, path in sorted(checkpoints.steps().items()):
        try:
            manifest = manifests.read(path)
        except GPTWorksError as error:
            notes.append(str(error))
            continue
        size = sum(entry["bytes"] for entry in manifest.files.values())
        found.append(CheckpointFacts(step, manifest.layout, manifest.held_out_loss, size, path == latest, path == best))
    return found
