"""What a terminal keeps of a training run, and what stands below it."""

import io
import re

import pytest
from rich.console import Console

from gptworks.train import console
from gptworks.train.console import LogLine, TrainConsole
from gptworks.train.speed import Speed


def line(step: int, loss: float) -> LogLine:
    return LogLine(step, 40, 0, 0, loss, 1e-3, 1e-3, 1.0, Speed(1234.0, 2.0, 0.0, 0.5), None)


def shown(monkeypatch: pytest.MonkeyPatch, *, is_terminal: bool) -> str:
    out = io.StringIO()

    def made(**how: object) -> Console:
        kept = {key: value for key, value in how.items() if key not in {"file"}}
        return Console(file=out, force_terminal=is_terminal, width=110, **kept)  # type: ignore[arg-type]

    monkeypatch.setattr(console, "Console", made)
    seen = TrainConsole(40, "gptworks")
    seen.doing("compiling")
    if seen.progress:
        seen.progress.refresh()
    for step in range(1, 41):
        seen.step(step)
        if step % 10 == 0:
            seen.log(line(step, 5.0 - step / 10))
    seen.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_a_terminal_keeps_a_line_of_each_logging_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [text.strip() for text in re.split(r"[\r\n]+", shown(monkeypatch, is_terminal=True))]
    kept = [text for text in lines if "loss" in text]
    assert kept == [console.gptworks_line(line(step, 5.0 - step / 10)) for step in (10, 20, 30, 40)]
    bars = [text for text in lines if text.startswith("step") and "loss" not in text]
    assert "compiling" in bars[0] + bars[1] and "compiling" not in bars[-1]
    assert re.fullmatch(r"step 40/40 \S+ +elapsed \d:\d\d:\d\d left \d:\d\d:\d\d", bars[-1])


def test_elsewhere_there_are_lines_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, is_terminal=False).splitlines()
    assert lines == [console.gptworks_line(line(step, 5.0 - step / 10)) for step in (10, 20, 30, 40)]
