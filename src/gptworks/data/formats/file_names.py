"""How the files of a dataset are called: PREFIX.bin and PREFIX.idx of a pair, the sidecar; what a file begins with."""

from pathlib import Path


def beside(prefix: Path, suffix: str) -> Path:
    """PREFIX.suffix."""
    return prefix.with_name(prefix.name + suffix)  # Path.with_suffix would eat the dot in a prefix such as v1.5


def prefix_of(path: Path) -> Path:
    return path.with_name(path.name.removesuffix(".bin").removesuffix(".idx"))


def begins_with(file: Path, magic: bytes) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(len(magic)) == magic


# `files` and `sidecar` of a format that is one file, and of one that is a pair whose main file is the index.


def files_of_one(main: Path) -> list[Path]:
    return [main]


def sidecar_of_one(main: Path) -> Path:
    return beside(main, ".json")


def files_of_pair(main: Path) -> list[Path]:
    return [beside(prefix_of(main), ".bin"), main]


def sidecar_of_pair(main: Path) -> Path:
    return beside(prefix_of(main), ".json")
