"""What lasts when the power goes: a file once it is synced, a name once the folder it stands in is."""

import os
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """With the folders above it that are missing; the name of each that was made lasts."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        with suppress(PermissionError):  # a folder that may be written to and not read cannot be synced
            sync(each.parent)


def sync_all(path: Path) -> None:
    """A file; or all files of a folder and the folders below it, and then itself."""
    for each in path.rglob("*") if path.is_dir() else ():
        sync(each)
    sync(path)
