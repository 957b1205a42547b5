"""How much memory this machine has left for a run."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def memory_available(processes: int = 1) -> float:
    """Bytes that so many processes of this kind may still take together: what is free, what the container allows, and
    what `ulimit -v` leaves each of them. Infinite where nothing tells."""
    return min(_free(), _container_left(), _address_space_left() * processes)


def _free() -> float:
    with suppress(OSError, ValueError, IndexError, StopIteration):
        return _field(PROC / "meminfo", "MemAvailable:") * 1024.0
    with suppress(OSError, ValueError, AttributeError):  # not Linux
        return float(os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    return math.inf


def _container_left() -> float:
    """The tightest limit of the groups that this process is in; version 2 of Linux' control groups, then version 1."""
    left = [math.inf]
    for folder in _groups():
        for limit, used, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with suppress(OSError, ValueError, IndexError, StopIteration):
                most = int((folder / limit).read_text(encoding="ascii"))  # "max": no limit
                taken = int((folder / used).read_text(encoding="ascii"))
                # Files that were read are counted too, but are dropped when memory is wanted.
                left.append(max(0.0, float(most - taken + _field(folder / "memory.stat", cache))))
    return min(left)


def _groups() -> Iterator[Path]:
    """The folders of this process's groups and of all above them."""
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = CGROUP / "memory" if controllers else CGROUP
            inside = Path(path.lstrip("/"))
            yield from (root / each for each in (inside, *inside.parents))


def _address_space_left() -> float:
    with suppress(ImportError, OSError, ValueError, IndexError, StopIteration):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit != resource.RLIM_INFINITY:
            return max(0.0, limit - _field(PROC / "self" / "status", "VmSize:") * 1024.0)
    return math.inf


def _field(file: Path, name: str) -> int:
    with file.open(encoding="ascii", errors="replace") as lines:
        return int(next(line for line in lines if line.startswith(name)).split()[1])
