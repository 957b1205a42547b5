"""A progress bar in a notebook: one output of the cell, which is shown again with each step.

Only IPython is needed, which every notebook has; no widgets.
"""

import html
import sys
import time
from typing import Any

_SECONDS = 0.2  # between two pictures; a notebook keeps up with no more


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; not a terminal with IPython."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    return shell is not None and hasattr(shell, "kernel")


class NotebookBar:
    """Steps done of all, the time spent and left, and a few words."""

    def __init__(self, last_step: int, first_step: int = 0) -> None:
        from IPython.display import display

        self.last_step, self.first_step, self.step = last_step, first_step, first_step
        self.started, self.shown_at, self.words = time.monotonic(), 0.0, ""
        self.handle = display(self._picture(), raw=True, display_id=True)

    def update(self, step: int | None = None, words: str | None = None) -> None:
        """Shown at most a few times a second; the last step always is."""
        self.step = self.step if step is None else step
        self.words = self.words if words is None else words
        now = time.monotonic()
        if now - self.shown_at >= _SECONDS or self.step == self.last_step:
            self._show(now)

    def close(self) -> None:
        """As it is in the end."""
        self._show(time.monotonic())

    def _show(self, now: float) -> None:
        self.shown_at = now
        if self.handle is not None:
            self.handle.update(self._picture(), raw=True)

    def _picture(self) -> dict[str, Any]:
        spent = time.monotonic() - self.started
        done = self.step - self.first_step
        left = f", {_clock(spent * (self.last_step - self.step) / done)} left" if done else ""
        text = f"step {self.step}/{self.last_step}  {_clock(spent)} elapsed{left}  {self.words}".rstrip()
        bar = f'<progress max="{self.last_step}" value="{self.step}" style="width: 20em"></progress>'
        return {"text/plain": text, "text/html": f"{bar} <code>{html.escape(text)}</code>"}


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
