"""Which system a command or a YAML file belongs to, and the files their documents name."""

import difflib
from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol, cast

from gptworks import file_errors
from gptworks.errors import UsageError
from gptworks.interop import python_imports, yaml_files
from gptworks.interop.translation import Command, Translation

NAMES = ("fleetx", "paddlenlp", "oneflow", "megatron", "mindformers", "nanogpt")


class Find(Protocol):
    def __call__(self, name: str) -> Path:
        """The file meant by a name in a command."""


class Dialect(Protocol):
    """A module of this package."""

    NAME: str
    TITLE: str

    def recognise(self, command: Command) -> bool: ...
    def translate(self, command: Command, find: Find) -> Translation: ...
    def recognise_yaml(self, values: dict[str, Any]) -> bool: ...
    def translate_yaml(self, path: Path) -> Translation: ...


def dialect(name: str) -> Dialect:
    return cast(Dialect, import_module(f"gptworks.interop.{name}"))


def of_command(command: Command) -> Any:
    for each in map(dialect, NAMES):
        if each.recognise(command):
            return each
    advice = python_imports.advice(command.folder / command.program)
    if advice:
        raise UsageError(f"run: {command.program}: {advice}")
    if "/" in command.program or len(command.program) > 255:
        file_errors.refuse_unreadable(command.folder / command.program)
    known = ", ".join(dialect(name).TITLE for name in NAMES)
    raise UsageError(
        f"run: {command.program} {' '.join(command.arguments[:4])} ...: not of a known system. Known: {known}."
    )


def of_yaml(path: Path) -> Any:
    values = yaml_files.read(path)
    for each in map(dialect, NAMES):
        if each.recognise_yaml(values):
            return each
    listed = ", ".join(list(values)[:6])
    raise UsageError(f"{path}: its keys ({listed} ...) are not those of a known system ({', '.join(NAMES)}).")


class Files:
    """A file that is named in a command: on disk, else among those of the documents, which ship with gptworks."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remarks: list[str] = []

    def __call__(self, name: str) -> Path:
        here = self.folder / name
        if here.is_file():
            return here
        ours = shipped(Path(name).name)
        if ours is not None:
            title = ours.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
            self.remarks.append(f"{name} is not here: used is {title}. It comes with gptworks: {ours}")
            return ours
        place = "" if here.is_absolute() and Path(name).is_absolute() else f" in {self.folder.resolve()}"
        raise UsageError(f"{name}: no such file{place}.{_nearest(here)} Give its path, or --cwd DIR.")


def shipped(name: str) -> Path | None:
    """A file that a document names, of those that ship with gptworks."""
    path = Path(str(resources.files("gptworks.interop"))) / "shipped" / name
    return path if path.is_file() else None


def _nearest(path: Path) -> str:
    there = sorted(each.name for each in path.parent.iterdir() if each.is_file()) if path.parent.is_dir() else []
    ours = [each.name for each in (Path(str(resources.files("gptworks.interop"))) / "shipped").iterdir()]
    near = difflib.get_close_matches(path.name, [*there, *sorted(ours)], 1, cutoff=0.7)
    if not near:
        return ""
    return f" Did you mean {near[0]}{'' if near[0] in there else ', which comes with gptworks'}?"
