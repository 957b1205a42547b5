"""What happened at each logged step: metrics.jsonl always, TensorBoard when it is installed."""

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

NAME = "metrics.jsonl"
NONFINITE = "nonfinite.jsonl"  # the samples of steps that were not finite


Observer = Callable[[dict[str, Any]], object]  # gets a copy of each line


class Metrics:
    """`quiet`: on all ranks but the main one, which tells the observers."""

    def __init__(
        self, run: Path, *, resumed_step: int, quiet: bool = False, observers: Sequence[Observer] = ()
    ) -> None:
        self.path = run / NAME
        self.observers = [] if quiet else list(observers)
        self.file: TextIO | None = None
        self.board: Any = None
        if quiet:
            return
        for name in (NAME, NONFINITE):
            forget_after(run / name, resumed_step)
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

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        if self.board is not None:
            self.board.close()


def read(run: Path) -> list[dict[str, Any]]:
    """The logged steps of a run."""
    return _entries(run / NAME)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, leaving out a last one that was cut off by a crash."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]


def forget_after(path: Path, step: int) -> None:
    """Drop lines of steps that will be done again, so that each step stands there once."""
    if not path.exists():
        return
    kept = [entry for entry in _entries(path) if entry["step"] <= step]
    replacement = path.with_suffix(".new")
    replacement.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
    replacement.replace(path)
