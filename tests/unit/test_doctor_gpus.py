"""doctor --gpus, with the processes that it starts: on the CPU, and on devices of CUDA that are patched in."""

import os
import sys
from pathlib import Path

import pytest
import torch

from gptworks.doctor import gpus

# Two devices, as far as one can ask without using them. torch's own checks of what it is given are left as they are.
FAKE_CUDA = """
import types, torch
cuda, accelerator = torch.cuda, torch.accelerator
cuda.is_available, cuda.device_count, cuda.set_device = (lambda: True), (lambda: 2), (lambda device: None)
cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid=f"GPU-{device.index}")
accelerator.current_accelerator, accelerator.device_count = (lambda *_: torch.device("cuda")), (lambda: 2)
"""


def states(found: list[gpus.Finding]) -> list[tuple[str, str]]:
    return [(each.what, each.state) for each in found]


@pytest.mark.slow
def test_two_ranks_sum_train_save_and_resume() -> None:
    found = gpus.findings("cpu", limit=120)
    assert states(found) == [(stage, "ok") for stage in gpus._STAGES], found
    assert [each.found for each in found] == [
        "2 on cpu (gloo)",
        "2 ranks added up 1,024 numbers",
        "step 1 with fsdp 2",
        "went on from the checkpoint to step 2",
    ]


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    (found,) = gpus.findings("cuda")
    assert (found.state, found.found) == ("problem", "no CUDA device answers")


def test_what_hangs_is_a_finding() -> None:
    (found,) = gpus.findings("cpu", limit=0.2)
    assert (found.what, found.state, found.found) == ("gpus: ranks meet", "problem", "no answer for 0.2 s")


@pytest.mark.slow
def test_ranks_that_cannot_meet_are_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without NCCL gets as far as that: what it is given has passed its checks, such as that of device_id."""
    (tmp_path / "sitecustomize.py").write_text(FAKE_CUDA)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    (found,) = gpus.findings("cuda", limit=120)
    assert (found.what, found.state) == ("gpus: ranks meet", "problem")
    assert "Distributed package doesn't have NCCL built in" in found.found
    assert "nvidia-smi" in found.fix
