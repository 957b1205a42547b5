"""Our command line for a foreign command, with its configuration written down where it can be looked at."""

import hashlib
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptworks.interop.translation import Translation
from gptworks.interop.write_yaml import as_yaml

_SEAL = "# by gptworks run, which keeps this file under another name if you change it: "
# Which of our options name what a verb writes; of `convert` it is the second word.
_WRITTEN = ("--out", "--per-document")


def config_file(translation: Translation) -> str:
    """The name of the configuration; empty where our verb takes none."""
    return f"{Path(translation.program).stem or translation.system}.gptworks.yaml" if translation.config else ""


def command_line(translation: Translation) -> list[str]:
    file = config_file(translation)
    if not file:
        return ["gptworks", translation.verb, *translation.arguments]
    out = str(Path(str(translation.config["run.out"])))
    return ["gptworks", translation.verb, "-c", file, "--out", out, *translation.arguments]


def is_edited(file: Path) -> bool:
    """Whether somebody changed it since `write_config` wrote it, or it never was ours."""
    return file.is_file() and not _is_as_written(file.read_text(encoding="utf-8", errors="replace"))


def write_config(translation: Translation, file: Path) -> str:
    """One that was changed by hand since we wrote it stays, under another name, which is told."""
    note = ""
    if is_edited(file):
        number = 1
        while (aside := file.with_name(f"{file.name}.edited-{number}")).exists():
            number += 1
        with suppress(FileNotFoundError):  # another machine was faster
            file.rename(aside)
            note = f"{file.name} was changed by hand; it is {aside.name} now. To run it: gptworks train -c FILE"
    text = as_yaml(translation)
    # Another machine may be writing, or reading, the same one. A folder has the rights that a file should get.
    with tempfile.TemporaryDirectory(prefix=f".{file.name}.", dir=file.parent) as folder:
        staged = Path(folder) / file.name
        staged.write_text(f"{text}{_SEAL}{_checksum(text)}\n", encoding="utf-8")
        staged.replace(file)
    return note


def awaited(translation: Translation, earlier: Sequence[Translation], folder: Path) -> str:
    """An input that is not here, and that a command before this one in the block would write; empty: none."""
    made = [path for each in earlier for path in _written_by(each)]
    for path in _read_by(translation):
        if not (folder / path).exists() and any(path.startswith(begin) for begin in made):
            return path
    return ""


def _written_by(translation: Translation) -> list[str]:
    """Where its results lie: paths, or what they begin with."""
    words: Sequence[Any] = translation.arguments
    paths = [words[at + 1] for at, word in enumerate(words[:-1]) if word in _WRITTEN]
    paths += words[1:2] if translation.verb == "convert" else []
    paths += [translation.config.get("run.out", ""), *(each.path.partition("{")[0] for each in translation.after)]
    return [os.path.normpath(path) for path in paths if path]


def _read_by(translation: Translation) -> list[str]:
    """Words and settings of it that may name an input."""
    words = [word for word in translation.arguments if not word.startswith("-")]
    for value in (translation.config.get(key) for key in ("data.path", "init.checkpoint")):
        words += map(str, value if isinstance(value, list | tuple) else [value or ""])
    inputs = [os.path.normpath(path) for path in words if path]
    return [path for path in inputs if path not in _written_by(translation)]


def _is_as_written(text: str) -> bool:
    body, seal, checksum = text.rpartition(_SEAL)
    return bool(seal) and checksum.strip() == _checksum(body)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]
