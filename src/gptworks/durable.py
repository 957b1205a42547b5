"""What lasts when the power goes: a file once it is synced, a name once the folder it stands in is."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """A file's bytes, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(path: Path) -> None:
    """A file; or all files of a folder and the folders below it, and then itself."""
    for each in path.rglob("*") if path.is_dir() else ():
        sync(each)
    sync(path)
