"""What a pickle is read as: plain values, and names of what is not made."""

import reprlib
from dataclasses import dataclass, field
from typing import Any

_OLD_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # as Python 2 and protocols 0 to 2 call them
LONG = 256  # byte strings above this stay where they are


@dataclass(frozen=True)
class Global:
    """A name the pickle would import."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{_OLD_MODULES.get(self.module, self.module)}.{self.name}"


@dataclass(eq=False)
class Object:
    """What a call would have made: its function or class, its arguments, the state it would have been given."""

    made_by: Global
    args: tuple[Any, ...]
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Persistent:
    """What the container keeps outside the pickle, such as the storage of a tensor."""

    id: Any


@dataclass(frozen=True)
class Bytes:
    """A long byte string that was left in the file: `at` is its place in the data that the machine was given."""

    view: memoryview
    at: int

    def __len__(self) -> int:
        return len(self.view)


class Settings(dict[str, Any]):
    """What was an argparse.Namespace."""


class _Short(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict, self.maxstring, self.maxother = 3, 4, 80, 80

    def repr_int(self, x: int, level: int) -> str:
        return str(x) if x.bit_length() < 256 else f"a number of {x.bit_length():,} bits"

    def repr_instance(self, x: Any, level: int) -> str:
        if x is None or isinstance(x, bool | float):
            return repr(x)
        return repr(x[:40]) if isinstance(x, bytes) else str(x) if isinstance(x, Global) else f"<{type(x).__name__}>"


def brief(value: Any) -> str:
    """For a message. A value from a file may share its parts, and its whole text be without end.

    >>> brief([1, "two", (3, [4, [5, [6]]])])
    "[1, 'two', (3, [...])]"
    """
    return _Short().repr(value)[:200]
