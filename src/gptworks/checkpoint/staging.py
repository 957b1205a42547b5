"""A result that appears when all of it is there, and takes the place of nothing.

It is made in a fresh folder on the same disk, under its own name, and moved at the end.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gptworks import staging_folder
from gptworks.durable import sync, sync_all
from gptworks.errors import CheckpointError


def require_free(destination: Path, *, is_folder: bool, beside: str | None = None) -> None:
    """`beside`: what the name of a file that will lie beside the result adds to its own."""
    if destination.is_dir() and not is_folder:
        raise CheckpointError(
            f"{destination}: is a folder, but the result is one file. Name a file that does not exist."
        )
    if destination.is_dir() and any(destination.iterdir()):
        raise CheckpointError(f"{destination}: exists and is not empty. Name another folder, or remove it first.")
    if not destination.is_dir() and os.path.lexists(destination):
        raise CheckpointError(f"{destination}: exists, and is a file. Name another, or remove it first.")
    if beside and os.path.lexists(f"{destination}{beside}"):
        raise CheckpointError(
            f"{destination}{beside}: exists, and belongs to another file. Move it, or remove it first."
        )


@contextmanager
def staged(destination: Path, *, is_folder: bool, beside: str | None = None) -> Iterator[Path]:
    """Gives the path to write to: an empty folder, or a file to make; with `beside`, one more may be made there."""
    require_free(destination, is_folder=is_folder, beside=beside)
    final = destination.resolve()  # "." has no name
    # A folder that exists may be a disk of its own, or somebody's current one: it stays, and is worked in.
    parent = final if final.is_dir() else final.parent
    parent.mkdir(parents=True, exist_ok=True)
    with staging_folder.beside(parent / final.name) as work:
        result = work / final.name
        if is_folder:
            result.mkdir()
        yield result
        sync_all(work)
        if final.is_dir():
            for file in result.iterdir():
                _move(file, final / file.name)
        else:
            for file in [each for each in work.iterdir() if each != result] + [result]:  # the result comes last
                _move(file, final.with_name(file.name))
        sync(parent)


def _move(file: Path, to: Path) -> None:
    if os.path.lexists(to):
        raise CheckpointError(f"{to}: has appeared in the meantime. Choose another place, or remove it first.")
    file.rename(to)
