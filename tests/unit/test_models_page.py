"""docs/howto/models.md: every cell of its table is a yes or no, and every test it names is there, in both languages."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "howto"
YES_NO = {"models.md": ("yes", "no"), "models.zh.md": ("是", "否", "尚无")}


def table(page: str) -> list[list[str]]:
    text = (FOLDER / page).read_text(encoding="utf-8")
    (found,) = re.findall(r"^\| \| Llama.*\n\|---.*\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|\n ").split(" | ")] for line in found.splitlines()]


@cache
def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", YES_NO)
def test_every_cell_is_a_test_or_a_no(page: str) -> None:
    rows = table(page)
    assert len(rows) > 20
    for what, *cells, tests in rows:
        assert len(cells) == 4, what
        links = re.findall(r"\[(test_\w+)\]\(([^)]+)\)", tests)
        for name, path in links:
            file = (FOLDER / path).resolve()
            assert file.is_file() and name in functions_in(file), (what, name, path)
        for cell in cells:
            assert cell.startswith(YES_NO[page]) or cell in ("SmolLM2-135M", "stories15M"), (what, cell)
            assert links or "benchmarks/" in tests, what


def test_both_languages_name_the_same_tests() -> None:
    english, chinese = ([re.findall(r"\[(test_\w+)\]\(([^)]+)\)", row[-1]) for row in table(page)] for page in YES_NO)
    assert english == chinese
