"""How much memory a machine has left, with limits of containers and of the shell."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from gptworks.plan import machine

GIB = 2**30


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB free, whose files can be changed."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 99\nMemAvailable:    {8 * GIB // 1024} kB\n")
    (tmp_path / "proc" / "self" / "status").write_text("Name: x\nVmSize:   1024 kB\n")
    (tmp_path / "cgroup").mkdir()
    monkeypatch.setattr(machine, "PROC", tmp_path / "proc")
    monkeypatch.setattr(machine, "CGROUP", tmp_path / "cgroup")
    return tmp_path


def group(folder: Path, limit: str, used: int, cache: int, version: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    prefix = "" if version == 2 else "total_"
    (folder / "memory.stat").write_text(f"anon 5\n{prefix}inactive_file {cache}\n")


def test_what_is_free(fake: Path) -> None:
    assert machine.memory_available() == 8 * GIB


def test_a_container_has_less(fake: Path) -> None:
    (fake / "proc" / "self" / "cgroup").write_text("0::/\n")
    group(fake / "cgroup", str(4 * GIB), 2 * GIB, GIB)
    assert machine.memory_available() == 3 * GIB, "files that were read are dropped when memory is wanted"
    group(fake / "cgroup", "max", 2 * GIB, GIB)
    assert machine.memory_available() == 8 * GIB


def test_the_tightest_of_nested_groups_counts(fake: Path) -> None:
    (fake / "proc" / "self" / "cgroup").write_text("0::/system.slice/job.scope\n")
    group(fake / "cgroup" / "system.slice" / "job.scope", "max", GIB, 0)
    group(fake / "cgroup" / "system.slice", str(5 * GIB), 3 * GIB, 0)
    assert machine.memory_available() == 2 * GIB


def test_the_first_version_of_groups(fake: Path) -> None:
    (fake / "proc" / "self" / "cgroup").write_text("5:cpu:/docker/a\n4:memory:/docker/a\n")
    group(fake / "cgroup" / "memory" / "docker" / "a", str(6 * GIB), GIB, 0, version=1)
    assert machine.memory_available() == 5 * GIB


def test_a_group_that_is_over_its_limit_leaves_nothing(fake: Path) -> None:
    (fake / "proc" / "self" / "cgroup").write_text("0::/\n")
    group(fake / "cgroup", str(GIB), 2 * GIB, 0)
    assert machine.memory_available() == 0


def test_where_nothing_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PROC", tmp_path)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: (_ for _ in ()).throw(ValueError(name)))
    assert machine.memory_available() == math.inf


@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited on Linux")
def test_ulimit_is_for_each_process() -> None:
    code = """
import resource
from gptworks.plan.machine import memory_available
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
one, two = memory_available(), memory_available(2)
assert 0 < one < 1 << 30, one
assert one < two <= 2 * one + (1 << 20), (one, two)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
