"""What the page tells of a model: its shape and tokenizer, where its weights came from, and how its run goes on."""

import hashlib
import threading
from pathlib import Path
from typing import Any

from gptworks import run_paths
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.pretrained import Pretrained
from gptworks.errors import GPTWorksError
from gptworks.report.live import Followed
from gptworks.report.run_data import RunData
from gptworks.report.thinning import Points, thinned
from gptworks.serve.served_model import ServedModel
from gptworks.train import plot

_MOST_POINTS = 300  # of a curve
_FEW_POINTS = 30  # so many are not smoothed


class ModelCards:
    """Cards of models that are served. What was read is kept, and read again when the run's files change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # cards are made in threads of their own
        self._runs: dict[Path, Followed] = {}
        self._origins: dict[Path, Origin] = {}

    def card(self, served: ServedModel) -> dict[str, Any]:
        with self._lock:
            origin = self._origins.get(served.checkpoint)
            if origin is None:
                self._origins[served.checkpoint] = origin = Origin(served)
            shape = served.card()["gptworks"]
            run = self._run_of(served.checkpoint, shape["step"])
        return {"id": served.name, **shape, "architecture": _architecture(served), **origin.as_dict(), "run": run}

    def _run_of(self, checkpoint: Path, step: int | None) -> dict[str, Any] | None:
        if not run_paths.is_checkpoint(checkpoint) or checkpoint.parent.name != run_paths.CHECKPOINTS:
            return None
        folder = checkpoint.parent.parent
        try:
            if folder not in self._runs:
                self._runs[folder] = Followed(folder, folder.resolve().name)
            else:
                self._runs[folder].renew()
        except (GPTWorksError, OSError):  # checkpoints alone, without the records of a run
            return None
        return _run_facts(self._runs[folder].data, step)


class Origin:
    """Which system a checkpoint is of, what it was fine-tuned from, and the hashes of its files of weights."""

    def __init__(self, served: ServedModel) -> None:
        self.facts: dict[str, Any] = {"system": None, "tuned_from": None}
        self.files: list[dict[str, Any]] | None = None
        try:
            self._look(served.checkpoint)
        except (GPTWorksError, OSError):  # removed since it was loaded, or of a shape that only the command line says
            self.files = []

    def _look(self, checkpoint: Path) -> None:
        if run_paths.is_checkpoint(checkpoint):
            manifest = manifests.read(checkpoint)
            begun = manifest.config.get("init", {}).get("checkpoint") or None
            self.facts |= {"system": "gptworks", "tuned_from": begun, "trained_with": manifest.layout}
            self.files = _weights(manifest.files)
            return
        opened = Pretrained.open(checkpoint)
        self.facts["system"] = opened.weights.system
        # Gigabytes take their time: the card comes without the hashes first.
        threading.Thread(target=self._hash, args=(list(opened.files),), name="hashes", daemon=True).start()

    def _hash(self, files: list[Path]) -> None:
        hashes = []
        for path in sorted(files):
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                hashes.append({"name": path.name, "bytes": path.stat().st_size, "sha256": digest})
            except OSError:  # removed meanwhile; the others are told
                continue
        self.files = hashes

    def as_dict(self) -> dict[str, Any]:
        """`files` is None until the hashes are known."""
        return {**self.facts, "files": self.files}


def _weights(files: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The files of the model alone, where a checkpoint has them; else all of its state."""
    portable = [name for name in files if name.startswith("portable/") and name.endswith(".safetensors")]
    return [{"name": name, **files[name]} for name in sorted(portable or files)]


def _architecture(served: ServedModel) -> dict[str, Any]:
    """What of the model's section differs from a plain GPT-2, with its sizes."""
    cfg = served.model.cfg
    usual = type(cfg)().model_dump(mode="json")
    values = cfg.model_dump(mode="json")
    return {key: value for key, value in values.items() if value != usual.get(key) and not isinstance(value, dict)}


def _run_facts(run: RunData, served: int | None) -> dict[str, Any]:
    losses, held_out = run.curves.get("loss", []), run.curves.get("held_out_loss", [])
    latest = next((each.step for each in run.checkpoints if each.is_latest), None)
    best = next((each.step for each in run.checkpoints if each.is_best), None)
    return {
        "name": run.name,
        "folder": str(run.folder),
        "step": int(losses[-1][0]) if losses else None,
        "steps": run.config.get("train.steps") or None,
        "tokens_per_second": run.last("tokens_per_sec"),
        "loss": _short(thinned(losses, _MOST_POINTS)),
        "smoothed": _short(plot.smoothed(losses, _MOST_POINTS)) if len(losses) > _FEW_POINTS else [],
        "held_out": _short(thinned(held_out, _MOST_POINTS)),
        "last": _losses_at(losses, held_out, None),
        "served": _losses_at(losses, held_out, served),
        "checkpoints": [{"step": each.step, "held_out_loss": each.held_out_loss} for each in run.checkpoints],
        "newest": latest,
        "best": best,
    }


def _losses_at(losses: Points, held_out: Points, step: int | None) -> dict[str, list[float] | None]:
    """What was known at a step: each number with its own step, the nearest at or before. None: at the last one."""
    known, tested = ([point for point in points if step is None or point[0] <= step] for points in (losses, held_out))
    if len(losses) > _FEW_POINTS:  # as the curve is drawn
        known = plot.smoothed(known, 1)[-1:] if known else []
    return {name: next(iter(_short(points[-1:])), None) for name, points in (("loss", known), ("held_out", tested))}


def _short(points: Points) -> list[list[float]]:
    return [[step, float(f"{value:.5g}")] for step, value in points]
