"""train.check_memory, and what is said when memory runs out all the same."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.plan import machine
from gptworks.train import loop, memory

Call = Callable[..., Any]

FEW = 600_000  # bytes: less than the small model needs, more than half of it


def no_room(monkeypatch: pytest.MonkeyPatch, left: float = FEW) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda processes=1: left)


def test_nothing_is_said_where_all_fits(recipe: Path, tmp_path: Path, call: Call) -> None:
    done = call("train", "-c", recipe, "train.steps=1", "--out", tmp_path / "run")
    assert done.err == "" and "memory" not in done.out


def test_by_default_it_warns_and_trains(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch)
    done = call("train", "-c", recipe, "train.steps=1", "--out", tmp_path / "run")
    assert done.err.startswith("warning: train.check_memory: this run would need about ")
    for word in ("parameters", "gradients", "optimizer", "The smallest changes that keep the global batch"):
        assert word in done.err
    assert "done: 1 step." in done.out


def test_refuse_ends_before_anything_is_written(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_room(monkeypatch)
    done = call("train", "-c", recipe, "train.check_memory=refuse", "--out", tmp_path / "run", expect=2)
    assert done.err.startswith("error: train.check_memory: this run would need about")
    assert not (tmp_path / "run").exists()
    no_room(monkeypatch, 1e12)
    call("train", "-c", recipe, "train.steps=1", "train.check_memory=refuse", "--out", tmp_path / "run")


def test_off_does_not_look(recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(processes: int = 1) -> float:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(machine, "memory_available", looked)
    assert call("train", "-c", recipe, "train.steps=1", "train.check_memory=off", "--out", tmp_path / "run").err == ""


def test_processes_of_a_machine_share_its_memory(recipe: Path, tmp_path: Path, run_cli: Callable) -> None:
    """Each of two ranks would fit into what `ulimit` leaves; what both need is compared with what both may have."""
    from gptworks.config import load
    from gptworks.config.derive import Layout
    from gptworks.launch.world import World
    from gptworks.train.setup import prepare

    config = load(recipe, overrides=["parallel.dp=2"])
    setup = prepare(config, World(torch.device("cpu"), Layout(dp=2)))
    one = memory.predict(config, setup)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "RANK": 0,
            "WORLD_SIZE": 2,
            "LOCAL_RANK": 0,
            "LOCAL_WORLD_SIZE": 2,
            "MASTER_PORT": 1,
        }.items():
            patch.setenv(name, str(value))
        patch.setenv("MASTER_ADDR", "localhost")
        two = memory.predict(config, setup)
    assert (one.budget.shared_by, two.budget.shared_by) == (1, 2)
    assert two.needed == 2 * one.needed
    assert "the 2 processes of this machine" in two.amounts()


# Running out of it


def cpu_allocator() -> RuntimeError:
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)"
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        cpu_allocator(),
        MemoryError(),
        OSError(12, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_is_told_with_what_was_predicted_and_what_helps(
    error: Exception, recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*args: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(loop, "backward", step)
    large = ["batch.global_size=64", "batch.micro_size=64"]
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *large, expect=2)
    assert done.err.startswith("error: out of memory (cpu): ")
    assert str(error)[:40] in done.err
    assert re.search(r"\nPredicted: [0-9.]+ MiB of tensors: parameters [0-9.]+ MiB, ", done.err)
    assert "The smallest changes that keep the global batch:" in done.err
    changes = done.err.partition("The smallest changes that keep the global batch:\n")[2].splitlines()
    assert len(changes) == 3
    assert "  batch.micro_size=32 batch.accumulation=2  (" in "\n".join(changes)
    assert "another model" not in done.err
    # Processes of this machine would share the memory that is too small already.
    assert "\n  on 2 machines: parallel.fsdp=2 " in done.err and " devices: " not in done.err


def test_other_errors_are_not_taken_for_it(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*args: Any, **more: Any) -> None:
        raise RuntimeError("expected scalar type Half but found Float")

    monkeypatch.setattr(loop, "backward", step)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", expect=1)
    assert "expected scalar type Half" in done.err and "out of memory" not in done.err


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_a_real_limit(recipe: Path, tmp_path: Path, run_cli: Call) -> None:
    """A process that may not have enough: torch's own allocator says no, in the middle of a step."""
    code = """
import resource
import gptworks.train.loop as loop
step = loop.backward

def with_less(*args, **more):
    from gptworks.plan import machine
    used = machine._field(machine.PROC / "self" / "status", "VmSize:") * 1024
    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), used + (64 << 20)))
    return step(*args, **more)

loop.backward = with_less
"""
    wide = ["model.hidden_size=256", "batch.global_size=256", "batch.micro_size=256", "train.steps=1"]
    command = ["train", "-c", recipe, "--out", tmp_path / "run", *wide]
    done = run_cli(*command, before=partial(exec, code, {}), expect=2)
    assert "error: out of memory (cpu): " in done.stderr and "you tried to allocate" in done.stderr
    assert "Predicted: " in done.stderr and "batch.micro_size=" in done.stderr
