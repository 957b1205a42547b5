"""The suite itself: a test that hangs, and one that fails, tell what a person needs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

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


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_test_that_hangs_is_ended_with_the_stacks_of_its_processes(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, HANGS, "-o", "time_limit=1")
    assert "test_it.py::test_waits has not ended after 1 s" in said
    for place in ("test_waits", "waits_in_a_thread", "waits_in_a_fork", "waits_as_a_child", "waits_as_a_grandchild"):
        assert f" in {place}" in said, place
    assert "1 failed, 1 passed" in said, "the next test goes on as if nothing had happened"


def test_a_test_that_fails_shows_its_commands_its_logs_and_how_to_repeat_it(tmp_path: Path) -> None:
    said = run_pytest(tmp_path, FAILS)
    assert "print('forty-two')" in said.partition("commands that it started")[2]
    end = said.partition("end of ")[2]
    assert "rank-1.log" in end and "line 99 of it" in end and "line 70 of it" in end and "line 69 of it" not in end
    assert 'python -m pytest -m "" "test_it.py::test_fails"' in said
    assert "number=2" in said and "the examples are a function of the test" in said
