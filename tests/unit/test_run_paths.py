"""The names in a run folder are written once, and the reference page has each of them."""

import ast
from pathlib import Path

import pytest

import gptworks
from gptworks import run_paths
from gptworks.checkpoint.folder import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(gptworks.__file__).parent
NAMES = {value for name, value in vars(run_paths).items() if name.isupper()}
# Common words, such as "best" and "logs", mean other things elsewhere.
FILES = {name for name in NAMES if "." in name}
ELSEWHERE = {"interop/reverse.py"}  # a config.yaml of its own, in a folder for a moment


def spelt(text: str) -> set[str]:
    """Those of the names that are written out in a program, alone or as the end of a path in a message."""
    constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
    return {name for value in constants if isinstance(value, str) for name in FILES if value == name}


def test_a_name_is_written_once() -> None:
    assert {"metrics.jsonl", "environment.json", "manifest.json", ".lock"} <= FILES
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        where = str(file.relative_to(SOURCE))
        if where != "run_paths.py" and where not in ELSEWHERE and (names := spelt(file.read_text(encoding="utf-8"))):
            found[where] = names
    assert found == {}


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ('path = folder / "metrics.jsonl"', {"metrics.jsonl"}),
        ("x = f\"{run / 'loss.svg'} is drawn\"", {"loss.svg"}),
        ('help = "one line per step in metrics.jsonl"', set()),
        ("# metrics.jsonl", set()),
    ],
)
def test_a_name_that_is_written_again_is_seen(text: str, seen: set[str]) -> None:
    assert spelt(text) == seen


def test_the_reference_page_has_every_name() -> None:
    page = (ROOT / "docs" / "reference" / "run-folder.md").read_text(encoding="utf-8")
    # The tokenizer has a folder of its own only where there is no portable one.
    assert {name for name in NAMES - {run_paths.TOKENIZER} if f"`{name}" not in page} == set()


def test_a_checkpoint_is_found_by_the_name_that_it_is_given(tmp_path: Path) -> None:
    for step in (7, 123456789):
        (tmp_path / run_paths.CHECKPOINTS / run_paths.step_name(step)).mkdir(parents=True)
    assert set(CheckpointFolder(tmp_path).named_as_steps()) == {7, 123456789}
