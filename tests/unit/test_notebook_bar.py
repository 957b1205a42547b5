"""The bar of a notebook: with a stand-in for its display, and in a real kernel where one is installed."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gptworks.train import console, notebook_bar
from gptworks.train.console import LogLine, TrainConsole
from gptworks.train.speed import Speed


class Display:
    """What IPython.display.display gives back, and all that was shown with it."""

    def __init__(self) -> None:
        self.shown: list[dict[str, str]] = []

    def __call__(self, picture: dict[str, str], *, raw: bool, display_id: bool) -> "Display":
        assert raw and display_id
        self.shown.append(picture)
        return self

    def update(self, picture: dict[str, str], *, raw: bool) -> None:
        assert raw
        self.shown.append(picture)


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    found = Display()
    package, module = ModuleType("IPython"), ModuleType("IPython.display")
    package.get_ipython = lambda: type("Shell", (), {"kernel": 1})()  # type: ignore[attr-defined]
    module.display = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return found


def line(step: int) -> LogLine:
    speed = Speed(tokens_per_sec=1000.0, steps_per_sec=2.0, reader_seconds=0.0, mfu=None)
    return LogLine(step, 40, 0, 0, 3.21, 1e-3, 1e-3, 0.5, speed, None)


def test_a_notebook_has_one_output_that_moves(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_bar, "_SECONDS", 0.0)
    assert notebook_bar.is_notebook()
    shown = TrainConsole(40, "gptworks", first_step=10)
    shown.log(line(20))
    shown.step(39)
    shown.log(line(40))
    shown.close()
    texts = [picture["text/plain"] for picture in display.shown]
    assert texts[0].startswith("step 10/40") and texts[1].startswith("step 20/40")
    assert "loss 3.2100" in texts[1] and "left" in texts[1]
    assert texts[2].startswith("step 39/40") and texts[-1].startswith("step 40/40")
    assert '<progress max="40" value="20"' in display.shown[1]["text/html"]


def test_seldom_enough_for_a_notebook_and_the_end_is_shown(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook_bar, "_SECONDS", 1e9)
    bar = notebook_bar.NotebookBar(1000)
    for step in range(1, 1001):
        bar.update(step)
    assert [picture["text/plain"].split()[1] for picture in display.shown] == ["0/1000", "1000/1000"]


@pytest.mark.parametrize(("style", "quiet"), [("fleetx", False), ("gptworks", True)])
def test_no_bar_for_lines_of_others_and_other_ranks(display: Display, style: str, quiet: bool) -> None:
    TrainConsole(40, style, quiet=quiet).log(line(40))
    assert not display.shown


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not notebook_bar.is_notebook()
    terminal = ModuleType("IPython")
    terminal.get_ipython = object  # type: ignore[attr-defined]  # a shell without a kernel
    monkeypatch.setitem(sys.modules, "IPython", terminal)
    assert not notebook_bar.is_notebook()
    shown: Any = console.TrainConsole(40, "gptworks")
    shown.log(line(20))
    assert "step 20/40" in capsys.readouterr().out


CELL = """
import gptworks as gw
shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 50257, "max_positions": 16}
texts = ["On Monday Anna found a map."] * 30
trainer = gw.Trainer(model=shape, train_dataset=texts, out="run", train={"steps": 20}, batch={"global_size": 2},
                     run={"device": "cpu", "threads": 1})
trainer.train()
"""


def test_in_a_real_kernel(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [each["data"] for each in notebook.cells[0].outputs if each.output_type == "display_data"]
    (bar,) = [each for each in shown if "<progress" in each.get("text/html", "")]
    assert bar["text/plain"].startswith("step 20/20") and "loss " in bar["text/plain"]
