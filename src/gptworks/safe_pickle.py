"""Pickles, read without calling anything they name.

A pickle is a little program whose instructions may import and call whatever it likes. This machine carries out those
that build plain values; a global it names becomes a `Global`, a call an `Object` that remembers what was to be called
with what, and nothing is imported for it. Long byte strings stay in the file: a checkpoint of gigabytes is read in
kilobytes.

What a call means (a tensor, an array, an ordered dictionary) is for the reader of the container to say. A file that
wants to call something of Python's own library is refused: no weights are made that way, exploits are.
"""

import struct
import sys
from collections.abc import Callable
from typing import Any

from gptworks.errors import CheckpointError
from gptworks.pickle_values import LONG, Bytes, Global, Object, Persistent, Settings, brief

_KEY_ITEMS = 1000  # in a tuple that is a key


# Of Python's own library, what weights and settings are made of. All of it is read as plain values.
HARMLESS_CALLS = {
    "collections.OrderedDict",
    "collections.defaultdict",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "_codecs.encode",
    "builtins.set",
    "builtins.tuple",
    "builtins.frozenset",
    "builtins.bytes",
    "builtins.bytearray",
    "builtins.complex",
    "copyreg._reconstructor",
    "pathlib.PosixPath",
    "pathlib.Path",
    "pathlib.PurePosixPath",
    "datetime.timedelta",
    "datetime.datetime",
    "datetime.date",
    "fractions.Fraction",
    "_io.BytesIO",  # what Transformer Engine keeps beside its weights
    "signal.Signals",  # among Megatron's settings
}
_PYTHONS = sys.stdlib_module_names
_CODECS = {"latin1": "latin-1", "latin-1": "latin-1", "utf-8": "utf-8", "utf8": "utf-8"}
_REFUSED = "no file with weights does that. Do not open it with other tools."
_MARK = object()
_LOST = "It is damaged, or not a pickle."


class PickleMachine:
    """One pickle of a file. `end` is where the next would begin (old torch files hold five in a row).

    >>> import pickle
    >>> PickleMachine(memoryview(pickle.dumps({"weight": [1.5, 2]})), "x.pkl").load()
    {'weight': [1.5, 2]}
    """

    def __init__(self, data: memoryview, file: str, start: int = 0) -> None:
        self.data, self.file, self.end = data, file, start
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.globals: list[Global] = []  # all that were named, in order
        self.persistent: list[Persistent] = []

    def load(self) -> Any:
        try:
            while True:
                code = self._take(1)[0]
                if code == ord("."):
                    return self.stack.pop()
                step = _STEPS.get(code)
                if step is None:
                    raise CheckpointError(
                        f"{self.file}: byte {self.end - 1:,} is {code:#04x}, no instruction of a pickle that holds "
                        f"weights. {_LOST}"
                    )
                step(self)
        except CheckpointError:
            raise
        except Exception as error:  # whatever malformed instructions lead to: a stack too short, a list that is none
            raise CheckpointError(
                f"{self.file}: the pickle breaks off or contradicts itself near byte {self.end:,} "
                f"({type(error).__name__}: {error}). It is damaged."
            ) from None

    # Bytes of the program

    def _take(self, count: int) -> memoryview:
        piece = self.data[self.end : self.end + count]
        if count < 0 or len(piece) < count:
            raise CheckpointError(
                f"{self.file}: ends at byte {len(self.data):,} in the middle of a pickle. {_LOST} Copy it again."
            )
        self.end += count
        return piece

    def _number(self, layout: str) -> Any:
        return struct.unpack(layout, self._take(struct.calcsize(layout)))[0]

    def _line(self) -> str:
        start = self.end
        while self._take(1)[0] != 10:
            if self.end - start > 65536:
                raise CheckpointError(f"{self.file}: a line of 64 KB at byte {start:,}. {_LOST}")
        return bytes(self.data[start : self.end - 1]).decode("latin-1")

    def _text(self, size: int) -> None:
        self.stack.append(str(self._take(size), "utf-8", "surrogatepass"))

    def _bytes(self, size: int) -> None:
        piece = self._take(size)
        self.stack.append(Bytes(piece, self.end - size) if size > LONG else bytes(piece))

    # The stack

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise CheckpointError(f"{self.file}: no mark on the stack at byte {self.end:,}. {_LOST}")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def _name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise CheckpointError(f"{self.file}: {brief((module, name))} is not a name at byte {self.end:,}. {_LOST}")
        named = Global(module, name)
        self.globals.append(named)
        self.stack.append(named)

    def _call(self, function: Any, args: Any) -> None:
        if not isinstance(function, Global):
            raise CheckpointError(
                f"{self.file}: the pickle calls {brief(function)}, which is not a name. Refused: {_REFUSED}"
            )
        if str(function).partition(".")[0] in _PYTHONS and str(function) not in HARMLESS_CALLS:
            raise CheckpointError(
                f"{self.file}: the pickle calls {brief(function)} with {brief(args)}. Refused, and nothing was called: "
                f"{_REFUSED}"
            )
        if str(function) == "copyreg._reconstructor":  # protocols 0 and 1: an object of this class
            self._call(args[0], ())
        elif str(function) == "_codecs.encode":  # how protocol 2 spells bytes
            self.stack.append(self._encoded(*args))
        else:
            self.stack.append(_plain(function, tuple(args)))

    def _encoded(self, text: Any, codec: Any = "utf-8") -> bytes:
        """Python would import the codec it is told."""
        if not isinstance(text, str) or not isinstance(codec, str) or codec not in _CODECS:
            raise CheckpointError(
                f"{self.file}: the pickle encodes {brief(text)} by {brief(codec)}. Refused: {_REFUSED}"
            )
        return text.encode(_CODECS[codec])

    def _append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(map(_key, items))
        elif isinstance(target, Object):  # a subclass of list
            target.items.update(enumerate(items, start=len(target.items)))
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def _set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        pairs = dict(zip(map(_key, items[::2]), items[1::2], strict=True))
        if isinstance(target, dict):
            target.update(pairs)
        elif isinstance(target, Object):
            target.items.update(pairs)
        else:
            raise TypeError(f"keys for a {type(target).__name__}")

    def _dictionary(self) -> None:
        items = self._since_mark()
        self.stack.append({})
        self._set_items(items)

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Object):
            target.state = state
        elif isinstance(target, Settings) and isinstance(state, dict):
            target.update(state)  # attributes of an ordered dictionary are torch's own notes
        elif not isinstance(target, dict):
            raise TypeError(f"a state for a {type(target).__name__}")

    def _reduce(self) -> None:
        args = self.stack.pop()
        self._call(self.stack.pop(), args)

    def _new_object(self, with_keywords: bool) -> None:
        keywords = self.stack.pop() if with_keywords else {}
        args = self.stack.pop()
        self._call(self.stack.pop(), (*args, *keywords.values()))

    def _make_instance(self, named: bool) -> None:
        if named:
            self._name(self._line(), self._line())
            function = self.stack.pop()
            self._call(function, self._since_mark())
        else:
            function, *args = self._since_mark()
            self._call(function, args)

    def _outside(self, id_: Any) -> None:
        self.persistent.append(Persistent(id_))
        self.stack.append(self.persistent[-1])

    def _memoize(self, at: int) -> None:
        self.memo[at] = self.stack[-1]


