"""The training step on a GPU, without one: every layout runs, on tensors without memory, and waits once for the device.

A process of its own has CUDA devices that do nothing (fake_device.cpp). What is seen there: that no operator mixes host
and device, and what makes the host wait. What is not: kernels, numbers, streams, NCCL.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # a minute of compiling and of layouts

HERE = Path(__file__).parent
LAYOUTS = {"dp2", "zero 0", "zero 1", "zero 2", "zero 3", "hsdp", "offload", "tp2", "tp2 sequence", "pp2 fsdp2 tp2"}
KINDS = {"fp32", "bf16", "fp16", "dropout", "segments", "recompute full", "recompute full_attn", "recompute core_attn"}
SCHEDULES = {"pp2 gpipe", "pp2 1f1b", "pp2 interleaved", "pp2 zero bubble"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    compiler = shutil.which("g++")
    if sys.platform != "linux" or compiler is None:
        pytest.skip("devices that do nothing are compiled by g++ on Linux, which is not here")
    import torch

    if torch.version.cuda or torch.version.hip:
        pytest.skip("this build of torch has devices of its own")
    library = tmp_path_factory.mktemp("fake_cuda") / "fake_device.so"
    include = Path(torch.__file__).parent / "include"
    kind = ["-O0", "-w", "-shared", "-fPIC", "-std=c++20", f"-I{include}"]
    subprocess.run([compiler, *kind, str(HERE / "fake_device.cpp"), "-o", str(library)], check=True)
    command = [sys.executable, "-W", "ignore", str(HERE / "fake_steps.py"), str(library)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=environment, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def problems(found: dict[str, Any]) -> list[str]:
    """What is wrong with a step or an evaluation: an error, a second read, a copy that the host waits for."""
    if "error" in found:
        return [found["error"]]
    return [
        *(f"a read too many in the {what}: {read}" for what, one in found.items() for read in one["reads"][1:]),
        *(f"in the {what}: {copy}" for what, one in found.items() for copy in one["copies"]),
    ]


def test_every_layout_runs_and_waits_once(seen: dict[str, Any]) -> None:
    cases = seen["cases"]
    assert {name.partition(",")[0] for name in cases} >= LAYOUTS | KINDS | SCHEDULES
    wrong = {name: problems(found) for name, found in cases.items() if problems(found)}
    assert not wrong, "\n".join(f"{name}: {line}" for name, lines in wrong.items() for line in lines)
    # That it is seen at all: each waits somewhere, and where is said.
    for name, found in cases.items():
        for what, file in (("step", "train/step.py"), ("evaluation", "evaluate/heldout.py")):
            if what in found and not name.startswith("offload"):
                (read,) = found[what]["reads"]
                assert read.startswith(f"tolist at gptworks/{file}:"), name


@pytest.mark.parametrize(
    ("mutant", "problem"),
    [
        ("mask on the host", "FakeTensorDeviceMismatchError"),
        ("a scalar is read", "a read too many in the step: "),
        ("a copy blocks", "in the step: copy cpu -> cuda of [2, 64] blocks at gptworks/data/loader.py:"),
        (
            "memory is not pinned",
            "in the step: copy cpu -> cuda of [2, 64] is of memory that is not pinned at gptworks/",
        ),
        ("a table is copied", "in the step: copy cpu -> cuda of [16] blocks at gptworks/train/step.py:"),
    ],
)
def test_a_mistake_is_noticed(seen: dict[str, Any], mutant: str, problem: str) -> None:
    assert any(problem in line for line in problems(seen["mutants"][mutant])), seen["mutants"][mutant]


def test_threads_use_the_device_of_their_process(seen: dict[str, Any]) -> None:
    """Not the first, where each would open a context."""
    assert seen["threads"] == [["checkpoint", 3], ["prefetch_0", 3]]


def test_where_sums_cannot_come_out_wide_factors_are_cast(seen: dict[str, Any]) -> None:
    """Three products; whether it can be done is tried once, before the first."""
    assert seen["products"]["usual"] == ["aten.mm.dtype"] * 4 + ["refused 0"]
    for build in ("old torch", "rocm"):
        assert seen["products"][build] == ["aten.addmm_.default float32"] * 3 + ["refused 1"], build
