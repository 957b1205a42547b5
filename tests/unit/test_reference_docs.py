"""docs/reference/config.md is what the schema says today."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from gptworks.config import load
from gptworks.config.load import known_keys
from gptworks.errors import ConfigError
from gptworks.launch import process_group

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_config_reference", REFERENCE / "make_config_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_config_reference_is_fresh(maker: ModuleType) -> None:
    written = (REFERENCE / "config.md").read_text(encoding="utf-8")
    assert written == maker.text(), "stale: run `python docs/reference/make_config_reference.py`"


def test_every_key_has_a_row_with_a_meaning(maker: ModuleType) -> None:
    rows = [line.split(" | ") for line in maker.text().splitlines() if line.startswith("| `") and "." in line[:30]]
    described = {cells[0].strip("| `"): cells[-1].strip(" |") for cells in rows}
    assert set(known_keys()) <= set(described)
    assert [key for key in known_keys() if not described[key]] == []


@pytest.mark.parametrize(
    ("annotation", "words"),
    [
        (int, "whole number"),
        (Annotated[float, Field(ge=0.0, lt=1.0)], "number >= 0 and < 1"),
        (bool, "true or false"),
        (Literal["a", "b"], "`a`, `b`"),
        (Annotated[int, Field(ge=1)] | Literal["auto"], "whole number >= 1 or `auto`"),
        (tuple[Annotated[float, Field(gt=0.0)], ...], "list of number > 0"),
    ],
)
def test_types_in_words(maker: ModuleType, annotation: Any, words: str) -> None:
    section = type("Section", (BaseModel,), {"__annotations__": {"key": annotation}})
    assert maker.kind_of(section.model_fields["key"]) == words


def test_note_on_parallel_is_still_true() -> None:
    config = load(overrides=["parallel.dp=2"])
    with pytest.raises(ConfigError, match="dp=2"):
        process_group.start(config.parallel, config.run)
