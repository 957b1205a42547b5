"""Writes conformance.md. Run: python docs/make_conformance.py [--new]

The rows are tests/conformance/rows.json: what the documents of five GPT systems promise. The tests of a row carry its
id in their names. All of them are run, and their outcomes are kept in tests/conformance/outcomes.json; with --new only
those that have not passed yet. A test fails when the page, or the list of tests, is stale.
"""

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "conformance.md"
ROWS = ROOT / "tests" / "conformance" / "rows.json"
OUTCOMES = ROOT / "tests" / "conformance" / "outcomes.json"
_ID = re.compile(r"(?<![a-z0-9])(s\d|w|x)_?(\d\d)(?!\d)")
_WORST_FIRST = ("failed", "passed", "skipped")
_NONE = "-"
COLUMNS = ("ours", "theirs", "as pasted")

INTRODUCTION = """\
# Conformance

Made from the tests by `docs/make_conformance.py`; do not edit.

Five documents of other GPT systems are the requirement, and these are their promises. A promise has two halves: what
gptworks does in its own words, and the same by the other system's command or YAML as it stands (`gptworks run`,
`gptworks translate`). A half is done when its tests, which carry the row's id in their names, were run and passed.
They run on a CPU: the real code on small models. Those marked *live* run the other system itself
(`make test-interop`); they prove more, and count for nothing here.

A third column is about the documents themselves: their blocks of shell and lines of Python as they stand, with their
comments and `cd` lines, pasted into `gptworks run`. It has the rows that such a block is about; where a block leaves
something to its reader, such as a path or the number of devices, a value is put in.

A dash stands where a promise has one half: lines of Python and converters have no foreign command (their code is
rewritten in our words, their checkpoints are converted by `gptworks convert`), and a document as a whole exists in its
own words only.
"""


@cache
def rows() -> list[dict[str, str]]:
    found: list[dict[str, str]] = json.loads(ROWS.read_text(encoding="utf-8"))
    return found


def ids_in(name: str) -> list[str]:
    """test_s3_01_s1_09_... -> S3-01, S1-09; test_w02_... -> W-02"""
    known = {row["id"] for row in rows()}
    found = [f"{kind.upper()}-{number}" for kind, number in _ID.findall(name.lower())]
    return [each for each in dict.fromkeys(found) if each in known]  # x86 is no row


