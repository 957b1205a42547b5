"""What a run folder tells of a run: its curves, configuration, machine, data and checkpoints."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from gptworks import json_text, run_paths
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.config import yaml_text
from gptworks.config.load import flatten
from gptworks.config.schema import RunConfig
from gptworks.data.store import Store, locate_stores
from gptworks.errors import GPTWorksError, UsageError
from gptworks.report.thinning import Points
from gptworks.train import event_file, jsonl, metrics


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
    events: list[dict[str, Any]] = field(default_factory=list)  # bad steps that train.guard found
    texts: list[dict[str, Any]] = field(default_factory=list)  # what the model wrote at evaluations
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of tasks, with their protocols

    @property
    def origins(self) -> dict[str, str]:
        """Where settings that are not defaults came from, as far as it was written down."""
        origins = self.environment.get("origins")
        return {str(key): str(value) for key, value in origins.items()} if isinstance(origins, dict) else {}

    def last(self, name: str) -> float | None:
        points = self.curves.get(name)
        return points[-1][1] if points else None

    def lowest(self, name: str) -> tuple[float, float] | None:
        points = self.curves.get(name)
        return min(points, key=lambda point: point[1]) if points else None


class Curves:
    """The numbers of metrics.jsonl by their field, as far as they have been read."""

    def __init__(self, folder: Path) -> None:
        self._tail = jsonl.Tail(folder / metrics.NAME)
        self.points: dict[str, Points] = {}
        self.num_unreadable = 0

    def renew(self) -> None:
        """Read what was added since the last time."""
        is_another, entries, num_unreadable = self._tail.look()
        if is_another:
            self.points, self.num_unreadable = {}, 0
        self.num_unreadable += num_unreadable
        for entry in entries:
            for key, value in entry.items():
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if key != "step" and is_number and math.isfinite(value):
                    self.points.setdefault(key, []).append((float(entry["step"]), float(value)))


def read(folder: Path, name: str = "", curves: Curves | None = None) -> RunData:
    """The run in that folder; UsageError where there is none. `curves`: what was read of them before."""
    try:
        next(folder.iterdir(), None)  # or an OSError that says why not
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder. Needed: the folder of a training run.") from None
    curves = curves or Curves(folder)
    curves.renew()
    if not curves.points and not run_paths.was_begun(folder):
        raise UsageError(
            f"{folder}: no {metrics.NAME} and no {run_paths.ENVIRONMENT}. Needed: the folder of a training run."
        )
    notes: list[str] = []
    config = _config(folder, notes)
    environment = _environment(folder, notes)
    return RunData(
        name or folder.resolve().name,
        folder,
        curves.points,
        metrics.read_nonfinite(folder),
        curves.num_unreadable,
        config,
        _changed(config),
        environment,
        _recorded_stores(environment)
        or [facts for path in _listed(config.get("data.path")) for facts in _stores(str(path))],
        _checkpoints(folder, notes),
        notes,
        event_file.read(folder),
        metrics.read_texts(folder),
        metrics.read_evaluations(folder),
    )


def _config(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / run_paths.CONFIG
    if not path.is_file():
        notes.append(f"{path}: not there")
        return {}
    try:
        values = yaml_text.read_plain(path)
    except GPTWorksError as error:
        notes.append(str(error))
        return {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        notes.append(f"{path}: not YAML ({error})")
        return {}
    return flatten(values) if isinstance(values, dict) else {}


def _changed(config: dict[str, Any]) -> dict[str, Any]:
    usual = flatten(RunConfig().model_dump(mode="json"))
    return {key: value for key, value in config.items() if key not in usual or usual[key] != value}


def _environment(folder: Path, notes: list[str]) -> dict[str, Any]:
    path = folder / run_paths.ENVIRONMENT
    try:
        content = json_text.loads_record(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{path}: not there")
        return {}
    except ValueError as error:
        notes.append(f"{path}: not JSON ({error})")
        return {}
    return content if isinstance(content, dict) else {}


def _recorded_stores(environment: dict[str, Any]) -> list[StoreFacts]:
    """As they were when the run began: they may have gone since, or have been named from another folder."""
    stores = environment.get("data")
    listed = [each for each in stores if isinstance(each, dict)] if isinstance(stores, list) else []
    return [StoreFacts(str(each.get("path")), _whole(each, "tokens"), _whole(each, "documents")) for each in listed]


def _listed(value: object) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _whole(facts: dict[str, Any], name: str) -> int | None:
    return value if type(value := facts.get(name)) is int else None


def _stores(path: str) -> list[StoreFacts]:
    try:
        stores = [Store(located) for located in locate_stores(path)]
    except (GPTWorksError, OSError) as error:
        return [StoreFacts(path, None, None, str(error))]
    return [StoreFacts(**each.facts()) for each in stores]


def _checkpoints(folder: Path, notes: list[str]) -> list[CheckpointFacts]:
    checkpoints = CheckpointFolder(folder)
    latest, best = checkpoints.pointed(run_paths.LATEST), checkpoints.pointed(run_paths.BEST)
    facts = []
    for step, path in sorted(checkpoints.steps().items()):
        try:
            manifest = manifests.read(path)
        except GPTWorksError as error:
            notes.append(str(error))
            continue
        size = sum(entry["bytes"] for entry in manifest.files.values())
        facts.append(CheckpointFacts(step, manifest.layout, manifest.held_out_loss, size, path == latest, path == best))
    return facts
