"""data.order: megatron beside megatron-core 0.16.1 itself: its tables and its samples, in tests/fixtures/orders."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from gptworks.data import foreign_order

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"
MADE = json.loads((FOLDER / "megatron_orders.json").read_text())
COMPARED = runpy.run_path(str(FOLDER / "check.py"))
SINGLE = [case for case in MADE["cases"] if len(case["stores"]) == 1]
SEVERAL = [case for case in MADE["cases"] if len(case["stores"]) > 1]


@pytest.mark.parametrize("name", MADE["stores"])
def test_the_tables_and_samples_of_one_store(name: str, tmp_path: Path) -> None:
    cases = [case for case in SINGLE if case["stores"] == [name]]
    apart = [one for case in cases for one in COMPARED["check"](case, MADE["stores"], tmp_path)]
    assert set(apart) == {True, False}  # both rules for the last epoch came up
    assert len({case["seed"] for case in cases}) > 2


@pytest.mark.parametrize("case", SEVERAL, ids=lambda case: f"{'+'.join(case['stores'])}-{case['weights']}")
def test_the_tables_and_samples_of_several_stores(case: dict[str, Any], tmp_path: Path) -> None:
    COMPARED["check"](case, MADE["stores"], tmp_path)


@pytest.mark.parametrize("mixture", MADE["mixtures"], ids=lambda one: str(one.get("shares") or one["sizes"]))
def test_mixtures(mixture: dict[str, Any]) -> None:
    if "shares" in mixture:
        found = foreign_order.weighted_blend(mixture["shares"], mixture["size"])
    else:
        found = foreign_order.exhaustive_blend(mixture["sizes"])
    assert [COMPARED["digest"](index) for index in found] == mixture["answer"]
