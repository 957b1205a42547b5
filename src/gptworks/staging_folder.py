"""A folder beside the final place of a result, in which it is made: NAME.part-MACHINE-RANDOM.

Its process holds a lock on it. A process that is killed leaves it behind without the lock, and the next one that makes
such a folder there removes it.
"""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptworks import folder_lock
from gptworks.errors import UsageError


@contextmanager
def beside(final: Path) -> Iterator[Path]:
    """An empty folder in the folder of `final`, which must be there. It is gone afterwards."""
    remove_abandoned(final.parent)
    work, lock = _locked(final)
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)  # what is left of it, the next one removes
        if lock is not None:
            os.close(lock)


def remove_abandoned(parent: Path) -> None:
    """What processes of this machine have left in a folder and no living one holds a lock on.

    Those of other machines stay: some filesystems do not show one machine the locks of another.
    """
    for work in parent.glob(f"*.part-{_machine()}-*"):
        lock = _open(work)
        if lock is None:
            continue
        if _take(lock) == "":
            shutil.rmtree(work, ignore_errors=True)
        os.close(lock)


def _locked(final: Path) -> tuple[Path, int | None]:
    """A folder of its own; another process may take it for abandoned before the lock is on it, and then one more."""
    while True:
        work = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-{_machine()}-", dir=final.parent))
        lock = _open(work)
        if lock is not None and (_take(lock) == folder_lock.HELD or not work.is_dir()):
            os.close(lock)
            continue
        if work.is_dir():
            return work, lock


def _open(folder: Path) -> int | None:
    """To lock it; None where a folder cannot be opened, or is gone."""
    with suppress(OSError):
        return os.open(folder, os.O_RDONLY)
    return None


def _take(lock: int) -> str:
    try:
        return folder_lock.take(lock)
    except UsageError as error:  # this filesystem locks no folders
        return str(error)


def _machine() -> str:
    """Equal for all processes of a machine, also after it has been started again."""
    known = ""
    with suppress(OSError):
        known = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    return hashlib.sha256(f"{platform.node()} {known}".encode()).hexdigest()[:8]
