"""The log of each rank also under the name that the other system gives it, from the start: it can be watched."""

import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptworks import run_paths
from gptworks.interop.translation import Translation
from gptworks.launch.rank_process import log_file
from gptworks.train.run_folder import LOGS


@contextmanager
def linked(translation: Translation, node_rank: int) -> Iterator[None]:
    """While the run goes, and after it. Where links cannot be made, copies when it has ended."""
    named = _named(translation, node_rank)
    made = _make_folders({path.parent for pair in named for path in pair})
    copied = [pair for pair in named if not _link(*pair)]
    if named:
        pattern = Path(translation.logs.format(rank="N"))
        print(f"logs also in {pattern.parent}, as {pattern.name}", flush=True)
    try:
        yield
    finally:
        for log, name in copied:
            if log.is_file():
                shutil.copyfile(log, name)
        # All ranks of a machine may have nothing to say; if no run began either, what was asked for was refused.
        is_silent = not any(log.is_file() and log.stat().st_size for log, _ in named)
        if is_silent and not run_paths.was_begun(Path(str(translation.config.get("run.out", "")))):
            for log, name in named:
                log.unlink(missing_ok=True)
                name.unlink(missing_ok=True)
        for folder in made:
            with suppress(OSError):  # something is in it
                folder.rmdir()


def _make_folders(wanted: set[Path]) -> list[Path]:
    """Makes the folders, and gives those that were not there, the innermost first."""
    new = {each for folder in wanted for each in (folder, *folder.parents) if not each.is_dir()}
    for folder in wanted:
        folder.mkdir(parents=True, exist_ok=True)
    return sorted(new, key=lambda folder: -len(folder.parts))


def _named(translation: Translation, node_rank: int) -> list[tuple[Path, Path]]:
    """(our log, their name) of each rank of this machine, which theirs number from 0 on each."""
    if not translation.logs:
        return []
    config = translation.config
    world = math.prod(config.get(f"parallel.{axis}", 1) for axis in ("dp", "fsdp", "tp", "pp"))
    options = dict(zip(translation.arguments, translation.arguments[1:], strict=False))
    here = int(options.get("--nproc", world))
    folder = Path(str(config["run.out"])) / LOGS
    first = node_rank * here
    return [(log_file(folder, first + rank), Path(translation.logs.format(rank=rank))) for rank in range(here)]


def _link(log: Path, name: Path) -> bool:
    """Both are there before the first word is written."""
    log.touch()
    try:
        name.unlink(missing_ok=True)
        name.symlink_to(os.path.relpath(log, name.parent.resolve()))
    except OSError:
        return False
    return True
