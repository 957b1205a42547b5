"""What the launcher imports before it forks the ranks asks nothing of CUDA and starts no thread: none survives that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gptworks.cli import train
from gptworks.verify import layout

WATCHING = """
import importlib, os, sys, threading, traceback
from types import BuiltinFunctionType, FunctionType
import torch

calls = []


def watched(name, function):
    def call(*args, **kwargs):
        at = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack()[:-1] if "importlib" not in f.filename]
        calls.append(f"{name} at {at[-1]}")
        return function(*args, **kwargs)
    return call


asking = [(torch.cuda, ""), (torch.accelerator, ""), (torch._C, "cuda"), (torch._C, "accelerator")]
for module, word in asking:
    for name, function in list(vars(module).items()):
        if isinstance(function, (FunctionType, BuiltinFunctionType)) and word in name:
            setattr(module, name, watched(f"{module.__name__}.{name}", function))
for name in sys.argv[1:]:
    importlib.import_module(name)
print(*calls, sep="\\n")
print(len(os.listdir("/proc/self/task")), "threads", [t.name for t in threading.enumerate()])
"""


def imported(*modules: str, path: Path | None = None) -> list[str]:
    """Calls to CUDA, then a line about threads. A BLAS has threads of its own, and is prepared to be forked."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if path:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", WATCHING, *modules]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=True)
    return [line for line in done.stdout.splitlines() if line]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")


@pytest.mark.slow
def test_imports_before_a_fork_leave_cuda_and_threads_alone() -> None:
    assert imported(*train.PRELOAD, *layout.PRELOAD) == ["1 threads ['MainThread']"]


def test_a_module_that_does_not_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "careless.py").write_text(
        "import threading, time, torch\n"
        "torch.cuda.is_available()\n"
        "threading.Thread(target=time.sleep, args=(1,), name='worker', daemon=True).start()\n"
    )
    *calls, threads = imported("careless", path=tmp_path)
    assert any(call.startswith("torch.cuda.is_available at ") and "careless.py:2" in call for call in calls)
    assert threads == "2 threads ['MainThread', 'worker']"
