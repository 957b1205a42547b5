"""Runs that go on: read again when their files change, shown in a terminal or as a page that renews itself."""

import hashlib
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gptworks import run_paths
from gptworks.errors import GPTWorksError, UsageError
from gptworks.report import chart, page, run_data
from gptworks.report.run_data import RunData
from gptworks.report.thinning import Points
from gptworks.train import event_file, metrics

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_HEIGHT = 10  # lines of a chart in a terminal
_SHORT = {"grad_norm": "gradient", "tokens_per_sec": "tokens/s", "loss_scale": "scale"}
_PATIENCE = 60.0  # seconds without a new line, at least, before that is said
_NARROWEST = 64  # columns of a panel; with less, panels stand below each other


class Followed:
    """One run. What cannot be read at the moment, on a shared disk for instance, leaves what was read before."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._curves = run_data.Curves(folder)
        self.data = run_data.read(folder, name, self._curves)
        self._seen = self._stamp()
        self.trouble = ""

    def _stamp(self) -> tuple[object, ...]:
        states: list[object] = []
        records = (metrics.NAME, metrics.NONFINITE, metrics.TEXTS, metrics.EVALUATIONS, event_file.NAME)
        for name in (*records, run_paths.CONFIG, run_paths.LATEST, run_paths.BEST):
            try:
                facts = (self.folder / name).stat()
            except OSError:
                states.append(None)
                continue
            states.append((facts.st_mtime_ns, facts.st_size, facts.st_ino))
        return tuple(states)

    def silence(self) -> float:
        """Seconds since the last line of metrics.jsonl."""
        with suppress(OSError):
            return time.time() - (self.folder / metrics.NAME).stat().st_mtime
        return 0.0

    def renew(self) -> bool:
        """Whether there was something new."""
        stamp = self._stamp()
        if stamp == self._seen and not self.trouble:  # a folder that is back may be as it was
            return False
        try:
            self.data, self._seen, self.trouble = run_data.read(self.folder, self.name, self._curves), stamp, ""
        except (GPTWorksError, OSError) as error:
            self.trouble = str(error)
            return False
        return True


# In a terminal


def drawn(followed: list[Followed], width: int) -> Group:
    """A panel for each run: its numbers, and its loss as a chart of blocks. Side by side where there is room."""
    beside = max(1, min(len(followed), width // _NARROWEST))
    rows = []
    for first in range(0, len(followed), beside):
        row = Table.grid()
        row.add_row(*[_panel(each, min(width // beside, 100)) for each in followed[first : first + beside]])
        rows.append(row)
    return Group(*rows)


def _panel(followed: Followed, width: int) -> Panel:
    run = followed.data
    losses, held_out = run.curves.get("loss", []), run.curves.get("held_out_loss", [])
    parts = [Text("   ".join(numbers(run, followed.silence())))]
    parts += [Text(line) for line in blocks(losses, width - 14)]
    parts += [Text(line, "dim") for line in small_charts(run, width - 14)]
    if held_out:
        step, lowest = min(held_out, key=lambda point: point[1])
        parts.append(Text(f"held-out {held_out[-1][1]:.4f}, lowest {lowest:.4f} at step {step:,.0f}"))
    if run.nonfinite:
        parts.append(Text(f"{len(run.nonfinite)} not finite, the last at step {run.nonfinite[-1]['step']:,}", "red"))
    if run.events:
        parts.append(Text(event_file.in_words(run.events[-1]), "yellow"))
    if followed.trouble:
        parts.append(Text(followed.trouble, "red"))
    return Panel(Group(*parts), title=Text(run.name), title_align="left", width=width)


def numbers(run: RunData, silence: float = 0.0) -> list[str]:
    """Step, loss, rate, speed and how long it still takes, as far as they are known.

    silence: seconds since the last line; after that of many lines the run has probably ended or hangs.
    """
    losses, speed = run.curves.get("loss", []), run.last("tokens_per_sec")
    if not losses:
        return ["no losses yet"]
    step, steps = int(losses[-1][0]), run.config.get("train.steps")
    total = steps if type(steps) is int else 0  # 0: not known
    words = [f"step {step:,}" + (f" of {total:,}" if total > 0 else ""), f"loss {losses[-1][1]:.4f}"]
    rate, tokens = run.last("lr"), run.last("tokens")
    words += [f"lr {rate:.3g}"] if rate is not None else []
    words += [f"{speed:,.0f} tokens/s"] if speed else []
    if speed and tokens and step and total > step:
        seconds_of_a_step = tokens / step / speed
        steps_of_a_line = step - (losses[-2][0] if len(losses) > 1 else 0)
        is_silent = silence > max(_PATIENCE, 10 * steps_of_a_line * seconds_of_a_step)
        left = f"{_duration((total - step) * seconds_of_a_step)} left"
        words.append(f"nothing new for {_duration(silence)}" if is_silent else left)
    return words


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if seconds >= 90 else f"{seconds:.0f} s"


def blocks(points: Points, width: int) -> list[str]:
    """A chart of eighths of characters with its highest and lowest value; the highest of each column is drawn."""
    if len(points) < 2:
        return []
    first, last = points[0][0], points[-1][0]
    columns = _columns(points, width)
    low, high = min(columns), max(columns)
    heights = _heights(columns, _HEIGHT * 8)
    lines = []
    for line in range(_HEIGHT - 1, -1, -1):
        label = f"{high:9.3f} " if line == _HEIGHT - 1 else f"{low:9.3f} " if line == 0 else " " * 10
        lines.append(label + "".join(_EIGHTHS[max(0, min(8, height - 8 * line))] for height in heights))
    return [*lines, f"{'':10}{first:<{max(1, len(columns) // 2)},.0f}{last:>{max(1, -(-len(columns) // 2))},.0f}"]


def small_charts(run: RunData, width: int) -> list[str]:
    """One line for each of the other curves of the page: its name, its course and its last value."""
    lines = []
    for name in page.SINGLE:
        points = run.curves.get(name, [])
        if len(points) < 2:
            continue
        last = chart.written(float(f"{points[-1][1]:.4g}"))
        columns = _columns(points, width - len(last) - 8)
        drawn = "".join(_EIGHTHS[height] for height in _heights(columns, 8))
        lines.append(f"{_SHORT.get(name, name):>9.9} {drawn} {last}")
    return lines


def _columns(points: Points, width: int) -> list[float]:
    """The highest value of each column; one in which nothing was logged is as high as the one before."""
    first, last = points[0][0], points[-1][0]
    columns = [-math.inf] * max(1, min(width, len(points)))
    for step, value in points:
        at = min(len(columns) - 1, int((step - first) / max(last - first, 1) * len(columns)))
        columns[at] = max(columns[at], value)
    for at in range(1, len(columns)):
        columns[at] = columns[at - 1] if columns[at] == -math.inf else columns[at]
    return columns


def _heights(columns: list[float], most: int) -> list[int]:
    """From 1, the lowest, to `most`."""
    low, high = min(columns), max(columns)
    scale = (most - 1) / max(high - low, 1e-12)
    return [1 + round((value - low) * scale) for value in columns]


# As a page


class LivePage:
    """The page as it is now, written again only when a run has changed."""

    def __init__(self, followed: list[Followed], every: float) -> None:
        self.followed, self.every = followed, every
        self._lock = threading.Lock()
        self._text = b""
        self._troubles: list[str] = []

    def now(self) -> tuple[bytes, str]:
        """The page, and a tag that is another when the page is."""
        with self._lock:
            has_changed = [each.renew() for each in self.followed]
            troubles = [f"{each.name}: {each.trouble}" for each in self.followed if each.trouble]
            if any(has_changed) or troubles != self._troubles or not self._text:
                text = page.written([each.data for each in self.followed], self.every, troubles)
                self._text = text.encode(errors="replace")
                self._troubles = troubles
            return self._text, f'"{hashlib.sha256(self._text).hexdigest()[:32]}"'


class _Answer(BaseHTTPRequestHandler):
    """Nothing but the page is answered, and nothing is written."""

    server: "_Server"
    server_version, sys_version = "gptworks", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        text, tag = self.server.page.now()
        is_known = self.headers.get("If-None-Match") == tag
        self.send_response(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK)
        for name, value in {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": "0" if is_known else str(len(text)),
            "ETag": tag,
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        self.end_headers()
        if not is_known:
            self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nobody wants a line for each renewal."""


class _Server(ThreadingHTTPServer):
    def __init__(self, address: tuple[str, int], page: LivePage) -> None:
        self.page = page
        super().__init__(address, _Answer)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has gone away is no error of ours; all others are shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


def serve(followed: list[Followed], host: str, port: int, every: float, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    try:
        server = _Server((host, port), LivePage(followed, every))
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--port: cannot listen at {host}:{port} ({reason}). Choose another port.") from None
    with server:
        say(f"http://{host}:{server.server_address[1]}/ (Ctrl-C ends it)")
        server.serve_forever(poll_interval=0.2)
