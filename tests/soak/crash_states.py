"""What a disk may hold after the power went, given the calls up to then.

Data that was not synced may be there, be missing, be cut, or be zeros of the right length. A name that was made, moved
or removed may have arrived or not, unless its folder was synced later. `ordered`: names arrive in their order, as a
journal gives them. `loose`: in their order within each folder only, which is all that POSIX says.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from soak.recorded import Change, Node, Recording, apply_data

KILLED = "all there"
DATA = ("all", "none", "cut", "zeros")


@dataclass(frozen=True)
class Choice:
    """One state: for messages, and to build it again."""

    moment: int  # how many calls were made
    order: str

    def __str__(self) -> str:
        return f"after call {self.moment}, names {self.order}"


def build(recording: Recording, chance: random.Random, folder: Path) -> Choice:
    """One possible state, written into an empty folder."""
    changes = recording.changes
    # Mostly just before and behind a change of names, where something is published; now and then behind all calls.
    named = [number for number, each in enumerate(changes) if each.kind in ("link", "unlink")] or [0]
    moment = chance.choice(
        [*[chance.choice(named) + chance.randint(0, 2)] * 7, chance.randint(0, len(changes)), len(changes)]
    )
    choice = Choice(min(moment, len(changes)), chance.choice(["ordered", "loose"]))
    made = changes[: choice.moment]
    arrived = _arrived(made, choice.order, chance)
    _write(recording.root, _names(recording, arrived), _contents(made, chance), folder)
    return choice


def publishing_moments(recording: Recording) -> list[int]:
    """Before every call that makes, moves, removes or syncs something, and after the last."""
    changes = recording.changes
    return [n for n, each in enumerate(changes) if each.kind in ("link", "unlink", "sync")] + [len(changes)]


def lasting(made: list[Change], order: str) -> list[Change]:
    """Changes of names that must be there in such a state: all after a kill, after a crash those that were synced."""
    named = [(number, change) for number, change in enumerate(made) if change.kind in ("link", "unlink")]
    last_sync = {change.node: number for number, change in enumerate(made) if change.kind == "sync"}
    return [
        change
        for number, change in named
        if order == KILLED or all(last_sync.get(each, -1) > number for each in _folders(change))
    ]


def build_killed(recording: Recording, moment: int, folder: Path) -> Choice:
    """What a kill before that call leaves: the system keeps everything that was done, synced or not."""
    made = recording.changes[:moment]
    contents: dict[Node, bytearray] = {}
    for change in made:
        if change.kind in ("write", "truncate"):
            apply_data(contents.setdefault(change.node, bytearray(change.node.before)), change)
    named = [change for change in made if change.kind in ("link", "unlink")]
    _write(recording.root, _names(recording, named), contents, folder)
    return Choice(moment, KILLED)


def _names(recording: Recording, arrived: list[Change]) -> dict[Node, dict[str, Node]]:
    names = {node: dict(inside) for node, inside in recording.names.items()}
    for change in arrived:
        if change.gone:
            names.get(change.gone[0], {}).pop(change.gone[1], None)
        assert change.folder is not None
        inside = names.setdefault(change.folder, {})
        if change.kind == "link":
            inside[change.name] = change.node
        else:
            inside.pop(change.name, None)
    return names


def _folders(change: Change) -> list[Node]:
    assert change.folder is not None
    return [change.folder, *([change.gone[0]] if change.gone else [])]


def _arrived(made: list[Change], order: str, chance: random.Random) -> list[Change]:
    """Changes of names that have reached the disk."""
    last_sync = {change.node: number for number, change in enumerate(made) if change.kind == "sync"}
    named = [(number, change) for number, change in enumerate(made) if change.kind in ("link", "unlink")]
    if order == "ordered":
        synced_at = [n for n, change in named if all(last_sync.get(each, -1) > n for each in _folders(change))]
        last = max(synced_at, default=-1)
        cut = chance.choice([last, len(made), chance.randint(last, len(made))])
        return [change for number, change in named if number <= cut]
    cuts: dict[Node, int] = {}
    for _, change in named:
        for each in _folders(change):
            if each not in cuts:
                synced = last_sync.get(each, -1)
                cuts[each] = chance.choice([synced, len(made), chance.randint(synced, len(made))])
    # A rename between folders arrives when it has arrived in both: a journal never tears one apart.
    return [change for number, change in named if all(number <= cuts[each] for each in _folders(change))]


def _contents(made: list[Change], chance: random.Random) -> dict[Node, bytes]:
    last_sync = {change.node: number for number, change in enumerate(made) if change.kind == "sync"}
    by_node: dict[Node, list[tuple[int, Change]]] = {}
    for number, change in enumerate(made):
        if change.kind in ("write", "truncate"):
            by_node.setdefault(change.node, []).append((number, change))
    found = {}
    for node, changes in by_node.items():
        content = bytearray(node.before)
        synced = [change for number, change in changes if number < last_sync.get(node, -1)]
        for change in synced:
            apply_data(content, change)
        _add_unsynced(content, [change for _, change in changes[len(synced) :]], chance)
        found[node] = bytes(content)
    return found


def _add_unsynced(content: bytearray, changes: list[Change], chance: random.Random) -> None:
    kind = chance.choice(DATA)
    if not changes or kind == "none":
        return
    if kind == "zeros":
        for change in changes:
            apply_data(content, Change(change.kind, change.node, change.at, bytes(len(change.data))))
        return
    number = len(changes) if kind == "all" else chance.randint(1, len(changes))
    for change in changes[:number]:
        apply_data(content, change)
    if kind == "cut" and changes[number - 1].kind == "write":
        last = changes[number - 1]
        del content[last.at + chance.randint(0, len(last.data)) :]


def _write(
    node: Node, names: dict[Node, dict[str, Node]], contents: Mapping[Node, bytes | bytearray], folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, below in names.get(node, {}).items():
        if below.is_folder:
            _write(below, names, contents, folder / name)
        else:
            (folder / name).write_bytes(contents.get(below, below.before))