def _plain(function: Global, args: tuple[Any, ...]) -> Any:
    """Calls that mean a plain value."""
    name = str(function)
    if name in ("collections.OrderedDict", "collections.defaultdict"):
        pairs = args[0] if args and name == "collections.OrderedDict" else []
        return {_key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}
    if name in ("argparse.Namespace", "types.SimpleNamespace"):
        return Settings()
    if name == "builtins.bytes" and not args:
        return b""
    if name == "builtins.frozenset":
        return frozenset(map(_key, args[0] if args else ()))
    if name == "builtins.tuple":
        return tuple(args[0]) if args else ()
    if name == "builtins.set":
        return set(map(_key, args[0])) if args else set()
    if name.startswith("pathlib.") and all(isinstance(part, str) for part in args):
        return "/".join(args)
    return Object(function, args)


def _key(value: Any) -> Any:
    """To be hashed. A tuple that holds another twice, and that one another twice, and so on, never is."""
    waiting, count = [value], 0
    while waiting:
        item = waiting.pop()
        count += 1
        if count > _KEY_ITEMS:
            raise ValueError(f"a key of more than {_KEY_ITEMS:,} items")
        if isinstance(item, tuple | frozenset):
            waiting.extend(item)
        elif isinstance(item, Persistent):
            waiting.append(item.id)
    return value


class Meaning:
    """Walks over what a pickle built. What its calls mean (tensors, arrays) the reader of the container says."""

    def __init__(self) -> None:
        self.unknown: set[str] = set()  # names of classes and functions that were left alone
        self._seen: dict[int, tuple[Any, Any]] = {}  # shared values stay shared, and cycles end

    def of(self, value: Any) -> Any:
        if not isinstance(value, dict | list | tuple | set | frozenset | Object | Global):
            return value
        if id(value) not in self._seen:
            self._keep(value, self._build(value))
        return self._seen[id(value)][1]

    def of_call(self, call: Object) -> Any:
        """What is not known stays a note. What it would have held may hold tensors, so it is looked through as well."""
        self.unknown.add(str(call.made_by))
        self._keep(call, call)
        call.args, call.state = tuple(self.of(item) for item in call.args), self.of(call.state)
        call.items = {self.of(key): self.of(item) for key, item in call.items.items()}
        return call

    def of_global(self, name: Global) -> Any:
        self.unknown.add(str(name))
        return name

    def _keep(self, value: Any, made: Any) -> None:
        self._seen[id(value)] = value, made

    def _build(self, value: Any) -> Any:
        if isinstance(value, Object):
            return self.of_call(value)
        if isinstance(value, Global):
            return self.of_global(value)
        if isinstance(value, dict):
            made: dict[Any, Any] = {}
            self._keep(value, made)
            made.update((self.of(key), self.of(item)) for key, item in value.items())
            return made
        if isinstance(value, list):
            items: list[Any] = []
            self._keep(value, items)
            items.extend(self.of(item) for item in value)
            return items
        if isinstance(value, tuple):
            return tuple(self.of(item) for item in value)
        for item in value:  # a set
            self.of(item)
        return value


