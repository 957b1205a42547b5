"""A pasted line of another system: translated, run where it was meant to run, its checkpoints under their names."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gptworks.interop import command_line, registry
from gptworks.interop.pasted import Line
from gptworks.interop.translation import Translation


def translate(line: Line, pasted_words: Sequence[str]) -> tuple[Translation, list[str]]:
    """What the line means, and what is to be said about it. `pasted_words`: all that the user pasted."""
    command = line.command
    assert command is not None
    files = registry.Files(line.folder)
    files.remarks += [*line.started.remarks, *command_line.emptied(list(pasted_words), command)]
    translation = registry.of_command(command).translate(command, files)
    # NAME=value in front of it
    return replace(translation, environment={**command.environment, **translation.environment}), files.remarks


@contextmanager
def inside(folder: Path, translation: Translation) -> Iterator[None]:
    """In the folder of the command, and with what it sets in the environment."""
    here, before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    try:
        os.environ.update(translation.environment)
        yield
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def write_their_names(translation: Translation) -> None:
    """Write the checkpoints that the run has left under the other system's names."""
    if not translation.after:
        return
    from gptworks.interop import foreign_names  # with torch: not for a translation alone

    for after in translation.after:
        foreign_names.write(after, Path(str(translation.config["run.out"])))
