"""Which format is this, and where are its files?"""

import difflib
import glob
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gptworks import file_errors
from gptworks.data.formats import file_names, llmc, megatron, mindrecord, nanogpt, paddle, paddle_npz, tnt
from gptworks.data.formats.contents import Contents
from gptworks.errors import DataError


class Format(Protocol):
    """What a module of this folder offers. `main` is the one file that stands for a dataset."""

    NAME: str
    TITLE: str
    KEEPS_SEQUENCES: bool  # which sequences make up a document
    NEEDS_ROWS: bool  # a row is a training sample
    LARGEST_ID: int | None  # that it can hold, where that is less than tokenizers need

    def find(self, path: Path) -> Path | None:
        """The main file of the dataset that `path` names: its prefix, or any of its files. None: not of this format."""

    def files(self, main: Path) -> list[Path]:
        """Every file of the dataset, without the sidecar."""

    def sidecar(self, main: Path) -> Path: ...

    def read(self, main: Path) -> Contents:
        """Checked: what cannot be right is a DataError with file and field."""

    def write(self, prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
        """Writes the files beside PREFIX and returns them."""


_MODULES: tuple[Format, ...] = (megatron, tnt, paddle, paddle_npz, mindrecord, nanogpt, llmc)
FORMATS: dict[str, Format] = {module.NAME: module for module in _MODULES}


@dataclass(frozen=True)
class Located:
    """A dataset on disk that has been recognised but not read."""

    format: Format
    main: Path

    @property
    def files(self) -> list[Path]:
        return self.format.files(self.main)

    @property
    def sidecar(self) -> Path:
        return self.format.sidecar(self.main)


def locate(path: Path, also: str = "") -> Located:
    """The one dataset that `path` names. `also`: what else would have been taken, for the message."""
    datasets = _candidates(path)
    if not datasets:
        file_errors.refuse_unreadable(path)
        raise DataError(_nothing_at(path, also))
    if len(datasets) > 1:
        listed = ", ".join(f"{each.main} ({each.format.NAME})" for each in datasets)
        raise DataError(f"{path}: names {len(datasets)} datasets: {listed}. Give the file you mean.")
    return datasets[0]


def locate_all(folder: Path) -> list[Located]:
    """Every dataset in a folder and the folders in it, in the order of their names; not those being written."""
    files = [file for file in sorted(folder.rglob("*")) if file.is_file() and not _is_unfinished(file, folder)]
    datasets = {each.main: each for file in files for each in _candidates(file)}
    if not datasets:
        file_errors.refuse_unreadable(folder)
    return [datasets[main] for main in sorted(datasets)]


def mains(format_: Format, written: list[Path]) -> list[Path]:
    """The datasets among files of one format; several when it writes shards."""
    return sorted({main for file in written if (main := format_.find(file))})


def replaced_by(format_: Format, files: list[Path], prefix: Path) -> list[Path]:
    """What would be left of older datasets at PREFIX, and taken for part of the new one, once `files` are written."""
    names = [prefix, *files, *sorted(prefix.parent.glob(f"{glob.escape(prefix.name)}_[0-9]*.bin"))]
    olds = {each.main: each for name in names for each in _candidates(name)}
    stale = {format_.sidecar(main) for main in files}
    stale |= {prefix.with_name(prefix.name + ending) for ending in (".tokenizer.json", ".tokenizer.model")}
    for old in olds.values():
        is_shard = format_.NAME == old.format.NAME == "llmc"
        if is_shard or not set(old.files).isdisjoint(files):
            stale |= {*old.files, old.sidecar}
    return sorted(file for file in stale - set(files) if file.is_file())


def _is_unfinished(file: Path, folder: Path) -> bool:
    """In the work folder of `prepare` (NAME.part) or `convert` (NAME.part-...)."""
    return any(re.fullmatch(r".*\.part(-\w+)*", part) for part in file.relative_to(folder).parts[:-1])


def _candidates(path: Path) -> list[Located]:
    mains = ((format_, format_.find(path)) for format_ in FORMATS.values())
    return [Located(format_, main) for format_, main in mains if main is not None]


def _nearest(path: Path) -> Path | None:
    """What is there instead: a dataset whose name goes on (X_text_document), or a name that is nearly the same."""
    there = path.parent
    while not there.is_dir() and there != there.parent:
        path, there = there, there.parent
    files_of = {each.name: each for each in sorted(there.iterdir()) if not each.name.startswith(".")}
    longer = [each for name, each in files_of.items() if name.startswith(f"{path.name}_") and _candidates(each)]
    if longer:
        main = _candidates(longer[0])[0].main
        return main.with_suffix("") if main.suffix == ".bin" else main
    near = difflib.get_close_matches(path.name, files_of, 1, cutoff=0.75)
    return files_of[near[0]] if near and near[0] != path.name else None


def _nothing_at(path: Path, also: str) -> str:
    kinds = ", ".join(FORMATS)
    index = file_names.beside(file_names.prefix_of(path), ".idx")
    if index.is_file():
        with index.open("rb") as file:
            start = file.read(len(megatron.MAGIC))
        return (
            f"{index}: begins with {start!r}, needed {megatron.MAGIC!r} (or TNTIDX, the older kind). This is not the "
            "index of a dataset, or it is damaged: copy or prepare it again."
        )
    tokens = file_names.beside(file_names.prefix_of(path), ".bin")
    if tokens.is_file() and path.name != tokens.name:
        return (
            f"{index}: no such file. Needed: the pair {tokens.name} and {index.name}. If {tokens.name} is a bare "
            f"stream of tokens, name it in full: {tokens}."
        )
    if file_names.beside(path, ".part").is_dir():
        return f"{path}: `gptworks prepare` was stopped before it was finished. The same command goes on."
    if any(path.parent.glob(f"{glob.escape(path.name)}_[0-9]*.bin")):
        return f"{path}: is in shards. Give the folder they are in, or the pattern '{path}_*.bin'."
    if path.is_file():
        return f"{path}: not a dataset of a known format. Known: {kinds}. `gptworks prepare` makes one from text."
    near = _nearest(path)
    meant = f" Did you mean {near}?" if near else ""
    return (
        f"{path}: no such dataset.{meant} Needed: {also}the prefix, a file or the folder of a "
        f"dataset ({kinds}); `gptworks prepare FILE... --out PREFIX` makes one."
    )
