"""docs/reference/api.md is what the docstrings say today, and their examples run."""

import doctest
import importlib.util
import re
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import gptworks

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_api_reference", REFERENCE / "make_api_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_api_reference_is_fresh(maker: ModuleType) -> None:
    written = (REFERENCE / "api.md").read_text(encoding="utf-8")
    assert written == maker.text(), "stale: run `python docs/reference/make_api_reference.py`"


def test_every_public_name_has_a_section_with_an_example(maker: ModuleType) -> None:
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", maker.text(), re.MULTILINE | re.DOTALL))
    assert set(sections) == set(gptworks.__all__) - {"__version__"}
    for name, section in sections.items():
        assert ">>>" in section, f"{name}: no example"
        assert "doctest" not in section
        assert section.count("```") % 2 == 0


def test_public_methods_of_the_trainer_and_the_pipeline_have_examples(maker: ModuleType) -> None:
    from gptworks.api.pipeline import Pipeline

    for kind in (gptworks.Trainer, Pipeline):
        for name, method in vars(kind).items():
            if callable(method) and (name == "__call__" or not name.startswith("_")):
                assert ">>>" in (method.__doc__ or ""), f"{kind.__name__}.{name}"


@pytest.mark.parametrize(
    ("module", "least"),
    [
        ("gptworks.errors", 2),
        ("gptworks.config.load", 2),
        ("gptworks.tokenizer.tokenizer", 5),
        ("gptworks.model.gpt", 0),
        ("gptworks.checkpoint.pretrained", 0),
        ("gptworks.train.loop", 0),
        ("gptworks.api.evaluate", 0),
        ("gptworks.api.pipeline", 0),
        ("gptworks.api.trainer", 0),
    ],
)
def test_examples_run(module: str, least: int) -> None:
    """Those that need weights or data are skipped by themselves; `least` counts the lines that do run."""
    result = doctest.testmod(import_module(module), extraglobs={"gptworks": gptworks, "torch": torch})
    assert result.failed == 0
    assert result.attempted >= least


def test_long_calls_are_written_one_parameter_a_line(maker: ModuleType) -> None:
    call = "f(a: dict[str, int], *, b: str = ', ')"
    assert maker._wrapped(call) == call
    assert maker._wrapped("f(a: dict[str, int], *, b: int = 1) -> list[int]", width=10) == (
        "f(\n    a: dict[str, int],\n    *,\n    b: int = 1,\n) -> list[int]"
    )
