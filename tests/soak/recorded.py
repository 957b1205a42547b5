"""The system calls of a command that change files below one folder, as strace saw them, in their order."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from soak import driver
from soak.campaign import Found

CALLS = (
    "openat,open,creat,write,pwrite64,writev,pwritev,ftruncate,truncate,fallocate,lseek,rename,renameat,renameat2,unlink,"
    "unlinkat,rmdir,mkdir,mkdirat,link,linkat,symlink,symlinkat,fsync,fdatasync,msync,mmap,sendfile,copy_file_range"
)
_LINE = re.compile(r"^(?:\d+ +)?(\w+)\((.*)\)\s+= (-?\d+|0x[0-9a-f]+|\?)(?:<(.*?)>)?(?: .*)?$")
_HEX = re.compile(r"\\x([0-9a-f]{2})")
_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?')
_DESCRIPTOR = re.compile(r"^(-?\d+|AT_FDCWD)(?:<(.*?)>)?$")


@dataclass(eq=False)
class Node:
    """A file or a folder, whatever it is called."""

    number: int
    is_folder: bool
    before: bytes = b""  # what was in it, and lasted, when the recording began


@dataclass(frozen=True)
class Change:
    """One call. Data: write, truncate. Names: link, unlink (a rename is both at once). Lasting: sync."""

    kind: str
    node: Node
    at: int = 0  # write: where; truncate: how long
    data: bytes = b""
    folder: Node | None = None  # link, unlink: in which folder, under which name
    name: str = ""
    gone: tuple[Node, str] | None = None  # of a rename: the folder and name that it had before


@dataclass
class Recording:
    root: Node
    names: dict[Node, dict[str, Node]]  # of each folder, when the recording began
    changes: list[Change] = field(default_factory=list)


def text_of(hexed: str) -> bytes:
    return bytes.fromhex("".join(_HEX.findall(hexed)))


def record(words: list[str], folder: Path, log: Path) -> Recording:
    """Run a command under strace. `folder`: what it works in; all else is left out."""
    trace = log.with_suffix(".strace")
    reader = _Reader(folder.resolve())
    strace = ["strace", "-f", "-y", "-xx", "-s", "100000000", "-o", str(trace), "-e", f"trace={CALLS}"]
    with driver.started([*strace, *words], log) as process:
        process.wait()
    if process.returncode:
        raise Found(f"the command that was recorded failed: {log.read_text(errors='replace')[-3000:]}")
    for line in _whole_lines(trace):
        reader.take(line)
    trace.unlink()
    reader.require_complete()
    return reader.recording


def _whole_lines(trace: Path) -> list[str]:
    """A call that another thread interrupts is written in two pieces."""
    waiting: dict[str, str] = {}
    lines = []
    with trace.open(encoding="latin-1") as file:
        for raw in file:
            line = raw.rstrip("\n")
            pid = line.split(" ", 1)[0]
            if line.endswith("<unfinished ...>"):
                waiting[pid] = line.removesuffix("<unfinished ...>").rstrip()
                continue
            resumed = re.match(r"^\d+ +<\.\.\. \w+ resumed>(.*)$", line)
            lines.append(waiting.pop(pid, pid) + resumed[1] if resumed else line)
    return lines


class _Reader:
    """Follows names and descriptors through the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        root, names = self._node(True), {}
        self.recording = Recording(root, names)
        self._snapshot(folder, root)
        self.names = {each: dict(inside) for each, inside in names.items()}  # now
        self.content: dict[Node, bytearray] = {}
        self.offsets: dict[tuple[int, Node], int] = {}
        self.appends: set[tuple[int, Node]] = set()
        self.mapped: set[Node] = set()

    def _node(self, is_folder: bool, before: bytes = b"") -> Node:
        self.count += 1
        return Node(self.count, is_folder, before)

    def _snapshot(self, path: Path, node: Node) -> None:
        self.recording.names[node] = {}
        for child in sorted(path.iterdir()):
            below = self._node(child.is_dir(), b"" if child.is_dir() else child.read_bytes())
            self.recording.names[node][child.name] = below
            if child.is_dir():
                self._snapshot(child, below)

    # Names

    def _parts(self, path: bytes) -> tuple[str, ...] | None:
        """Below the folder; None: elsewhere."""
        given = Path(path.decode(errors="surrogateescape"))
        try:
            return (given.resolve() if not given.is_absolute() else given).relative_to(self.folder).parts
        except ValueError:
            return None

    def _find(self, parts: tuple[str, ...]) -> Node | None:
        node: Node | None = self.recording.root
        for part in parts:
            node = self.names.get(node, {}).get(part) if node else None
        return node

    def _place(self, parts: tuple[str, ...]) -> tuple[Node, str] | None:
        folder = self._find(parts[:-1])
        return (folder, parts[-1]) if folder and parts else None

    def _add(self, change: Change) -> None:
        self.recording.changes.append(change)
        if change.gone:
            del self.names[change.gone[0]][change.gone[1]]
        if change.kind == "link":
            assert change.folder is not None
            self.names[change.folder][change.name] = change.node
            if change.node.is_folder:
                self.names.setdefault(change.node, {})
        elif change.kind == "unlink":
            assert change.folder is not None
            del self.names[change.folder][change.name]
        elif change.kind in ("write", "truncate"):
            apply_data(self._bytes(change.node), change)

    def _bytes(self, node: Node) -> bytearray:
        return self.content.setdefault(node, bytearray(node.before))

    # Calls

    def take(self, line: str) -> None:
        found = _LINE.match(line)
        if not found or found[3].startswith("-") or found[3] == "?":
            return
        call, told, result, opened = found.groups()
        arguments = _arguments(told)
        if call in ("openat", "open", "creat"):
            self._open(call, arguments, int(result), opened or "")
        elif call in ("mkdir", "mkdirat"):
            self._make_folder(_path(call, arguments))
        elif call in ("rename", "renameat", "renameat2"):
            first, second = _strings(told)[:2]
            self._rename(first, second)
        elif call in ("unlink", "unlinkat", "rmdir"):
            if place := self._known(_path(call, arguments)):
                self._add(Change("unlink", self.names[place[0]][place[1]], folder=place[0], name=place[1]))
        elif call in ("link", "linkat", "symlink", "symlinkat"):
            if any(self._parts(each) for each in _strings(told)):
                raise Found(f"a call that is not modelled: {line[:300]}")
        else:
            self._on_descriptor(call, arguments, told, result, line)

    def _known(self, path: bytes) -> tuple[Node, str] | None:
        parts = self._parts(path)
        place = self._place(parts) if parts else None
        return place if place and place[1] in self.names.get(place[0], {}) else None

    def _open(self, call: str, arguments: list[str], number: int, opened: str) -> None:
        path = text_of(opened) or _path(call, arguments)
        parts = self._parts(path)
        if not parts:
            return
        flags = "O_CREAT|O_TRUNC|O_WRONLY" if call == "creat" else told_flags(arguments)
        node = self._find(parts)
        if node is None:
            place = self._place(parts)
            if place is None or "O_CREAT" not in flags:
                return
            node = self._node(False)
            self._add(Change("link", node, folder=place[0], name=place[1]))
        elif "O_TRUNC" in flags and self._bytes(node):
            self._add(Change("truncate", node))
        self.offsets[number, node] = 0
        (self.appends.add if "O_APPEND" in flags else self.appends.discard)((number, node))

    def _make_folder(self, path: bytes) -> None:
        parts = self._parts(path)
        place = self._place(parts) if parts else None
        if place:
            self._add(Change("link", self._node(True), folder=place[0], name=place[1]))

    def _rename(self, first: bytes, second: bytes) -> None:
        old, parts = self._known(first), self._parts(second)
        new = self._place(parts) if parts else None
        if old and new:
            self._add(Change("link", self.names[old[0]][old[1]], folder=new[0], name=new[1], gone=old))
        elif old or new:
            raise Found(f"a rename across the border of what is recorded: {first!r} to {second!r}")

    def _on_descriptor(self, call: str, arguments: list[str], told: str, result: str, line: str) -> None:
        # copy_file_range(from, off, to, off, ...), sendfile(to, from, ...), mmap(addr, len, prot, flags, fd, off)
        index = {"copy_file_range": 2, "mmap": 4}.get(call, 0)
        found = _DESCRIPTOR.match(arguments[index]) if index < len(arguments) else None
        parts = self._parts(text_of(found[2])) if found and found[2] else None
        node = self._find(parts) if parts is not None else None
        if node is None or found is None:
            return
        key = (int(found[1]), node)
        if call in ("fsync", "fdatasync", "msync"):
            self._add(Change("sync", node))
        elif call in ("write", "writev", "pwrite64", "pwritev"):
            data = b"".join(_strings(told))[: int(result)]
            if call.startswith("p"):
                at = int(arguments[-1])
            else:
                at = len(self._bytes(node)) if key in self.appends else self.offsets.get(key, 0)
                self.offsets[key] = at + len(data)
            self._add(Change("write", node, at, data))
        elif call == "lseek":
            self.offsets[key] = int(result)
        elif call in ("ftruncate", "truncate"):
            self._add(Change("truncate", node, int(arguments[1])))
        elif call in ("sendfile", "copy_file_range"):
            source = _DESCRIPTOR.match(arguments[1 if call == "sendfile" else 0])
            assert source and source[2]
            at = self.offsets.get(key, 0)
            data = self._copied_from(text_of(source[2]))[at : at + int(result)]  # a copy from its start
            self.offsets[key] = at + len(data)
            self._add(Change("write", node, at, data))
        elif call == "mmap" and "MAP_SHARED" in told and "PROT_WRITE" in told:
            self.mapped.add(node)
        elif call == "fallocate":
            raise Found(f"a call that is not modelled: {line[:300]}")

    def _copied_from(self, path: bytes) -> bytes:
        """What a file holds at this moment; one from elsewhere holds what it always did."""
        parts = self._parts(path)
        node = self._find(parts) if parts else None
        return bytes(self._bytes(node)) if node else Path(path.decode()).read_bytes()

    def require_complete(self) -> None:
        """What the calls lead to is what is there: nothing was missed."""
        self._compare(self.folder, self.recording.root)

    def _compare(self, path: Path, node: Node) -> None:
        inside = self.names.get(node, {})
        there = {child.name for child in path.iterdir()}
        if there != inside.keys():
            raise Found(f"the recording has missed something in {path}: {sorted(there ^ inside.keys())}")
        for name, below in inside.items():
            if below.is_folder:
                self._compare(path / name, below)
                continue
            data = (path / name).read_bytes()
            if below in self.mapped:  # stores through a mapping make no call: all of it, as late as can be
                self._add(Change("write", below, 0, data))
            elif bytes(self._bytes(below)) != data:
                raise Found(f"the recording has missed something of {path / name}")


