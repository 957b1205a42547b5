"""A folder that was made is there after a power failure: every folder above it that got a new name is synced."""

import os
from pathlib import Path

import pytest

from gptworks import durable
from gptworks.checkpoint import folder
from gptworks.train import run_folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    found: list[Path] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        found.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return found


pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the names of descriptors are in /proc")


def test_names_of_new_folders_are_synced(tmp_path: Path, synced: list[Path]) -> None:
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert set(synced) == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}
    synced.clear()
    durable.make_folder(tmp_path / "a" / "b" / "c")
    assert synced == []


def test_a_new_run_folder_and_its_checkpoints_last(tmp_path: Path, synced: list[Path]) -> None:
    with run_folder.locked(tmp_path / "runs" / "mine"):
        assert {tmp_path, tmp_path / "runs"} <= set(synced)
    synced.clear()
    folder._make_anew(tmp_path / "runs" / "mine" / "checkpoints" / ".writing-step-00000001")
    assert tmp_path / "runs" / "mine" in synced
