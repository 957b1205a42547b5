"""The folder of a run: one writer at a time, and a record of what was run with what."""

import json
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any

from gptworks import durable, folder_lock, run_paths
from gptworks.errors import UsageError
from gptworks.launch import rank_env, rank_process, signals
from gptworks.launch.ranks import Ranks

LOCK, LOGS = run_paths.LOCK, run_paths.LOGS
# All of this is for the main process; the other ranks write nothing here but their files of a checkpoint.


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """One writer at a time. Held by the operating system, so a crash lets go of it; where a filesystem has no such
    locks, by a file that names its owner."""
    try:
        durable.make_folder(run)
        file = (run / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{run}: cannot be written to ({error.strerror}). Choose another --out.") from None
    with ExitStack() as held, file:
        reason = folder_lock.take(file.fileno())
        if reason == folder_lock.HELD:
            file.seek(0)
            raise folder_lock.refused(run, file.read().strip() or "unknown")
        if reason:
            held.enter_context(folder_lock.owned(run, reason))
        file.truncate(0)
        file.write(folder_lock.me() + "\n")
        file.flush()
        os.fsync(file.fileno())  # other machines compare it: a network filesystem may keep it here until it is closed
        yield


def refuse_private(run: Path, ranks: Ranks) -> None:
    """On all ranks, while the main process holds the lock: each of them must see that very lock."""
    lock = run / LOCK
    owner = ranks.on_main(lambda: lock.read_text(encoding="utf-8"))

    def look() -> None:
        if not lock.is_file() or lock.read_text(encoding="utf-8") != owner:
            raise UsageError(
                f"{run}: rank {ranks.rank} on {platform.node()} does not see the folder that rank 0 ({owner.strip()}) "
                "writes to. run.out must be on a filesystem that all machines share."
            )

    ranks.on_all(look)


def _only_names_logs(path: Path, run: Path) -> bool:
    """Whether there is nothing but other names of the logs of ranks, which are there before the run itself, too."""
    within = [path, *path.rglob("*")] if path.is_dir() else [path]
    files = [each for each in within if each.is_symlink() or not each.is_dir()]
    logs = (run / LOGS).resolve()
    return bool(files) and all(each.is_symlink() and each.resolve().parent == logs for each in files)


def refuse_foreign(run: Path, resume: str) -> None:
    """A folder that has something in it is written to only when resuming was asked for and a run of ours began it."""
    _refuse_busy(run)
    names = sorted(path.name for path in run.iterdir()) if run.is_dir() else []
    present = [name for name in names if name[0] != "." and name != LOGS and not _only_names_logs(run / name, run)]
    is_ours = not present or run_paths.was_begun(run)
    if (present and resume == "never") or not is_ours:
        listed = ", ".join(present[:4]) + (", ..." if len(present) > 4 else "")
        advice = (
            "Go on with --resume auto, or choose another --out."
            if is_ours
            else "No run began it: choose another --out."
        )
        raise UsageError(f"{run}: not empty ({listed}). {advice}")


def _refuse_busy(run: Path) -> None:
    """Before anything is said or written there: a run that goes on is not to be resumed, nor are its logs ours."""
    with suppress(OSError), (run / LOCK).open("r+", encoding="utf-8") as file:
        if folder_lock.take(file.fileno()) == folder_lock.HELD:
            raise folder_lock.refused(run, file.read().strip() or "unknown")


def write_environment(run: Path, command: list[str], **more: Any) -> None:
    """`more`: what else was found out about the machine, by name."""
    record = {
        "command": command,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {
            name: _version(name) for name in ("gptworks", "torch", "numpy", "tokenizers", "safetensors", "pydantic")
        },
        "commit": _commit(),
        "cpu_count": os.cpu_count(),
        "environment": {
            k: v for k, v in os.environ.items() if k.startswith(("OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_"))
        },
        **more,
    }
    replace_text(run / run_paths.ENVIRONMENT, json.dumps(record, indent=2) + "\n")


def replace_text(path: Path, text: str) -> None:
    """In one go: a crash leaves the old text or the new one."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _commit() -> str | None:
    """The commit of the folder the code was started in, when that is a git checkout."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Interrupts:
    """A signal of `signals.SAVE_AND_END` asks the loop to save and end, however often it comes; only a second Ctrl-C
    ends the process at once."""

    def __init__(self) -> None:
        self.received: str | None = None  # the first one's name
        self._has_int = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interrupts":
        for number in signals.to_handle():
            with suppress(ValueError):  # not in the main thread: whoever started the thread decides
                self._previous[number] = signal.signal(number, self._receive)
        rank_process.note_saves()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # One that a launcher started ends now. The same signal comes once more, from the launcher or the batch system,
        # and must not make a failure of it; nor keep one that fails from saying why, when torchrun ends it meanwhile.
        # A rank that another one has told to stop gets it late, from what watches torchrun on its machine.
        is_told = self.received is not None or rank_env.ROUNDS in os.environ
        is_ending = (is_told or kind is not None) and rank_env.read(os.environ).started_by
        for number, handler in self._previous.items():
            if not is_ending or handler != signal.SIG_DFL:
                signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGINT and self._has_int:
            # Past Python's buffers, which may be in use just now. The live bar has hidden the cursor: show it again.
            cursor = b"\x1b[?25h" if os.isatty(2) else b""
            os.write(2, cursor + b"\nstopped at once; what is not in a checkpoint is lost.\n")
            os._exit(128 + number)
        self._has_int = self._has_int or number == signal.SIGINT
        if name == "SIGHUP":
            signals.leave_closed_terminal()
        self.received = self.received or name
