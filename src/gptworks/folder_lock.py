"""The lock of a run folder: the operating system's, or a file that names its owner where that one does not work."""

import errno
import json
import os
import platform
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptworks.errors import UsageError

OWNER = ".lock.owner"
HELD = "held"
# Lustre mounted without flock, some NFS servers, FUSE: none of these says that anybody writes here.
_NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL}
_IS_HELD = {errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK}


def take(file: int) -> str:
    """Lock it until it is closed. Empty: done; HELD: another process has it; else why locks do not work here."""
    try:
        import fcntl
    except ImportError:
        return "this system has no flock"
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _IS_HELD:
            return HELD
        if error.errno in _NO_LOCKS:
            return error.strerror or str(error)
        raise UsageError(f"run.out: cannot be locked ({error.strerror}). Choose another --out.") from None
    return ""


def me() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def refused(run: Path, owner: str, advice: str = "") -> UsageError:
    return UsageError(
        f"{run}: another process ({owner}) is writing here. Wait for it, or choose another --out.{advice}"
    )


@contextmanager
def owned(run: Path, reason: str) -> Iterator[None]:
    """The file is made by one process only, on any filesystem. A crash leaves it behind: on the machine that made it,
    one can see that its process is gone; elsewhere the user is told."""
    path = run / OWNER
    mine = {"owner": me(), "pid": os.getpid(), "machine": _machine(), "started": _started(os.getpid())}
    text_of_mine = json.dumps(mine)
    while not _create(path, text_of_mine):
        text = _read(path)
        if text is None:
            continue  # it went just now
        if not _is_stale(text):
            owner = _parsed(text).get("owner", "unknown")
            advice = f" This filesystem has no locks ({reason}): if that process is gone, remove {path}."
            raise refused(run, owner, advice)
        _put_aside(path, text)
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(path) == text_of_mine:  # not where a user removed it and another process has it now
                path.unlink()


def _create(path: Path, text: str) -> bool:
    try:
        file = path.open("x", encoding="utf-8")
    except FileExistsError:
        return False
    with file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None


def _parsed(text: str) -> dict[str, str]:
    try:
        content = json.loads(text)
    except ValueError:  # half-written, by a process that was killed or is just writing
        return {}
    return content if isinstance(content, dict) else {}


def _is_stale(text: str) -> bool:
    """Only what is certain: a process of this machine that is gone. An empty answer of /proc is no certainty: it may
    hide the processes of other users."""
    holder = _parsed(text)
    if not _machine() or holder.get("machine") != _machine():
        return False
    pid = int(holder["pid"])
    started = _started(pid)
    return started != holder.get("started") if started else not _is_there(pid)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


def _put_aside(path: Path, text: str) -> None:
    """Two processes may find it stale at once; the second must not take away what the first has made since."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        path.rename(aside)
        if _read(aside) != text:
            _put_back(aside, path)
        aside.unlink()


def _put_back(aside: Path, path: Path) -> None:
    """Without taking the place of one that a third process has made."""
    try:
        os.link(aside, path)
    except FileExistsError:
        return
    except OSError:  # a filesystem without hard links, as those without locks often are
        _create(path, aside.read_text(encoding="utf-8"))


def _machine() -> str:
    """Equal for processes that see each other's numbers: one start of the system, and one container in it. Linux."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    return ""


def _started(pid: int) -> str:
    """When it started, so that a new process of the same number is not taken for it; empty: there is none."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    return ""
