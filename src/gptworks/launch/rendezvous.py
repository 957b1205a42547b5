"""Where the ranks find each other: a store, in which each says what it was told and which device it has.

What would be a hang or pages of torch's own is refused here, before a group exists, on every rank with the same words.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from gptworks.errors import GPTWorksError, UsageError, first_line
from gptworks.launch import store_client
from gptworks.launch.rank_env import Placement, is_supervised

T = TypeVar("T")
_ANSWER = 60.0  # seconds in which a store that has been connected to must answer
_LINGER = 3.0  # seconds for which rank 0, with whom the store goes, waits until the others have read why it ends
_POLL = 0.05
_SUPERSEDED = 10.0  # seconds in which rank 0 of a new attempt shows that an old refusal is not meant
_LEADER = "leader"
_LISTED = 5  # differences between two ranks that are named


def open_store(place: Placement, timeout: float) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT. Rank 0 keeps it, unless torchrun does."""
    from torch import distributed

    where = f"{place.master}:{place.port}"
    if place.rank == 0 and not _is_agents_store():
        try:
            return distributed.TCPStore(
                place.master,
                place.port,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except RuntimeError as error:
            if is_supervised(os.environ):
                raise  # our launcher has chosen the port, and will choose another
            if "EADDRINUSE" in str(error):
                raise UsageError(
                    f"MASTER_PORT: {place.port} is in use by another program, so rank 0 cannot open {where}. Needed: a "
                    "free port, the same for every rank. Choose another MASTER_PORT."
                ) from None
            raise UsageError(
                f"MASTER_ADDR: rank 0 cannot open {where} ({first_line(error)}). Needed: an address of rank 0's "
                "machine and a port that is free there."
            ) from None
    _wait_until_connected(place, timeout)
    return _connect(place, min(_ANSWER, timeout), timeout)


def _is_agents_store() -> bool:
    """Which outlives the attempts of a run."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _wait_until_connected(place: Placement, timeout: float) -> None:
    """Rank 0 may start later."""
    from torch import distributed

    deadline = time.monotonic() + timeout
    while True:
        reason = store_client.knock(place.master, place.port)
        if not reason:
            return
        if time.monotonic() >= deadline:
            raise distributed.DistNetworkError(
                f"{place.master}:{place.port}, where rank 0 should be: {reason} for {timeout:g} s"
            )
        time.sleep(4 * _POLL)


def _connect(place: Placement, answer: float, timeout: float) -> Any:
    try:
        store = store_client.connect(place.master, place.port, answer)
    except RuntimeError as error:
        raise UsageError(
            f"MASTER_PORT: what listens at {place.master}:{place.port} is not rank 0 of this run "
            f"({first_line(error)}): another program uses that port. Needed: a free port, the same for every rank. "
            "Choose another MASTER_PORT."
        ) from None
    store.set_timeout(timedelta(seconds=timeout))
    return store


def agree(
    base: Any,
    place: Placement,
    prepare: Callable[[], T],
    device_of: Callable[[T], str],
    timeout: float,
    identity: Mapping[str, Any] | None = None,
) -> tuple[Any, T]:
    """What `prepare` finds for this rank, once every rank has come, was told the same, and has a device of its own;
    and the store in which nobody of an earlier attempt has said anything.

    A GPTWorksError of one rank's `prepare` ends all ranks. device_of: "kind identity"; the identity may be empty.
    `identity`: what must be the same on all ranks, by name, such as versions and the configuration; None = not known.
    """
    from torch import distributed

    deadline = time.monotonic() + timeout
    settings = json.dumps(dict(identity)) if identity is not None else ""
    leader = _lead(base, settings) if place.rank == 0 else _find_leader(base, "", timeout)
    while True:
        attempt = _Attempt(base, leader, distributed.PrefixStore(leader, base), place, settings)
        try:
            return attempt.store, _agree(attempt, prepare, device_of, timeout)
        except _Superseded:
            leader = _find_leader(base, leader, deadline - time.monotonic())


class _Superseded(Exception):
    """What was said in that store was said in an attempt that is over."""


@dataclass(frozen=True)
class _Attempt:
    """One gathering of the ranks, named by its rank 0."""

    base: Any
    leader: str
    store: Any  # the part of `base` that is of this attempt
    place: Placement
    identity: str  # JSON; empty: not to be compared

    def leave_if_over(self, seconds: float) -> None:
        """Where the store may hold earlier attempts: give rank 0 of a new one so long to show itself."""
        deadline = time.monotonic() + seconds
        while self.place.rank and _is_agents_store():
            if self.base.get(_LEADER).decode() != self.leader:
                raise _Superseded
            if time.monotonic() >= deadline:
                return
            time.sleep(_POLL)

    def wait_for_verdict(self, timeout: float) -> dict[str, str]:
        from torch import distributed

        deadline = time.monotonic() + timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                self.store.wait(["verdict"], timedelta(seconds=min(1.0, left) if _is_agents_store() else left))
                verdict: dict[str, str] = json.loads(self.store.get("verdict"))
                return verdict
            except distributed.DistStoreError:
                self.leave_if_over(0)
                if time.monotonic() >= deadline:
                    raise


def _lead(base: Any, identity: str) -> str:
    """Rank 0 begins anew. torchrun's store outlives its attempts, and its nodes do not count them alike, so nothing in
    the environment says which attempt this is."""
    from torch import distributed

    leader = f"{platform.node()}-{os.getpid()}-{time.time_ns()}"
    distributed.PrefixStore(leader, base).set("identity", json.dumps([_this_process(), identity]))
    base.set(_LEADER, leader)
    return leader


def _find_leader(base: Any, not_this: str, timeout: float) -> str:
    from torch import distributed

    deadline = time.monotonic() + timeout
    base.wait([_LEADER], timedelta(seconds=max(1.0, timeout)))
    while (leader := base.get(_LEADER).decode()) == not_this:
        if time.monotonic() >= deadline:
            raise distributed.DistStoreError(f"rank 0 did not come back: timed out after {timeout:g} s")
        time.sleep(_POLL)
    return str(leader)


def _agree(attempt: _Attempt, prepare: Callable[[], T], device_of: Callable[[T], str], timeout: float) -> T:
    store, place = attempt.store, attempt.place
    process = _this_process()
    if store.check(["verdict"]):  # before this rank came: it is not meant, or a refusal that came early
        if not json.loads(store.get("verdict")):
            raise _Superseded
        attempt.leave_if_over(_SUPERSEDED)
    problem = _contradiction(store, place, process) or _difference(attempt, process)
    if problem:
        attempt.leave_if_over(_SUPERSEDED)
        _refuse(store, place, problem)
        raise UsageError(problem)
    try:
        result = prepare()
        device = device_of(result)
    except GPTWorksError as error:
        _refuse(store, place, f"{error} (rank {place.rank} of {place.world_size})")
        raise
    report = {"process": process, "device": device, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}
    store.set(f"rank/{place.rank}", json.dumps(report))
    store.add("came", 1)
    _hear_verdict(attempt, timeout)
    return result


def _contradiction(store: Any, place: Placement, process: str) -> str:
    """Between what this process was told and what the first that came was told; empty: there is none."""
    owner = store.compare_set(f"process/{place.rank}", "", process).decode()
    if owner != process:
        return f"RANK: {owner} and {process} are both told to be rank {place.rank}. Needed: each rank once."
    rank, world_size = json.loads(store.compare_set("world", "", json.dumps([place.rank, place.world_size])))
    if world_size != place.world_size:
        return (
            f"WORLD_SIZE: rank {place.rank} was told {place.world_size} processes, rank {rank} was told {world_size}. "
            "Needed: the same number for every rank. Look at the environment that each is started with."
        )
    return ""


def _this_process() -> str:
    return f"process {os.getpid()} on {platform.node()}"


def _difference(attempt: _Attempt, process: str) -> str:
    """Between this rank's identity and rank 0's; empty: there is none."""
    store, place = attempt.store, attempt.place
    if not store.check(["identity"]):
        return ""  # of an attempt that is over
    first, theirs = json.loads(store.get("identity"))
    if theirs == attempt.identity or not theirs or not attempt.identity:
        return ""
    here, there = json.loads(attempt.identity), json.loads(theirs)
    names = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    pairs = "; ".join(f"{name}: {there.get(name)} there, {here.get(name)} here" for name in names[:_LISTED])
    more = f"; and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (
        f"rank {place.rank} ({process}) was started with other settings than rank 0 ({first}): {pairs}{more}. Needed: "
        "the same versions and the same configuration on all machines. Install and copy them anew."
    )


def _refuse(store: Any, place: Placement, text: str) -> None:
    """Tell the others through rank 0."""
    store.compare_set("refused", "", text)
    if place.rank == 0:
        _tell_verdict(store, place.world_size - 1, {"refused": text})
    else:
        store.add("heard", 1)


def _hear_verdict(attempt: _Attempt, timeout: float) -> None:
    """Rank 0 looks at what all have said; the others wait for what it finds."""
    from torch import distributed

    store, place = attempt.store, attempt.place
    if place.rank == 0:
        verdict = _judge(store, place.world_size, timeout)
        _tell_verdict(store, store.add("came", 0) - 1 if "missing" in verdict else place.world_size - 1, verdict)
    else:
        verdict = attempt.wait_for_verdict(timeout + 30)
        store.add("heard", 1)
    if "refused" in verdict:
        raise UsageError(verdict["refused"])
    if "missing" in verdict:
        raise distributed.DistStoreError(verdict["missing"])


def _judge(store: Any, world_size: int, timeout: float) -> dict[str, str]:
    deadline = time.monotonic() + timeout
    while store.add("came", 0) < world_size:
        if store.check(["refused"]):
            return {"refused": store.get("refused").decode()}
        if time.monotonic() >= deadline:
            missing = [rank for rank in range(world_size) if not store.check([f"rank/{rank}"])]
            listed = ", ".join(str(rank) for rank in missing[:8]) + (", ..." if len(missing) > 8 else "")
            return {"missing": f"rank {listed} of {world_size} has not connected: timed out after {timeout:g} s"}
        time.sleep(_POLL)
    if store.check(["refused"]):  # by one too many
        return {"refused": store.get("refused").decode()}
    reports = store.multi_get([f"rank/{rank}" for rank in range(world_size)])
    text = refused_devices([json.loads(each) for each in reports])
    return {"refused": text} if text else {}


def refused_devices(ranks: list[dict[str, Any]]) -> str:
    """Why these ranks cannot work together: devices of two kinds, or one device for two of them. Empty: they can."""
    owner: dict[str, int] = {}
    for rank, each in enumerate(ranks):
        first = ranks[0]
        kind, _, name = each["device"].partition(" ")
        first_kind = first["device"].partition(" ")[0]
        if kind != first_kind:
            return (
                f"run.device: rank {rank} ({each['process']}, {_seen(each)}) has {kind}, rank 0 ({first['process']}, "
                f"{_seen(first)}) has {first_kind}. Needed: the same kind everywhere. Let every process see its "
                "device, or name one with --device."
            )
        other = owner.setdefault(name, rank) if name else rank
        if other != rank:
            return (
                f"run.device: ranks {other} and {rank} share one device ({name}): {ranks[other]['process']} sees "
                f"{_seen(ranks[other])}, {each['process']} sees {_seen(each)}. Needed: a device for each process. Let "
                "all of them see all devices, or each exactly one (srun --gpus-per-task=1); or start fewer processes."
            )
    return ""


def _seen(report: dict[str, Any]) -> str:
    return "all devices" if report["visible"] is None else f"CUDA_VISIBLE_DEVICES={report['visible']}"


def _tell_verdict(store: Any, num_others: int, verdict: dict[str, str]) -> None:
    store.set("verdict", json.dumps(verdict))
    deadline = time.monotonic() + _LINGER
    while verdict and time.monotonic() < deadline and store.add("heard", 0) < num_others:
        time.sleep(_POLL)
