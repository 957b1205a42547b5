"""File descriptors: what the connections of many ranks need, and what the system gives."""

import math
import os
from typing import Any

from gptworks.errors import UsageError

LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"  # connections of a gloo group are made when they are used, not all at once
LARGE = 256  # ranks; below that making all connections takes no time, and the older way of gloo is kept if it fits
# Of all ranks: two of `Ranks` (what is agreed on; saving), and on the CPU the default one and those of the mesh.
NUM_GROUPS = {"cuda": 2, "cpu": 4}
_MOST = 2**20  # some systems allow a thousand times more, which programs that walk through all of them do not survive
_FILES = 128  # of the program itself: libraries, data, logs, a checkpoint that is written


def raise_limit() -> None:
    """The soft limit is most often 1,024 for the sake of programs that use select; the hard one is what counts."""
    resource = _resource()
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):  # macOS names a limit that it does not grant
            return


def set_up_gloo(world_size: int) -> None:
    """Before the first group is made, which reads it."""
    if world_size >= LARGE or _limits()[0] < needed(world_size, NUM_GROUPS["cpu"], is_lazy=False):
        os.environ.setdefault(LAZY_GLOO, "1")


def needed(world_size: int, num_groups: int, *, is_lazy: bool) -> int:
    """Descriptors of the fullest rank: rank 0, which also keeps the store. Counted with real groups of 2 to 16 ranks:
    a gloo group is a connection to each of the others and 4 more; a lazy one 5, and a ring and a tree of connections as
    they are used. Each rank has two connections to the store (its own and that of its heartbeat)."""
    steps_of_a_tree = max(1, world_size - 1).bit_length()
    group = 5 + 2 + 2 * steps_of_a_tree if is_lazy else world_size - 1 + 4
    return _FILES + 2 * world_size + num_groups * group


def require(world_size: int, num_groups: int) -> None:
    """Refuse a world whose connections cannot all be open; torch would fail in the middle of making them."""
    soft, hard = _limits()
    wanted = needed(world_size, num_groups, is_lazy=os.environ.get(LAZY_GLOO, "").lower() in {"1", "true", "y", "yes"})
    if soft < wanted:
        raise UsageError(
            f"open files: this process may have {soft} (hard limit {hard}), and {world_size} ranks need {wanted}. "
            f"Raise the limit before starting, such as `ulimit -Hn {wanted}` or LimitNOFILE of the batch system."
        )


def _limits() -> tuple[float, float]:
    """Soft and hard."""
    resource = _resource()
    if resource is None:
        return math.inf, math.inf
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    return tuple(math.inf if limit == resource.RLIM_INFINITY else limit for limit in limits)  # type: ignore[return-value]


def _resource() -> Any:
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return None
    return resource