def apply_data(content: bytearray, change: Change, most: int | None = None) -> None:
    """`most`: bytes of a write that arrive."""
    if change.kind == "truncate":
        del content[change.at :]
        content.extend(bytes(change.at - len(content)))
        return
    data = change.data if most is None else change.data[:most]
    content.extend(bytes(max(0, change.at + len(data) - len(content))))
    content[change.at : change.at + len(data)] = data


def told_flags(arguments: list[str]) -> str:
    return next((each for each in arguments if each.startswith("O_")), "")


def _arguments(told: str) -> list[str]:
    """Strings are hexadecimal, so a comma always separates; of lists and structures only the strings are used."""
    return [each.strip() for each in told.split(", ")]


def _strings(told: str) -> list[bytes]:
    found = []
    for each in _STRING.finditer(told):
        if each[2]:
            raise Found("strace has cut off a string")
        found.append(text_of(each[1]))
    return found


def _path(call: str, arguments: list[str]) -> bytes:
    """Of a call with one path, which may be relative to a descriptor."""
    relative = call.endswith("at")
    path = _strings(arguments[1 if relative else 0])[0]
    base = _DESCRIPTOR.match(arguments[0]) if relative else None
    if base and base[2] and not path.startswith(b"/"):
        return text_of(base[2]) + b"/" + path
    return path


def has_strace() -> bool:
    try:
        return (
            subprocess.run(["strace", "-qq", "-o", "/dev/null", "true"], capture_output=True, check=False).returncode
            == 0
        )
    except OSError:
        return False