def collect(tests: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Test (file::function) -> the rows it is about."""
    found = {}
    for file in sorted(tests.rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and ids_in(node.name):
                found[f"{file.relative_to(tests.parent).as_posix()}::{node.name}"] = ids_in(node.name)
    return found


def is_live(test: str) -> bool:
    """Needs another system; not part of an ordinary run."""
    return test.startswith("tests/interop/")


def column(test: str) -> str:
    """The column that a test is shown in."""
    if test.startswith("tests/conformance/test_pasted_"):
        return "as pasted"
    return "theirs" if test.startswith("tests/conformance/test_run_") else "ours"


def text(every: Iterable[Mapping[str, str]], tests: Mapping[str, list[str]], outcomes: Mapping[str, str]) -> str:
    lines, document = [INTRODUCTION], ""
    every = list(every)
    shown = {row["id"]: [_cell(row, tests, outcomes, name) for name in COLUMNS] for row in every}
    ours, theirs, pasted = ([cells[at] for cells in shown.values() if cells[at] != _NONE] for at in range(len(COLUMNS)))
    lines.append(
        f"Of {len(every)} rows, {len(ours)} have a half in our words, of which {_passed(ours)} pass, and {len(theirs)} "
        f"in theirs, of which {_passed(theirs)} pass; {len(pasted)} have a block that is pasted, of which "
        f"{_passed(pasted)} pass.\n"
    )
    for row in every:
        if row["document"] != document:
            document = row["document"]
            lines += [
                f"## {document}",
                "",
                f"| id | promise | what must hold | {' | '.join(COLUMNS)} |",
                "|---|---|---|---|---|---|",
            ]
        cells = [row["id"], row["promise"], row["holds"], *shown[row["id"]]]
        lines.append("| " + " | ".join(re.sub(r"(?<!\\)\|", r"\\|", cell) for cell in cells) + " |")
        if row is every[-1] or every[every.index(row) + 1]["document"] != document:
            lines.append("")
    return "\n".join(lines)


def _passed(cells: list[str]) -> int:
    return sum(cell.startswith("passed") for cell in cells)


def _cell(row: Mapping[str, str], tests: Mapping[str, list[str]], outcomes: Mapping[str, str], name: str) -> str:
    mine = [test for test, about in tests.items() if row["id"] in about and column(test) == name]
    is_about = bool(row.get("pasted")) if name == "as pasted" else row.get("only", name) == name
    if not mine and not is_about:
        return _NONE
    counted = [test for test in mine if not is_live(test)]
    states = {outcomes.get(test, "not run") for test in counted}
    if not counted:
        state = "no test"
    elif states == {"passed"}:
        state = "passed"
    else:
        state = ", ".join(
            f"{sum(outcomes.get(t, 'not run') == each for t in counted)} {each}" for each in sorted(states)
        )
    return "<br>".join([state, *map(_link, counted), *(f"{_link(test)} (live)" for test in mine if is_live(test))])


def _link(test: str) -> str:
    file, _, name = test.partition("::")
    return f"[{name.removeprefix('test_')}](../{file})"


class Recorder:
    """What became of each test function; of one with parameters the worst."""

    def __init__(self, keep: Callable[[dict[str, str]], None] = lambda outcomes: None) -> None:
        """`keep`: told after each function what there is so far; all of them can take a quarter of an hour."""
        self.seen: dict[str, set[str]] = {}
        self.keep = keep
        self.last = ""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        function = nodeid.partition("[")[0]
        if function != self.last:  # the one before has had all its parameters
            self.last = function
            self.keep(self.outcomes())

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.seen.setdefault(report.nodeid.partition("[")[0], set()).add(report.outcome)

    def outcomes(self) -> dict[str, str]:
        return {test: next(each for each in _WORST_FIRST if each in seen) for test, seen in self.seen.items()}


def run(tests: list[str], before: Mapping[str, str]) -> dict[str, str]:
    """The outcomes of these and of those from before; kept as they come."""
    import pytest

    recorder = Recorder(lambda outcomes: write({**before, **outcomes}))
    if tests:
        options = ["-q", "-m", "not interop", f"--rootdir={ROOT}"]  # also those that `make test` leaves to the rest
        pytest.main([*options, *(str(ROOT / test) for test in tests)], plugins=[recorder])
    return {**before, **recorder.outcomes()}


def write(outcomes: Mapping[str, str]) -> None:
    OUTCOMES.write_text(json.dumps(dict(sorted(outcomes.items())), indent=1) + "\n", encoding="utf-8")


def kept() -> dict[str, str]:
    found: dict[str, str] = json.loads(OUTCOMES.read_text(encoding="utf-8")) if OUTCOMES.is_file() else {}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", action="store_true", help="run only tests that have no outcome yet, or a bad one")
    args = parser.parse_args()
    tests = collect()
    to_count = [test for test in tests if not is_live(test)]
    before = kept() if args.new else {}
    before = {test: outcome for test, outcome in before.items() if test in to_count}
    outcomes = run([test for test in to_count if before.get(test) != "passed"], before)
    write(outcomes)
    TARGET.write_text(text(rows(), tests, outcomes), encoding="utf-8")
    bad = {test: outcomes.get(test, "not run") for test in to_count if outcomes.get(test) != "passed"}
    print(f"{TARGET}: {len(rows())} rows, {len(to_count)} tests")
    for test, outcome in bad.items():
        print(f"  {outcome}: {test}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
