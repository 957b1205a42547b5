"""The settings of a foreign command: a table of the keys that exist, what was given, what it became.

Every given key ends in a note. A key that the table lacks is the user's mistake; one that no rule looked at is ours.
"""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptworks.errors import ConfigError
from gptworks.interop import command_line
from gptworks.interop.notes import Note, setting_text
from gptworks.interop.translation import Command, Translation

Read = Callable[[str], Any]


def parse_int(text: str) -> int:
    value = float(text)
    if not value.is_integer():  # nor are inf and nan
        raise ValueError(f"got {text}; needs a whole number")
    return int(value)


def parse_float(text: str) -> float:
    return float(text)


def parse_bool(text: str) -> bool:
    """As their argument parsers read it."""
    if text.lower() in ("true", "t", "yes", "y", "1", "on"):
        return True
    if text.lower() in ("false", "f", "no", "n", "0", "off", "none", ""):
        return False
    raise ValueError(f"got {text}; needs true or false")


def parse_str(text: str) -> str:
    return text


@dataclass(frozen=True)
class Key:
    """One setting of a foreign system.

    `ours`: the key of ours that takes the value as it is; `default`: what their code takes when it is not given (only
    where it differs from ours it matters, but it is their number that counts). Without `ours` it is `same_effect`,
    why nothing needs to be set for the same outcome, or `ignored_because`, or a rule of the module looks at it.
    """

    theirs: str
    read: Read = parse_str
    ours: str = ""
    default: Any = None
    ignored_because: str = ""
    same_effect: str = ""
    harmless_values: tuple[str, ...] = ()  # beside `ignored_because`: values that have our outcome, in small letters
    switch: bool = False  # a flag without a value


class Settings:
    """>>> settings = Settings("x", [Key("--layers", parse_int, "model.num_layers", default=12)], {"--layers": "4"})
    >>> settings.map_plain(); settings.ours
    {'model.num_layers': 4}
    """

    def __init__(
        self, where: str, keys: Iterable[Key], texts: Mapping[str, str], *, hints: Mapping[str, str] = {}
    ) -> None:
        """`texts`: as written; an empty text keeps their default. `hints`: answers to known misspellings."""
        self.where = where
        self.keys = {key.theirs: key for key in keys}
        self.texts = dict(texts)
        self.ours: dict[str, Any] = {}
        self.notes: list[Note] = []
        self.values: dict[str, Any] = {}
        self.their_names: dict[str, str] = {}  # a key of ours -> the one of theirs that sets it, given or not
        self._check(hints)

    @classmethod
    def of_command(
        cls, command: Command, keys: Sequence[Key], *, several: Collection[str] = (), hints: Mapping[str, str] = {}
    ) -> "Settings":
        """From the flags of a command. `several`: those that take words up to the next."""
        switches = {key.theirs for key in keys if key.switch}
        flags = command_line.flags(command.arguments, switches, several=several)
        return cls(command.program, keys, flags, hints=hints)

    def _check(self, hints: Mapping[str, str]) -> None:
        problems = []
        empty: list[str] = []
        for name, text in self.texts.items():
            key = self.keys.get(name)
            if key is None and text == "" and any(known.startswith(f"{name}.") for known in self.keys):
                empty.append(name)  # a section with nothing in it
                continue
            if key is None:
                problems.append(f"{name}: {hints.get(name) or _unknown(name, self.keys)}")
                continue
            try:
                if text != "" or key.read is parse_str:
                    self.values[name] = key.read(text)
            except ValueError as error:
                reason = str(error) if str(error).startswith("got") else f"got {text!r}; needs {_KINDS[key.read]}"
                problems.append(f"{name}: {reason}.")
        if problems:
            raise ConfigError(self.where, problems)
        for name in empty:
            del self.texts[name]

    def __getitem__(self, name: str) -> Any:
        """What counts: the value given, else their default."""
        value = self.values.get(name)
        return self.keys[name].default if value is None or value == "" else value

    def is_given(self, name: str) -> bool:
        return name in self.texts

    def map(
        self, name: str | Iterable[str], ours: str | Mapping[str, Any], value: Any = None, *, why: str = ""
    ) -> None:
        """Set ours; with a note on each of their keys that were given. `why`: it is not quite the same."""
        names = [name] if isinstance(name, str) else list(name)
        if isinstance(ours, str):
            ours = {ours: self[names[0]] if value is None else value}
        self.ours.update(ours)
        theirs = next((each for each in names if self.is_given(each)), names[0])
        for key in ours:
            if self.is_given(theirs) or key not in self.their_names:
                self.their_names[key] = theirs
        settings = ", ".join(f"{key}={setting_text(each)}" for key, each in ours.items())
        self._note(names, "approximated" if why else "mapped", settings, why)

    def map_evaluation(self, name: str, samples: int, global_size: int) -> None:
        """An evaluation of so many samples in batches of ours, the next whole number of them."""
        batches = -(-samples // global_size)
        why = "rounded up to whole batches of a step; theirs are micro-batches" if samples % global_size else ""
        self.map(name, {"evaluate.batches": batches}, why=why)

    def same(self, name: str | Iterable[str], why: str) -> None:
        """Nothing of ours needs to be set: the outcome is theirs."""
        self._note([name] if isinstance(name, str) else list(name), "mapped", "", why)

    def ignore(self, name: str | Iterable[str], why: str) -> None:
        self._note([name] if isinstance(name, str) else list(name), "ignored", "", why)

    def _note(self, names: list[str], how: Any, ours: str, why: str) -> None:
        noted = {note.theirs for note in self.notes}
        for name in names:
            if name not in self.keys:
                raise KeyError(f"{name} is not in the table of {self.where}")
            if self.is_given(name) and name not in noted:
                self.notes.append(Note(name, self.texts[name], how, ours, why))

    def map_plain(self) -> None:
        """All keys that take a value as it is, by their defaults where they were not given; and those nobody needs."""
        for name, key in self.keys.items():
            if key.ours and self[name] is not None:
                self.map(name, key.ours)
            elif key.ours:
                self.same(name, "empty: their default and ours is to leave it open")
            elif key.same_effect:
                self.same(name, key.same_effect)
            elif (
                key.ignored_because
                and self.texts.get(name, "").lower() in ("", *key.harmless_values)
                and key.harmless_values
            ):
                self.same(name, key.ignored_because)
            elif key.ignored_because:
                self.ignore(name, key.ignored_because)

    def translated(self, system: str, verb: str, program: str, **more: Any) -> Translation:
        """The command that these settings were given to, with a note for each; `more`: what else it has."""
        self.require_noted()
        return Translation(system, verb, program, notes=self.notes, their_names=self.their_names, **more)

    def require_noted(self) -> None:
        """Our own check: a key in the table that no rule looked at."""
        noted = {note.theirs for note in self.notes}
        if left := [name for name in self.texts if name not in noted]:
            raise AssertionError(f"{self.where}: no note for {left}")
        order = {name: number for number, name in enumerate(self.texts)}
        self.notes.sort(key=lambda note: order[note.theirs])  # as they were written


_KINDS: dict[Any, str] = {parse_int: "a whole number", parse_float: "a number", parse_bool: "true or false"}


def _unknown(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), 1, cutoff=0.6)
    if not near:
        last = name.rpartition(".")[2]
        near = [key for key in known if key.rpartition(".")[2] == last][:1]
    return f"unknown; did you mean {near[0]}?" if near else "unknown, and nothing known is like it."
