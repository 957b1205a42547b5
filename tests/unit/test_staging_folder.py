"""What a killed process leaves beside its result, and who removes it."""

import os
import signal
from pathlib import Path

import pytest

from gptworks import staging_folder


def leave_behind(final: Path, *, killed: bool) -> tuple[int, str]:
    """A child that stages something: killed in the midst of it, or still at it. Its number and its folder."""
    ready, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with staging_folder.beside(final) as work:
                (work / "half").write_text("half")
                os.write(write, work.name.encode())
                signal.pause()
        finally:
            os._exit(1)
    name = os.read(ready, 500).decode()
    os.close(ready)
    os.close(write)
    if killed:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return child, name


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_it_is_gone_afterwards_also_after_an_error(tmp_path: Path) -> None:
    with staging_folder.beside(tmp_path / "x") as work:
        assert work.is_dir() and work.parent == tmp_path and work.name.startswith("x.part-")
        with staging_folder.beside(tmp_path / "x") as other:
            assert other != work
        assert work.is_dir(), "another one in the same process leaves it alone"
    with pytest.raises(ZeroDivisionError), staging_folder.beside(tmp_path / "x") as work:
        (work / "half").write_text("half")
        raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_the_next_one_removes_what_no_living_process_owns(tmp_path: Path) -> None:
    _, dead = leave_behind(tmp_path / "x", killed=True)
    assert (tmp_path / dead / "half").exists()
    living, owned = leave_behind(tmp_path / "y", killed=False)
    try:
        assert names(tmp_path) == {owned}
        _, dead = leave_behind(tmp_path / "z", killed=True)
        foreign = {"x.part-00000000-abcdefgh", "x.part", "x.part-12", "mine"}
        for name in foreign:
            (tmp_path / name).mkdir()
        with staging_folder.beside(tmp_path / "x") as work:
            assert names(tmp_path) == {owned, work.name, *foreign}, "those of others stay, and what is not ours"
    finally:
        os.kill(living, signal.SIGKILL)
        os.waitpid(living, 0)
    staging_folder.remove_abandoned(tmp_path)
    assert names(tmp_path) == foreign


def test_one_that_is_taken_for_abandoned_too_early_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may look at it before its lock is there."""
    take, seen = staging_folder._open, []

    def open_late(folder: Path) -> int | None:
        seen.append(folder)
        if len(seen) == 1:
            folder.rmdir()
        return take(folder)

    monkeypatch.setattr(staging_folder, "_open", open_late)
    with staging_folder.beside(tmp_path / "x") as work:
        assert work.is_dir() and work != seen[0]
