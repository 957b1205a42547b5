"""What happened at each logged step: metrics.jsonl always, and whoever follows the run besides."""

import json
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from gptworks import run_paths
from gptworks.durable import sync
from gptworks.errors import first_line
from gptworks.train import jsonl
from gptworks.train.trackers import Tracker

NAME = run_paths.METRICS
NONFINITE = run_paths.NONFINITE  # the samples of steps that were not finite
TEXTS = run_paths.TEXTS  # what the model wrote at evaluations
EVALUATIONS = run_paths.EVALUATIONS  # results of tasks, with their protocols


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
        trackers: Sequence[Tracker] = (),
    ) -> None:
        self.run, self.quiet, self.say = run, quiet, say
        self.path = run / NAME
        self.observers = [] if quiet else list(observers)
        self.file: TextIO | None = None
        self.trackers = list(trackers)
        self._open(resumed_step)

    def _open(self, resumed_step: int) -> None:
        run = self.run
        if self.quiet:
            return
        for name in (NAME, NONFINITE, TEXTS, EVALUATIONS):
            num_bad = forget_after(run / name, resumed_step)
            if num_bad:
                self.say(jsonl.about_bad(run / name, num_bad))
        self.file = self.path.open("a", encoding="utf-8")

    def go_back(self, step: int) -> None:
        """The steps after this one will be done again."""
        if self.file is not None:
            self.file.close()
        self._open(step)
        for tracker in list(self.trackers):
            self._follow(tracker, lambda each: each.rewind(step))

    def log(self, step: int, values: dict[str, float | int]) -> None:
        if self.file is None:
            return
        # JSON has no NaN: a loss that is not finite is written as text, which every reader can see.
        finite = {k: v if math.isfinite(v) else str(v) for k, v in values.items()}
        self.file.write(json.dumps({"step": step, **finite}) + "\n")
        self.file.flush()
        for tracker in list(self.trackers):
            self._follow(tracker, lambda each: each.log(step, values))
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

    def _follow(self, tracker: Tracker, do: Callable[[Tracker], None]) -> None:
        """A program that follows the run does not stop it by failing; that is said once, and it is left alone then."""
        try:
            do(tracker)
        except Exception as error:
            self.trackers.remove(tracker)
            self.say(
                f"run.track: {tracker.name} failed and gets nothing more from this run: {type(error).__name__}: "
                f"{first_line(error)}"
            )

    def sync(self) -> None:
        """Lines of steps that will not be done again must not be lost with the power."""
        if self.file is not None:
            sync(self.path)
            sync(self.path.parent)  # on resume the file is a new one of the same name

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
        for tracker in list(self.trackers):
            self._follow(tracker, lambda each: each.close())


def read(run: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, without lines that cannot be read."""
    return jsonl.entries(run / NAME)[0]


def read_nonfinite(run: Path) -> list[dict[str, Any]]:
    """The steps whose loss or gradient was not finite."""
    return jsonl.entries(run / NONFINITE)[0]


def read_texts(run: Path) -> list[dict[str, Any]]:
    """What the model wrote at evaluations: step, prompt, text."""
    return [each for each in jsonl.entries(run / TEXTS)[0] if isinstance(each.get("text"), str)]


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """Results of tasks during training: step, task, protocol, data, values."""
    lines = jsonl.entries(run / EVALUATIONS)[0]
    return [each for each in lines if isinstance(each.get("values"), dict) and isinstance(each.get("task"), str)]


def num_unreadable(run: Path) -> int:
    """How many lines of a run `read` leaves out."""
    return len(jsonl.entries(run / NAME)[1])


def forget_after(path: Path, step: int) -> int:
    """Drop lines of steps that will be done again, so that each step stands there once. Lines that are no entries are
    put into a file beside; returns how many."""
    return jsonl.keep(path, lambda entry: entry["step"] <= step)[1]
