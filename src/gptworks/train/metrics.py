"""What happened at each logged step: metrics.jsonl always, TensorBoard when it is installed."""

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from gptworks.durable import sync

NAME = "metrics.jsonl"
NONFINITE = "nonfinite.jsonl"  # the samples of steps that were not finite


Observer = Callable[[dict[str, Any]], object]  # gets a copy of each line


class Metrics:
    """`quiet`: on all ranks but the main one, which tells the observers. `say` tells the user of lines that are no
    entries."""

    def __init__(
        self,
        run: Path,
        *,
        resumed_step: int,
        quiet: bool = False,
        say: Callable[[str], None] = print,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.path = run / NAME
        self.observers = [] if quiet else list(observers)
        self.file: TextIO | None = None
        self.board: Any = None
        if quiet:
            return
        for name in (NAME, NONFINITE):
            num_bad = forget_after(run / name, resumed_step)
            if num_bad:
                lines = f"{num_bad} line{'s' * (num_bad > 1)}"
                say(f"{run / name}: {lines} that cannot be read set aside in {bad_lines(run / name)}")
        self.file = self.path.open("a", encoding="utf-8")
        if find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(run / "tensorboard"), purge_step=resumed_step + 1)  # type: ignore[no-untyped-call]

    def log(self, step: int, values: dict[str, float | int]) -> None:
        if self.file is None:
            return
        # JSON has no NaN: a loss that is not finite is written as text, which every reader can see.
        shown = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        self.file.write(json.dumps({"step": step, **shown}) + "\n")
        self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
        for observer in list(self.observers):
            self._tell(observer, {"step": step, **values})

    def _tell(self, observer: Observer, line: dict[str, Any]) -> None:
        """An observer changes nothing, not even by failing; but it is not left unsaid."""
        try:
            observer(line)
        except Exception:
            self.observers.remove(observer)
            name = getattr(observer, "__qualname__", repr(observer))
            traceback.print_exc()
            print(f"step {line['step']}: the callback {name} failed and is not called again", file=sys.stderr)

    def sync(self) -> None:
        """Lines of steps that will not be done again must not be lost with the power."""
        if self.file is not None:
            sync(self.path)
            sync(self.path.parent)  # on resume the file is a new one of the same name

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, without lines that cannot be read."""
    return _entries(run / NAME)[0]


def read_nonfinite(run: Path) -> list[dict[str, Any]]:
    """The steps whose loss or gradient was not finite."""
    return _entries(run / NONFINITE)[0]


def num_unreadable(run: Path) -> int:
    """How many lines of a run `read` leaves out."""
    return len(_entries(run / NAME)[1])


def bad_lines(path: Path) -> Path:
    """Where those lines of a file are put that are no entries."""
    return path.with_name(f"{path.name}.bad")


def _entries(path: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    """The entries of a file, and its lines that are none. A last line that was cut off by a crash is neither."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], []
    entries, bad = [], []
    for line in lines[:-1]:
        entry = _parsed(line)
        if entry is not None:
            entries.append(entry)
        elif line.strip():
            bad.append(line)
    last = _parsed(lines[-1])
    return entries + ([last] if last is not None else []), bad


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):  # not UTF-8 is a ValueError, too
        return None
    is_entry = isinstance(entry, dict) and type(entry.get("step")) is int and entry["step"] >= 0
    return entry if is_entry else None


def forget_after(path: Path, step: int) -> int:
    """Drop lines of steps that will be done again, so that each step stands there once. Lines that are no entries are
    put into a file beside; returns how many."""
    if not path.exists():
        return 0
    entries, bad = _entries(path)
    if bad:
        with bad_lines(path).open("ab") as aside:
            aside.write(b"\n".join(bad) + b"\n")
    kept = [entry for entry in entries if entry["step"] <= step]
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    sync(replacement)  # else the power may go between the new name and what is behind it, and all lines with it
    replacement.replace(path)
    return len(bad)
