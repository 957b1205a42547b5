"""The suite itself: what `make test` keeps, and what a test that hangs or fails tells a person."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import longest_first
import pytest
from _pytest.mark.expression import Expression

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent

# What is where


@pytest.fixture
def everything(request: pytest.FixtureRequest) -> dict[str, set[str]]:
    """Every test there is, and the names of its marks."""
    found = request.config.stash[longest_first.EVERYTHING]
    if {path.name for path in TESTS.iterdir() if list(path.glob("test_*.py"))} - {test.split("/")[1] for test in found}:
        pytest.skip("only a part of the tests was collected; run them all")
    return found


def chosen(everything: dict[str, set[str]], expression: str) -> set[str]:
    wanted = Expression.compile(expression)
    return {test for test, marks in everything.items() if wanted.evaluate(lambda name, marks=marks, **_: name in marks)}


@pytest.fixture
def quick(everything: dict[str, set[str]]) -> set[str]:
    """What `make test` runs."""
    options = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["pytest"]["ini_options"]
    words = shlex.split(options["addopts"])
    return chosen(everything, words[words.index("-m") + 1])


def test_make_test_all_runs_everything(everything: dict[str, set[str]], quick: set[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    target = re.search(r"^test-rest:.*\n\t\$\(BIN\)/\$\(PYTEST\) -m \"(.*?)\"", makefile, re.MULTILINE)
    assert target
    rest = chosen(everything, target[1])
    of_others = chosen(everything, "interop or real_models")  # they have targets of their own
    assert quick | rest | of_others == everything.keys()
    assert not (quick | rest) & of_others
    assert quick & rest == chosen(everything, "hypothesis and not slow and not interop"), "run twice for nothing"


def test_make_test_keeps_something_of_every_package(quick: set[str]) -> None:
    files = {test.partition("::")[0] for test in quick}
    texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    packages = {path.parent.name for path in (ROOT / "src/gptworks").glob("*/__init__.py")}
    missing = {name for name in packages if not any(re.search(rf"gptworks[.]{name}\b", text) for text in texts)}
    assert packages and not missing


def test_make_test_keeps_something_of_every_dimension_and_schedule(quick: set[str]) -> None:
    start = "tests/distributed/test_equals_one_process.py::test_a_layout_learns_what_one_process_learns"
    assert {f"{start}[{layout}]" for layout in ("dp2", "fsdp2", "tp2", "pp2")} <= quick


def test_make_test_keeps_something_of_every_document(quick: set[str]) -> None:
    spec = importlib.util.spec_from_file_location("make_conformance", ROOT / "docs" / "make_conformance.py")
    assert spec is not None and spec.loader is not None
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    kept = {row for test in quick for row in maker.ids_in(test.partition("::")[2])}
    document_of = {row["id"]: row["document"] for row in maker.rows()}
    assert {document_of[row] for row in kept} == set(document_of.values())


def test_make_test_keeps_a_kill(quick: set[str]) -> None:
    assert any(test.startswith("tests/cli/test_resume.py::test_a_kill") for test in quick)
    assert any("::test_a_killed_rank" in test for test in quick)


# A test that hangs, and one that fails

# The processes start when the file is read, which has no limit, and the test begins when all of them are waiting.
HANGS = """
import faulthandler, multiprocessing, subprocess, sys, threading, time
from pathlib import Path
from time_limit import stacks_file

def waits_in_a_fork():
    faulthandler.enable(stacks_file().open("w"))
    Path("fork").touch()
    time.sleep(1000)

GRANDCHILD = '''
import pathlib, time
def waits_as_a_grandchild():
    pathlib.Path("grandchild").touch()
    time.sleep(1000)
waits_as_a_grandchild()
'''
CHILD = f'''
import subprocess, sys
def waits_as_a_child():
    with open("grandchild.log", "w") as log:
        subprocess.run([sys.executable, "-c", {GRANDCHILD!r}], stderr=log)
waits_as_a_child()
'''

def waits_in_a_thread():
    time.sleep(1000)

multiprocessing.get_context("fork").Process(target=waits_in_a_fork).start()
child = subprocess.Popen([sys.executable, "-c", CHILD], stderr=subprocess.PIPE)
stacks_file(child.pid).touch()  # left by one that had the same number
while not (Path("fork").exists() and Path("grandchild").exists()):
    time.sleep(0.01)

def test_waits():
    threading.Thread(target=waits_in_a_thread, daemon=True).start()
    try:
        child.communicate()
        time.sleep(1000)
    except Exception:
        pass

def test_next():
    pass
"""

FAILS = """
import subprocess, sys
from hypothesis import given, strategies as st

def test_fails(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-1.log").write_text("".join(f"line {n} of it\\n" for n in range(100)))
    subprocess.run([sys.executable, "-c", "print('forty-two')"], cwd=tmp_path, capture_output=True)
    assert False

@given(st.integers(0, 3))
def test_draws(number):
    assert number < 2
"""


def run_pytest(folder: Path, text: str, *options: str) -> str:
    """What pytest prints of a file with that text."""
    shutil.copy(TESTS / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_it.py", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_test_that_hangs_is_ended_with_the_stacks_of_its_processes(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, HANGS, "-o", "time_limit=1")
    assert "test_it.py::test_waits has not ended after 1 s" in said
    for place in ("test_waits", "waits_in_a_thread", "waits_in_a_fork", "waits_as_a_child", "waits_as_a_grandchild"):
        assert f" in {place}" in said, f"{place}\n{said}"
    assert "1 failed, 1 passed" in said, "the next test goes on as if nothing had happened"


def test_a_test_that_fails_shows_its_commands_its_logs_and_how_to_repeat_it(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, FAILS)
    assert "print('forty-two')" in said.partition("commands that it started")[2]
    end = said.partition("end of ")[2]
    assert "rank-1.log" in end and "line 99 of it" in end and "line 70 of it" in end and "line 69 of it" not in end
    assert 'python -m pytest -m "" "test_it.py::test_fails"' in said
    assert "number=2" in said and "the examples are a function of the test" in said
