"""What a checkpoint says of itself. Its presence, under the final name of the folder, is the sign of wholeness."""

import errno
import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any

from gptworks import json_text, run_paths
from gptworks.data import mixture
from gptworks.data.passed_over import PassedOver
from gptworks.errors import CheckpointError, DamagedCheckpoint

NAME = run_paths.MANIFEST
VERSION = 3
# Versions before, which can still be read: 1 has no checksum, 2 no passed_over, rollbacks, stages and guard.
_OLDER = (1, 2)
_WITHOUT_CHECKSUM = 1
_DAMAGED = "The checkpoint is damaged: --resume auto takes the newest whole one, --resume DIR the one you name."
_STEP_IN_NAME = re.compile(r"(?:.*-)?step-(\d{8,})$")


@dataclass(frozen=True)
class Manifest:
    step: int
    consumed: int  # samples, over all ranks
    optimizer_updates: int  # skipped steps are not among them
    config: dict[str, Any]
    tokenizer_identity: str
    data_identities: list[str]
    scaler: dict[str, float]
    global_size: int = 0  # samples of the last step; 0 where it was not written down
    samples_asked: int | None = None  # where data.order is laid out for a number of samples
    held_out_loss: float | None = None
    best: dict[str, float] | None = (
        None  # step of the best checkpoint so far, and its held_out_loss or whatever is best_by
    )
    evaluations_since_best: int = 0
    held_out_samples: int = 0  # that these were measured on; 0 where it was not written down
    skipped_in_a_row: int = 0
    passed_over: list[list[int]] = field(default_factory=list)  # [first, end] of samples that are not read again
    rollbacks: int = 0
    stages: list[list[Any]] = field(default_factory=list)  # [first sample, weights of the stores], as they were so far
    guard: dict[str, list[float]] = field(default_factory=dict)  # the last good losses and norms, where it is on
    smoothed_loss: float | None = None  # of the last steps; None where it was not written down
    unlogged_loss: float = 0.0  # sum over the steps since the last log line, whose mean the next one shows
    unlogged_steps: int = 0
    # Every draw is seeded by what it is for, so there is no generator state to keep.
    random_draws: str = (
        "weights: (train.seed, name); order: (train.seed, index), with data.order megatron and paddle also "
        "samples_asked; dropout: (train.seed, step, micro-batch, data rank, pipeline stage, rank in tp)"
    )
    torch_version: str = ""
    layout: str = "1"  # of the processes that saved it, such as pp2.tp2; any other can load it
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # relative path -> bytes, sha256
    format: str = "gptworks-checkpoint"
    version: int = VERSION

    def write(self, folder: Path) -> None:
        values = asdict(self) | {"version": VERSION}
        sealed = values | {"checksum": checksum(values)}
        (folder / NAME).write_text(json.dumps(sealed, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def checksum(values: dict[str, Any]) -> str:
    """The sha256 of all values of a manifest but the checksum itself, as JSON with sorted keys and no blanks."""
    rest = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def describe_files(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _hash(path)} for path in files}


def read(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        values = json_text.loads(path.read_bytes())
        version = values["version"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a training checkpoint; {NAME} is missing.") from None
    except OSError as error:
        raise _as_damage(path, error) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path}: not a manifest ({error!r}). {_DAMAGED}") from None
    if type(version) is not int or version not in (*_OLDER, VERSION):
        raise CheckpointError(
            f"{path}: version {version!r}, needed {VERSION} (or {', '.join(map(str, _OLDER))}). It was written by "
            "another version of gptworks: use that one, or another checkpoint with --resume DIR."
        )
    if version != _WITHOUT_CHECKSUM and values.pop("checksum", None) != checksum(values):
        raise DamagedCheckpoint(
            f"{path}: does not fit its own checksum, so it was changed after it was written. {_DAMAGED}"
        )
    try:
        manifest = Manifest(**values)
        _check_kinds(manifest)
        _check_bounds(manifest, folder)
    except (TypeError, ValueError) as error:
        raise DamagedCheckpoint(f"{path}: not a manifest ({error}). {_DAMAGED}") from None
    return manifest


_COUNTS = (
    "step",
    "consumed",
    "optimizer_updates",
    "global_size",
    "evaluations_since_best",
    "held_out_samples",
    "skipped_in_a_row",
    "unlogged_steps",
    "rollbacks",
)


def _check_kinds(manifest: Manifest) -> None:
    kinds = {
        int: _COUNTS,
        str: ("tokenizer_identity", "layout", "torch_version", "random_draws", "format"),
        dict: ("config", "scaler", "files", "guard"),
        list: ("data_identities", "passed_over", "stages"),
    }
    for kind, names in kinds.items():
        for name in names:
            if type(getattr(manifest, name)) is not kind:
                raise TypeError(f"{name} is {getattr(manifest, name)!r}, needed {kind.__name__}")
    for name, section in manifest.config.items():
        if type(section) is not dict:
            raise TypeError(f"config.{name} is {section!r}, needed keys and values")
    if manifest.samples_asked is not None and type(manifest.samples_asked) is not int:
        raise TypeError(f"samples_asked is {manifest.samples_asked!r}, needed int or null")
    best = {} if manifest.best is None else manifest.best
    if type(best) is not dict or (best and (len(best) != 2 or "step" not in best)):
        raise TypeError(f"best is {manifest.best!r}, needed step and the number that is best, or null")
    PassedOver.from_json(manifest.passed_over)
    mixture.from_json(manifest.stages)
    remembered = [value for values in manifest.guard.values() for value in values]
    if any(type(value) is not float or not math.isfinite(value) for value in remembered):
        raise TypeError(f"guard is {manifest.guard!r}, needed lists of finite numbers")
    losses = {name: getattr(manifest, name) for name in ("held_out_loss", "smoothed_loss", "unlogged_loss")}
    numbers = {name: value for name, value in losses.items() if value is not None}
    for name, value in (numbers | {f"best.{name}": value for name, value in best.items()} | manifest.scaler).items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise TypeError(f"{name} is {value!r}, needed a finite number")


def _check_bounds(manifest: Manifest, folder: Path) -> None:
    """What no run can have come to, and what contradicts the folder that it lies in."""
    for name in _COUNTS:
        if not 0 <= getattr(manifest, name) < 2**63:
            raise ValueError(f"{name} is {getattr(manifest, name)}, needed 0 or more")
    named = _STEP_IN_NAME.match(folder.name)
    if named and int(named[1]) != manifest.step:
        raise ValueError(f"step is {manifest.step}, needed {int(named[1])}, as its folder says")
    if manifest.consumed < manifest.step:
        raise ValueError(f"consumed is {manifest.consumed}, needed at least a sample for each of {manifest.step} steps")
    if manifest.optimizer_updates > manifest.step:
        raise ValueError(f"optimizer_updates is {manifest.optimizer_updates}, needed at most step ({manifest.step})")
    if manifest.samples_asked is not None and manifest.samples_asked < 0:
        raise ValueError(f"samples_asked is {manifest.samples_asked}, needed 0 or more")
    if manifest.best and not 0 <= manifest.best["step"] <= manifest.step:
        raise ValueError(f"best.step is {manifest.best['step']}, needed 0 to step ({manifest.step})")
    for name, expected in manifest.files.items():
        # A path of Windows has both kinds of slashes and a drive, so it sees more than one of POSIX.
        parts = PureWindowsPath(name)
        if not name or ".." in parts.parts or parts.anchor:
            raise ValueError(f"files: {name!r} is not below the checkpoint's own folder")
        known = expected if isinstance(expected, dict) else {}
        if type(known.get("bytes")) is not int or known["bytes"] < 0 or type(known.get("sha256")) is not str:
            raise TypeError(f"files: {name!r} has no size and hash")


def verify(folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Every file is there, with the size and the hash it was written with. Ranks can take a share of them each."""
    names = {PureWindowsPath(name).as_posix() for name in manifest.files}
    if "state/.metadata" not in names or not any(re.fullmatch(r"state/.*\.distcp", name) for name in names):
        raise DamagedCheckpoint(f"{folder / NAME}: files: lists no state/.metadata and state/*.distcp. {_DAMAGED}")
    for name, expected in list(manifest.files.items())[share::shares]:
        path = folder / name
        if not path.is_file():
            raise DamagedCheckpoint(f"{path}: missing. {_DAMAGED}")
        try:
            size = path.stat().st_size
            is_same = size == expected["bytes"] and _hash(path) == expected["sha256"]
        except OSError as error:
            raise _as_damage(path, error) from None
        if size != expected["bytes"]:
            raise DamagedCheckpoint(f"{path}: {size} bytes, needed {expected['bytes']}. {_DAMAGED}")
        if not is_same:
            raise DamagedCheckpoint(f"{path}: contents have changed since it was written. {_DAMAGED}")


def _as_damage(path: Path, error: OSError) -> OSError | DamagedCheckpoint:
    """A disk that cannot read its own blocks has lost them: an earlier checkpoint may lie on others.

    A file without permission is whole, as far as one knows: that error stays what it is.
    """
    reason = {errno.EIO: f"the disk cannot read it ({error.strerror})", errno.ENOENT: "missing"}.get(error.errno or 0)
    return DamagedCheckpoint(f"{path}: {reason}. {_DAMAGED}") if reason else error


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
