"""What a checkpoint says of itself. Its presence, under the final name of the folder, is the sign of wholeness."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gptworks.errors import CheckpointError

NAME = "manifest.json"
VERSION = 1


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
    best: dict[str, float] | None = None  # step and held-out loss of the best checkpoint so far
    evaluations_since_best: int = 0
    skipped_in_a_row: int = 0
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
        (folder / NAME).write_text(json.dumps(asdict(self), indent=2, allow_nan=False) + "\n", encoding="utf-8")


def describe_files(folder: Path, files: Iterable[Path]) -> dict[str, dict[str, Any]]:
    return {str(path.relative_to(folder)): {"bytes": path.stat().st_size, "sha256": _hash(path)} for path in files}


def read(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["version"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: not a training checkpoint; {NAME} is missing.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a manifest ({error}). The checkpoint is damaged.") from None
    if version != VERSION:
        raise CheckpointError(
            f"{path}: version {version}, needed {VERSION}. It was written by another version of gptworks."
        )
    try:
        manifest = Manifest(**values)
        _check_kinds(manifest)
    except TypeError as error:
        raise CheckpointError(f"{path}: not a manifest ({error}). The checkpoint is damaged.") from None
    return manifest


def _check_kinds(manifest: Manifest) -> None:
    kinds = {
        int: ("step", "consumed", "optimizer_updates", "global_size", "evaluations_since_best", "unlogged_steps"),
        str: ("tokenizer_identity", "layout"),
        dict: ("config", "scaler", "files"),
        list: ("data_identities",),
    }
    for kind, names in kinds.items():
        for name in names:
            if not isinstance(getattr(manifest, name), kind):
                raise TypeError(f"{name} is {getattr(manifest, name)!r}, needed {kind.__name__}")
    for name, expected in manifest.files.items():
        if not isinstance(expected, dict) or not {"bytes", "sha256"} <= expected.keys():
            raise TypeError(f"files: {name!r} has no size and hash")


def verify(folder: Path, manifest: Manifest, *, share: int = 0, shares: int = 1) -> None:
    """Every file is there, with the size and the hash it was written with. Ranks can take a share of them each."""
    for name, expected in list(manifest.files.items())[share::shares]:
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path}: missing. The checkpoint is damaged; use an earlier one with --resume DIR.")
        if path.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: {path.stat().st_size} bytes, needed {expected['bytes']}. The checkpoint is damaged; use "
                "an earlier one with --resume DIR."
            )
        if _hash(path) != expected["sha256"]:
            raise CheckpointError(
                f"{path}: contents have changed since it was written. The checkpoint is damaged; use an earlier "
                "one with --resume DIR."
            )


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
