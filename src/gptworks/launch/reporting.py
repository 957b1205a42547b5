"""Around all that a rank does: what it raises is said to the other ranks, to torchrun and to our launcher."""

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptworks.errors import GPTWorksError, LostRunError, TrainingError, UsageError
from gptworks.launch import failures, rank_env

_FINAL = ".ended-"  # and the agent: a file in the run folder


@contextmanager
def reporting(run_folder: Path | None = None) -> Iterator[None]:
    """Around all that one of many ranks does. In `run_folder` lies why an agent's next start would be in vain."""
    place = rank_env.read(os.environ)
    if place.world_size == 1 and not rank_env.is_supervised(os.environ):
        yield
        return
    ended = _ended_file(run_folder)
    try:
        if ended is not None and ended.exists():
            raise UsageError(failures.read(ended.read_text(encoding="utf-8")).message)
        yield
    except Exception as error:
        from gptworks.launch import process_group  # with torch: only where there is a group to leave

        process_group.forget()  # closing the group would wait for ranks that are gone
        connection = process_group.connection()
        if connection is not None:
            connection.take_the_last_word()
        failure = failures.explain(error, place.rank, connection)
        failures.leave_words(failure, connection)
        if ended is not None and not failure.can_restart:
            with suppress(OSError):
                ended.parent.mkdir(parents=True, exist_ok=True)
                ended.write_text(failure.dump(), encoding="utf-8")
        if connection is not None:
            connection.heartbeat.stop()
        if not rank_env.is_supervised(os.environ):
            if failure.is_fault or (isinstance(error, GPTWorksError) and failure.because_of is None):
                raise
            raise (LostRunError if failure.can_restart else TrainingError)(failure.message) from None
        raise SystemExit(failure.exit_code) from None


def _ended_file(run_folder: Path | None) -> Path | None:
    """torchrun starts ranks again after any failure, also one that only the user can fix. By this file the next start
    ends at once, with the same words. It names the agent, whose ranks alone it is for."""
    if run_folder is None or int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) == 0:
        return None
    agent = os.getppid()
    with suppress(OSError):  # when it began, since numbers of processes come again
        began = Path(f"/proc/{agent}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
        return run_folder / f"{_FINAL}{platform.node()}-{agent}-{began}.json"
    return run_folder / f"{_FINAL}{platform.node()}-{agent}.json"


def forget_ended(run_folder: Path) -> None:
    """Once a run has begun there: those were of others."""
    for path in run_folder.glob(f"{_FINAL}*.json"):
        path.unlink(missing_ok=True)