def _two(machine: PickleMachine) -> tuple[Any, Any]:
    second = machine.stack.pop()
    return machine.stack.pop(), second


def _long(data: memoryview) -> int:
    return int.from_bytes(data, "little", signed=True)


def _escaped(text: str) -> Any:
    quoted = text.strip()
    if len(quoted) < 2 or quoted[0] not in "'\"" or quoted[-1] != quoted[0]:
        raise ValueError("a string without quotes")
    return quoted[1:-1].encode("latin-1").decode("unicode_escape")


def _old_number(text: str) -> int | bool:
    return {"00": False, "01": True}.get(text) if text in ("00", "01") else int(text)  # type: ignore[return-value]


_STEPS: dict[int, Callable[[PickleMachine], object]] = {
    0x80: lambda m: m._take(1),  # protocol
    0x95: lambda m: m._take(8),  # frame: how much follows
    ord("("): lambda m: m.stack.append(_MARK),
    ord("0"): lambda m: m.stack.pop(),
    ord("1"): lambda m: m._since_mark(),
    ord("2"): lambda m: m.stack.append(m.stack[-1]),
    ord("N"): lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    ord("I"): lambda m: m.stack.append(_old_number(m._line())),
    ord("J"): lambda m: m.stack.append(m._number("<i")),
    ord("K"): lambda m: m.stack.append(m._number("<B")),
    ord("M"): lambda m: m.stack.append(m._number("<H")),
    ord("L"): lambda m: m.stack.append(int(m._line().rstrip("L"))),
    0x8A: lambda m: m.stack.append(_long(m._take(m._number("<B")))),
    0x8B: lambda m: m.stack.append(_long(m._take(m._number("<i")))),
    ord("F"): lambda m: m.stack.append(float(m._line())),
    ord("G"): lambda m: m.stack.append(m._number(">d")),
    ord("S"): lambda m: m.stack.append(_escaped(m._line())),
    ord("U"): lambda m: m.stack.append(bytes(m._take(m._number("<B"))).decode("latin-1")),
    ord("T"): lambda m: m.stack.append(bytes(m._take(m._number("<i"))).decode("latin-1")),
    ord("V"): lambda m: m.stack.append(m._line().encode("latin-1").decode("raw_unicode_escape")),
    ord("X"): lambda m: m._text(m._number("<I")),
    0x8C: lambda m: m._text(m._number("<B")),
    0x8D: lambda m: m._text(m._number("<Q")),
    ord("B"): lambda m: m._bytes(m._number("<I")),
    ord("C"): lambda m: m._bytes(m._number("<B")),
    0x8E: lambda m: m._bytes(m._number("<Q")),
    0x96: lambda m: m._bytes(m._number("<Q")),
    0x98: lambda m: None,  # read-only
    ord(")"): lambda m: m.stack.append(()),
    ord("t"): lambda m: m.stack.append(tuple(m._since_mark())),
    0x85: lambda m: m.stack.append((m.stack.pop(),)),
    0x86: lambda m: m.stack.append(_two(m)),
    0x87: lambda m: m.stack.append((lambda last: (*_two(m), last))(m.stack.pop())),
    ord("]"): lambda m: m.stack.append([]),
    ord("l"): lambda m: m.stack.append(m._since_mark()),
    ord("a"): lambda m: m._append([m.stack.pop()]),
    ord("e"): lambda m: m._append(m._since_mark()),
    ord("}"): lambda m: m.stack.append({}),
    ord("d"): lambda m: m._dictionary(),
    ord("s"): lambda m: m._set_items(list(_two(m))),
    ord("u"): lambda m: m._set_items(m._since_mark()),
    0x8F: lambda m: m.stack.append(set()),
    0x90: lambda m: m._append(m._since_mark()),
    0x91: lambda m: m.stack.append(frozenset(map(_key, m._since_mark()))),
    ord("p"): lambda m: m._memoize(int(m._line())),
    ord("q"): lambda m: m._memoize(m._number("<B")),
    ord("r"): lambda m: m._memoize(m._number("<I")),
    0x94: lambda m: m._memoize(len(m.memo)),
    ord("g"): lambda m: m.stack.append(m.memo[int(m._line())]),
    ord("h"): lambda m: m.stack.append(m.memo[m._number("<B")]),
    ord("j"): lambda m: m.stack.append(m.memo[m._number("<I")]),
    ord("c"): lambda m: m._name(m._line(), m._line()),
    0x93: lambda m: m._name(*_two(m)),
    ord("i"): lambda m: m._make_instance(named=True),
    ord("o"): lambda m: m._make_instance(named=False),
    ord("R"): lambda m: m._reduce(),
    0x81: lambda m: m._new_object(with_keywords=False),
    0x92: lambda m: m._new_object(with_keywords=True),
    ord("b"): lambda m: m._build(),
    ord("P"): lambda m: m._outside(m._line()),
    ord("Q"): lambda m: m._outside(m.stack.pop()),
}
