"""The load test of benchmarks/serve_load.py in short."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_many_clients_of_which_a_third_misbehave(base_folder: Path) -> None:
    program = ROOT / "benchmarks" / "serve_load.py"
    done = subprocess.run(
        [sys.executable, program, "--model", base_folder, "--requests", "600", "--clients", "32", "--minutes", "5"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "lost or wrong: 0" in done.stdout and "'malformed'" in done.stdout
