"""docs/conformance.md: every row, the tests that carry its id, and what came of them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
STALE = "stale: run `python docs/make_conformance.py --new`"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_conformance", DOCS / "make_conformance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_fresh(maker: ModuleType) -> None:
    written = (DOCS / "conformance.md").read_text(encoding="utf-8")
    assert written == maker.text(maker.rows(), maker.collect(), maker.kept()), STALE


def test_every_test_of_a_row_was_run_and_no_other_is_named(maker: ModuleType) -> None:
    counted = {test for test in maker.collect() if not maker.is_live(test)}
    assert set(maker.kept()) == counted, STALE
    assert "failed" not in maker.kept().values()  # what was skipped is shown as skipped


def test_rows_are_whole_and_each_is_there_once(maker: ModuleType) -> None:
    ids = [row["id"] for row in maker.rows()]
    assert len(ids) == len(set(ids)) == 70
    assert all(row[key] for row in maker.rows() for key in ("id", "document", "promise", "holds"))
    assert {row.get("only") for row in maker.rows()} == {None, "ours", "theirs"}


@pytest.mark.parametrize(
    ("name", "ids"),
    [
        ("test_s3_01_s1_09_a_layout", ["S3-01", "S1-09"]),
        ("test_w02_every_split", ["W-02"]),
        ("test_S2_01_doctor", ["S2-01"]),
        ("test_x_01_story_of_x_01", ["X-01"]),
        ("test_a_copy_that_knows_200_passages", []),
        ("test_on_x86_64", []),
        ("test_s9_99_no_such_row", []),
        ("test_s0_011", []),
    ],
)
def test_ids_in_names(maker: ModuleType, name: str, ids: list[str]) -> None:
    assert maker.ids_in(name) == ids


ROW = [{"id": "S0-01", "document": "A", "promise": "p `a | b`", "holds": "h", "pasted": "yes"}]
OURS = "tests/unit/test_a.py::test_s0_01_x"
THEIRS = "tests/conformance/test_run_a.py::test_s0_01_y"
PASTED = "tests/conformance/test_pasted_a.py::test_s0_01_p"
LIVE = "tests/interop/test_b.py::test_s0_01_z"


@pytest.mark.parametrize(
    ("outcomes", "ours", "theirs", "pasted"),
    [
        (dict.fromkeys((OURS, THEIRS, PASTED), "passed"), *(f"passed<br>[s0_01_{x}]" for x in "xyp")),
        ({OURS: "passed"}, "passed<br>[s0_01_x]", "1 not run<br>[s0_01_y]", "1 not run<br>[s0_01_p]"),
        ({OURS: "skipped", THEIRS: "failed", PASTED: "failed"}, "1 skipped<br>", "1 failed<br>", "1 failed<br>"),
        ({LIVE: "passed"}, "1 not run<br>[s0_01_x](../tests/unit/test_a.py)<br>[s0_01_z]", "1 not run", "1 not run"),
    ],
)
def test_nothing_is_shown_as_done_that_was_not_run(
    maker: ModuleType, outcomes: dict[str, str], ours: str, theirs: str, pasted: str
) -> None:
    page = maker.text(ROW, {test: ["S0-01"] for test in (OURS, THEIRS, PASTED, LIVE)}, outcomes)
    line = next(line for line in page.splitlines() if line.startswith("| S0-01"))
    cells = line.replace("\\|", "/").split(" | ")
    assert cells[1] == "p `a / b`" and cells[3].startswith(ours) and cells[4].startswith(theirs)
    assert cells[5].startswith(pasted)
    done = [list(outcomes.items()).count((test, "passed")) for test in (OURS, THEIRS, PASTED)]
    told = (
        f"Of 1 rows, 1 have a half in our words, of which {done[0]} pass, and 1 in theirs, of which {done[1]} pass; "
        f"1 have a block that is pasted, of which {done[2]} pass."
    )
    assert told in page


def test_a_row_without_tests_says_so(maker: ModuleType) -> None:
    assert "| no test | no test | no test |" in maker.text(ROW, {}, {})
    without = {key: value for key, value in ROW[0].items() if key != "pasted"}
    assert "| no test | no test | - |" in maker.text([without], {}, {})


@pytest.mark.parametrize(("only", "cells"), [("ours", "| no test | - |"), ("theirs", "| - | no test |")])
def test_a_row_with_one_half_has_a_dash_for_the_other(maker: ModuleType, only: str, cells: str) -> None:
    row = [{**ROW[0], "only": only}]
    page = maker.text(row, {}, {})
    assert cells in page and f"{int(only == 'ours')} have a half in our words" in page
    # A test of the half that it has not is shown all the same.
    assert "| - |" not in maker.text(row, {OURS: ["S0-01"], THEIRS: ["S0-01"]}, {})


def test_the_worst_outcome_of_a_test_counts(maker: ModuleType) -> None:
    class Report:
        def __init__(self, outcome: str, when: str = "call") -> None:
            self.nodeid, self.outcome, self.when = "tests/a.py::test_x[1]", outcome, when

    told: list[dict[str, str]] = []
    recorder = maker.Recorder(told.append)
    recorder.pytest_runtest_logstart("tests/a.py::test_x[1]")
    for report in (Report("passed", "setup"), Report("passed"), Report("skipped", "setup")):
        recorder.pytest_runtest_logreport(report)
    assert recorder.outcomes() == {"tests/a.py::test_x": "passed"}
    recorder.pytest_runtest_logreport(Report("failed", "teardown"))
    assert recorder.outcomes() == {"tests/a.py::test_x": "failed"}
    recorder.pytest_runtest_logstart("tests/a.py::test_x[2]")
    recorder.pytest_runtest_logstart("tests/a.py::test_y")
    assert told == [{}, {"tests/a.py::test_x": "failed"}]  # not in the middle of a function's parameters
