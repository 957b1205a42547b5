"""What the user sees while a model is measured: a bar on a terminal, nothing elsewhere, or PaddleNLP's log lines."""

import logging
import sys
import time
from typing import TextIO

from gptworks.evaluate.rows import Score


class Watcher:
    """Told what happens; this one keeps quiet."""

    def begin(self, name: str, total: int, done: int) -> None: ...

    def batch(self, items: int, scores: list[Score]) -> None:
        """`items`: documents that are complete by now."""

    def end(self) -> None: ...


class Bar(Watcher):
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)

    def begin(self, name: str, total: int, done: int) -> None:
        self.task = self.bar.add_task(name, total=total, completed=done)
        self.bar.start()

    def batch(self, items: int, scores: list[Score]) -> None:
        self.bar.update(self.task, completed=items)

    def end(self) -> None:
        self.bar.stop()
        self.bar.remove_task(self.task)


class PaddleLines(Watcher):
    """The progress line of PaddleNLP and FleetX. A step is a batch of ours, which are sorted by length."""

    def __init__(self, metric: str, every: int = 10, out: TextIO | None = None) -> None:
        self.metric, self.every, self.out = metric, every, out

    def begin(self, name: str, total: int, done: int) -> None:
        self.step, self.sum, self.since = 0, 0.0, time.monotonic()

    def batch(self, items: int, scores: list[Score]) -> None:
        self.sum += sum(score.greedy if self.metric == "number correct" else -score.log_probability for score in scores)
        if self.step % self.every == 0:
            now = time.monotonic()
            steps = self.every if self.step else 1
            speed = steps / max(now - self.since, 1e-9)
            self.since = now
            line = f"step {self.step}, batch: {self.step}, {self.metric}: {self.sum:f}, speed: {speed:.2f} step/s"
            print(paddle_stamp() + line, file=self.out or sys.stdout, flush=True)
        self.step += 1


def paddle_stamp() -> str:
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f",{int(now * 1000) % 1000:03d}"
    return f"[{stamp}] [{logging.getLevelName(logging.INFO):>8}] - "
