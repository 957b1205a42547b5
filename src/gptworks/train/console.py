"""What the user sees while a model trains: a live bar on a terminal, plain lines elsewhere."""

import logging
import sys
import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gptworks.train.notebook_bar import NotebookBar, is_notebook
from gptworks.train.speed import Speed


@dataclass(frozen=True)
class LogLine:
    """Everything a log line can show."""

    step: int
    last_step: int
    epoch: int
    batch_in_epoch: int
    loss: float  # the mean since the last line
    lr: float
    next_lr: float  # Paddle moves its schedule before it logs
    grad_norm: float
    speed: Speed
    loss_scale: float | None
    num_ranks: int = 1


def gptworks_line(line: LogLine) -> str:
    width = len(str(line.last_step))
    eta = (line.last_step - line.step) / line.speed.steps_per_sec if line.speed.steps_per_sec else 0.0
    scale = f"  scale {line.loss_scale:g}" if line.loss_scale is not None else ""
    return (
        f"step {line.step:>{width}}/{line.last_step}  loss {line.loss:.4f}  lr {line.lr:.2e}  grad "
        f"{line.grad_norm:.3f}{scale}  "
        f"{_speed(line.speed)}  ETA {duration(eta)}"
    )


def fleetx_line(line: LogLine) -> str:
    """The line of FleetX and PaddleNLP, field by field."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)) + f",{int(now * 1000) % 1000:03d}"
    total = line.speed.tokens_per_sec
    return (
        f"[{stamp}] [{logging.getLevelName(logging.INFO):>8}] - global step {line.step}, epoch: {line.epoch}, "
        f"batch: {line.batch_in_epoch}, loss: {line.loss:.9f}, avg_reader_cost: {line.speed.reader_seconds:.5f} sec, "
        f"avg_batch_cost: {1 / line.speed.steps_per_sec:.5f} sec, speed: {line.speed.steps_per_sec:.2f} step/s, "
        f"ips_total: {total:.0f} tokens/s, ips: {total / line.num_ranks:.0f} tokens/s, learning rate: "
        f"{line.next_lr:.5e}"
    )


def _speed(speed: Speed) -> str:
    return f"{speed.tokens_per_sec:,.0f} tok/s  MFU " + ("-" if speed.mfu is None else f"{100 * speed.mfu:.0f}%")


STYLES = {"gptworks": gptworks_line, "fleetx": fleetx_line}


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class TrainConsole:
    """`quiet`: on all ranks but the main one."""

    def __init__(self, last_step: int, style: str, *, first_step: int = 0, quiet: bool = False) -> None:
        """A terminal has a bar below the lines, with the time that is left."""
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True, quiet=quiet)
        self.style = style
        self.progress: Progress | None = None
        if self.console.is_terminal and style == "gptworks" and not quiet:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(30),
                TextColumn("{task.fields[doing]}"),
                TextColumn("elapsed"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self.progress = Progress(*columns, console=self.console)
            self.task = self.progress.add_task("train", total=last_step, completed=first_step, doing="")
            self.progress.start()
        self.notebook: NotebookBar | None = None
        if not quiet and style == "gptworks" and is_notebook():
            self.notebook = NotebookBar(last_step, first_step)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def log(self, line: LogLine) -> None:
        self.say(STYLES[self.style](line))
        if self.notebook is not None:
            self.notebook.update(line.step, f"loss {line.loss:.4f}")

    def step(self, number: int) -> None:
        """The bar moves with each step."""
        if self.notebook is not None:
            self.notebook.update(number)
        if self.progress is not None:
            self.progress.update(self.task, completed=number, doing="")

    def doing(self, activity: str) -> None:
        """Beside the bar until the next step is done."""
        if self.progress is not None:
            self.progress.update(self.task, doing=activity)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.notebook is not None:
            self.notebook.close()
