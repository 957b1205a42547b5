"""Which system a command or a YAML file belongs to, and the files their documents name."""

from importlib import import_module, resources
from pathlib import Path
from typing import Any, Protocol

from gptworks.errors import UsageError
from gptworks.interop import yaml_files
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


def dialect(name: str) -> Any:
    return import_module(f"gptworks.interop.{name}")


def of_command(command: Command) -> Any:
    for each in map(dialect, NAMES):
        if each.recognise(command):
            return each
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
    """A file that is named in a command: on disk, else among those of the documents, which come with us."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.remarks: list[str] = []

    def __call__(self, name: str) -> Path:
        here = self.folder / name
        if here.is_file():
            return here
        ours = resources.files("gptworks.interop") / "shipped" / Path(name).name
        if ours.is_file():
            self.remarks.append(f"{name} is not here: the one of the document is used, which comes with gptworks.")
            return Path(str(ours))
        raise UsageError(f"{name}: no such file in {self.folder.resolve()}. Give its path, or --cwd DIR.")
