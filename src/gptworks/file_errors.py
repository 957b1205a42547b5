"""What the operating system refuses, as a message for the user: what, where, what is needed, what to do."""

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_PASSING = {errno.EIO, errno.ESTALE, errno.EBUSY}  # of file servers and disks
_CHECKED_ENTRIES = 1000  # of a folder in which nothing is recognised


def explain(error: OSError, otherwise: str | Path = "") -> str:
    """The message for an error of files; empty for one that is not about files, which nobody but us can fix.

    `otherwise`: the path, where the error names none.
    """
    name = error.filename2 if error.filename2 is not None else error.filename
    named = os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else str(otherwise)
    if error.errno in _FULL:
        return f"{named or 'disk'}: {error.strerror}. Free some space."
    if not named:
        return ""
    path = Path(named)
    if error.errno in {errno.EACCES, errno.EPERM}:
        return f"{named}: permission denied: {_who_may_not(path)}. Change its mode or owner, or name another place."
    if error.errno == errno.EROFS:
        return (
            f"{named}: lies on a filesystem that is read-only. Needed: a place that can be written to. Name another "
            "one, or have it mounted writable."
        )
    if error.errno == errno.ENAMETOOLONG:
        longest = max((len(os.fsencode(part)) for part in path.parts), default=0)
        return (
            f"{named[:60]}...: the name is too long: {longest} bytes between slashes, {len(os.fsencode(named))} in "
            "all. Needed: as a rule at most 255 and 4095. Choose a shorter one."
        )
    if error.errno == errno.ENOTDIR or (error.errno == errno.EEXIST and path.is_file()):
        file = next((each for each in (path, *path.parents) if each.exists() and not each.is_dir()), path)
        return f"{named}: {file} is not a folder. Needed: a folder there. Check the path."
    if error.errno == errno.ENOENT:
        return f"{named}: {_what_is_missing(path)}"
    known = {
        errno.EISDIR: "is a folder. Needed: a file. Check the path.",
        errno.EEXIST: "exists already. Name another place, or remove it first.",
        errno.ENOTEMPTY: "is a folder that is not empty. Name another place, or remove it first.",
        errno.ELOOP: "is a link that leads to itself. Fix the link.",
        errno.EMFILE: "too many files are open in this process. Raise the limit: ulimit -n.",
        errno.ENFILE: "too many files are open on this machine. Close some programs.",
        errno.EIO: "the disk or the network could not read or write it. Look into the log of the system (dmesg).",
        errno.ESTALE: "was replaced on the file server meanwhile. Start again.",
        errno.EBUSY: "is in use. Wait for the program that uses it.",
        errno.EXDEV: "cannot be moved to another filesystem. Name a place on the same one.",
    }
    return f"{named}: {known[error.errno]}" if error.errno in known else ""


def may_pass(error: OSError) -> bool:
    """Whether it can be gone at the next try without anybody's doing."""
    return error.errno in _PASSING


def refuse_unreadable(path: Path) -> None:
    """Where nothing is recognised: raises the OSError of what could not be looked at, if there is any such thing.

    Looked at are the path, what is in it if it is a folder, and files beside it whose names begin as its own does.
    """
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except FileNotFoundError:
        is_folder = False
    for file in _entries(path) if is_folder else [path, *_beside(path)]:
        if not is_folder or not file.is_dir():
            _try(file)


def _try(file: Path) -> None:
    if file.is_file() and not os.access(file, os.R_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))


def _entries(folder: Path) -> Iterator[Path]:
    """What is in a folder and in the folders in it; raises where one of them cannot be listed."""
    seen = 0
    for entry in sorted(os.scandir(folder), key=lambda each: each.name):
        inside = sorted(os.scandir(entry), key=lambda each: each.name) if entry.is_dir() else [entry]
        for each in inside:
            seen += 1
            if seen > _CHECKED_ENTRIES:
                return
            yield Path(each)


def _beside(path: Path) -> list[Path]:
    if not path.name or not path.parent.is_dir():
        return []
    return [Path(each) for each in os.scandir(path.parent) if each.name.startswith(path.name) and each.is_file()]


def _who_may_not(path: Path) -> str:
    """Which file or folder forbids it, and what it says."""
    user = _user(os.geteuid()) if hasattr(os, "geteuid") else "this user"
    for folder in reversed(path.parents):
        if folder.exists() and not os.access(folder, os.X_OK):
            return f"{user} may not enter {folder} ({_mode(folder)}). Needed: to read what is in it"
    if not os.path.lexists(path):
        folder = next((each for each in (path, *path.parents) if each.exists()), path)
        return f"{user} may not write to {folder} ({_mode(folder)}). Needed: to make files there"
    if not os.access(path, os.R_OK):
        return f"{user} may not read {path} ({_mode(path)}). Needed: to read it"
    return f"{user} may not write to {path} ({_mode(path)}). Needed: to write to it"


def _mode(path: Path) -> str:
    about = path.stat()
    return f"{stat.filemode(about.st_mode)}, of {_user(about.st_uid)}"


def _user(number: int) -> str:
    try:
        import pwd

        return f"user {pwd.getpwuid(number).pw_name}"
    except (ImportError, KeyError):
        return f"user {number}"


def _what_is_missing(path: Path) -> str:
    try:
        folder = next((each for each in (path, *path.parents) if each.exists()), None)
        is_there = os.path.lexists(path)
    except OSError:
        folder, is_there = None, False
    if is_there:
        return "was not there when it was to be opened, and is now. Start again when nobody changes it."
    if folder == path.parent and str(folder).startswith(("/proc", "/sys")):
        return f"{folder} is a part of the system where no files can be made. Name another place."
    return (
        "no such file or folder, or it went away while it was used. Check the path; start again when nobody changes it."
    )
