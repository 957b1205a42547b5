"""Folders of Hugging Face `datasets`: what save_to_disk writes, what a builder prepares, what the hub has.

Such a folder has several splits and files that are no text. The split `train` is read; for another, name its folder or
its files.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.errors import DataError

_SPLITS, _STATE, _INFO, _CARD = "dataset_dict.json", "state.json", "dataset_info.json", "README.md"
_MARKS = (_SPLITS, _STATE, _INFO, "dataset_infos.json", _CARD)
_USUAL = ("train", "validation", "test")
_KINDS = (".arrow", ".parquet")


@dataclass(frozen=True)
class DatasetFolder:
    """The files of the split that is read, in their order, and the names of the splits that are not."""

    folder: Path
    files: list[Path]
    split: str
    others: list[str]

    @property
    def note(self) -> str:
        """What a reader should know of it; empty where all of it is read."""
        if not self.others:
            return ""
        place = f"{self.folder / self.others[0]}" if (self.folder / self.others[0]).is_dir() else "its files"
        return f"{self.folder}: the split {self.split} is read, and not {', '.join(self.others)}: name {place} for that"


def is_mark(file: Path) -> bool:
    """Whether a file may say that its folder is a dataset."""
    return file.name in _MARKS


def recognise(folder: Path) -> DatasetFolder | None:
    """None: not such a folder. An error where it is one, and something of it is missing."""
    if (folder / _SPLITS).is_file():
        splits = _read(folder / _SPLITS).get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
            raise DataError(f"{folder / _SPLITS}: splits is {splits!r}, needed their names. Save the dataset again.")
        chosen = _chosen(folder, splits)
        inner = recognise(folder / chosen)
        if inner is None:
            raise DataError(f"{folder / chosen}: not a saved dataset, though {_SPLITS} names it. Copy it again.")
        return DatasetFolder(folder, inner.files, chosen, [name for name in splits if name != chosen])
    if (folder / _STATE).is_file() and (folder / _INFO).is_file():
        return _saved(folder)
    if (folder / _INFO).is_file() or (folder / "dataset_infos.json").is_file() or _is_card(folder / _CARD):
        return _prepared(folder)
    return None


def notes(inputs: Sequence[str]) -> list[str]:
    """A note for each dataset in the inputs that has splits which are not read."""
    datasets: list[DatasetFolder] = []
    for name in inputs:
        marks = Path(name).rglob("*") if Path(name).is_dir() else ()
        for folder in sorted({file.parent for file in marks if is_mark(file)}):
            if not any(each.folder in folder.parents for each in datasets) and (dataset := recognise(folder)):
                datasets.append(dataset)
    return [each.note for each in datasets if each.note]


def _saved(folder: Path) -> DatasetFolder:
    """What save_to_disk wrote. Other .arrow files in it are caches."""
    state = _read(folder / _STATE)
    if state.get("_indices_data_files"):
        raise DataError(
            f"{folder}: its rows are chosen by an index, as `datasets` saved them before 2.0. Load it and save it "
            "again with a newer one."
        )
    names = [each.get("filename") for each in state.get("_data_files") or [] if isinstance(each, dict)]
    files = [folder / Path(str(name)).name for name in names]
    missing = [file for file in files if not file.is_file()]
    if missing or not files:
        problem = (
            f"{missing[0]}: no such file, though {_STATE} names it" if missing else f"{folder / _STATE}: names no files"
        )
        raise DataError(f"{problem}. Copy the dataset again.")
    return DatasetFolder(folder, files, "", [])


def _prepared(folder: Path) -> DatasetFolder | None:
    """What a builder or the hub has: files whose names say the split."""
    files = sorted(file for file in folder.rglob("*") if file.suffix in _KINDS and file.is_file())
    if not files:
        return None
    info = _read(folder / _INFO) if (folder / _INFO).is_file() else {}
    known = list(info["splits"]) if isinstance(info.get("splits"), dict) else list(_USUAL)
    of_split = {name: [file for file in files if _is_of(file.relative_to(folder), name)] for name in known}
    of_split = {name: files for name, files in of_split.items() if files}
    if not of_split:
        return DatasetFolder(folder, files, "", [])
    chosen = _chosen(folder, list(of_split))
    return DatasetFolder(folder, of_split[chosen], chosen, [name for name in of_split if name != chosen])


def _is_of(file: Path, split: str) -> bool:
    """train-00000-of-00002.parquet, json-train.arrow, train/0000.parquet."""
    pattern = rf"(?:^|[-_.]){re.escape(split)}(?:[-_.]|$)"
    return re.search(pattern, file.name) is not None or split in file.parts[:-1]


def _chosen(folder: Path, splits: list[str]) -> str:
    if len(splits) == 1:
        return splits[0]
    if "train" not in splits:
        raise DataError(
            f"{folder}: has the splits {', '.join(splits)}, and none is called train. Name one: {folder / splits[0]}."
        )
    return "train"


def _is_card(file: Path) -> bool:
    """The page of a dataset on the hub begins with a description for machines."""
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        start = opened.read(1 << 16)
    head = start.partition(b"\n---")[0] if start.startswith(b"---") else b""
    return any(mark in head for mark in (b"\ndataset_info:", b"\nconfigs:"))


def _read(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file}: not JSON ({error}). Save the dataset again.") from None
    if not isinstance(content, dict):
        raise DataError(f"{file}: needed an object, got {type(content).__name__}. Save the dataset again.")
    return content
