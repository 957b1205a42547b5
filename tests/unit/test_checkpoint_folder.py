"""Checkpoints on disk: whole or absent, kept or deleted as asked, and never believed without a check."""

import errno
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint import folder as folders
from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import BEST, LATEST, CheckpointFolder
from gptworks.checkpoint.formats import dcp
from gptworks.checkpoint.manifest import Manifest
from gptworks.config.schema import CheckpointConfig, ModelConfig
from gptworks.errors import CheckpointError, DamagedCheckpoint

MODEL = ModelConfig(num_layers=1, hidden_size=4, num_heads=1, vocab_size=8, max_positions=4)


def manifest_of(step: int) -> Manifest:
    return Manifest(step, 4 * step, step, {"train": {"steps": 9}}, "", ["data"], {})


def save(run: Path, step: int, value: float | None = None) -> Path:
    tensors = {"model.w": torch.full((3,), float(step) if value is None else value)}
    return CheckpointFolder(run).save(manifest_of(step), tensors, None, MODEL, None)


def stored_value(checkpoint: Path) -> float:
    target = {"model.w": torch.empty(3)}
    dcp.load_into(checkpoint / folders.STATE, target)
    return target["model.w"][0].item()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# Saving


def test_a_saved_checkpoint_is_whole_and_pointed_at(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    assert path == tmp_path / "checkpoints" / "step-00000007"
    assert stored_value(path) == 7.0
    assert (tmp_path / LATEST).read_text() == "step-00000007\n"
    assert names(tmp_path) == {"checkpoints", LATEST}
    assert names(tmp_path / "checkpoints") == {"step-00000007"}
    found = manifests.read(path)
    assert set(found.files) == {"state/.metadata", "state/__0_0.distcp"}
    assert replace(found, files={}) == manifest_of(7)
    manifests.verify(path, found)


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 7, value=1.0)
    path = save(tmp_path, 7, value=2.0)
    assert stored_value(path) == 2.0
    assert names(tmp_path / "checkpoints") == {"step-00000007"}


def test_a_save_that_fails_leaves_the_earlier_ones_and_no_rest(tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    unknown = {"blocks.0.surprise.weight": torch.zeros(2)}  # has no place in the portable folder
    with pytest.raises(CheckpointError, match=r"step-00000002: could not be saved") as caught:
        CheckpointFolder(tmp_path).save(manifest_of(2), {"model.w": torch.zeros(3)}, unknown, MODEL, None)
    assert "--resume auto" in str(caught.value)
    assert names(tmp_path / "checkpoints") == {"step-00000001"}
    assert CheckpointFolder(tmp_path).latest() == first
    assert CheckpointFolder(tmp_path).pointed(LATEST) == first


# One process forks a child for each event that changes a file, and the child dies by SIGKILL just before that event.
CRASHES = """
import os, signal, sys
from pathlib import Path
import torch
from gptworks.checkpoint.folder import CheckpointFolder
import gptworks.checkpoint.formats.dcp  # once, and not by every child
from gptworks.checkpoint.manifest import Manifest
from gptworks.config.schema import CheckpointConfig, ModelConfig

MODEL = ModelConfig(num_layers=1, hidden_size=4, num_heads=1, vocab_size=8, max_positions=4)
CHANGING = {"os.mkdir", "os.rename", "os.remove", "os.rmdir"}
torch.set_num_threads(1)

def story(run, done):
    checkpoints = CheckpointFolder(run)
    for value, step in enumerate((1, 2, 2, 3)):
        manifest = Manifest(step, 4 * step, step, {}, "", ["data"], {})
        checkpoints.save(manifest, {"model.w": torch.full((3,), float(value))}, None, MODEL, None)
        os.write(done, str(value).encode())
        checkpoints.retain(CheckpointConfig(keep_last=1))

def child(run, last):
    run.mkdir()
    done = os.open(run / "done", os.O_CREAT | os.O_WRONLY)
    left = [last]
    def hook(event, args):
        if event in CHANGING or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    story(run, done)
    os._exit(0)

number = 0
while True:
    number += 1
    pid = os.fork()
    if pid == 0:
        child(Path(sys.argv[1]) / str(number), number)
    _, status = os.waitpid(pid, 0)
    if os.WIFEXITED(status):
        sys.exit(os.WEXITSTATUS(status))
"""


@pytest.mark.slow
def test_a_crash_at_any_moment_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CRASHES, str(tmp_path)], check=True)
    steps = [1, 2, 2, 3]
    runs = sorted(tmp_path.iterdir(), key=lambda path: int(path.name))
    assert len(runs) > 50
    interrupted_while_writing = 0
    for run in runs:
        done = len((run / "done").read_text())
        checkpoints = CheckpointFolder(run)
        interrupted_while_writing += any((run / "checkpoints").glob(".writing-*"))
        checkpoints.remove_leftovers()
        latest = checkpoints.latest()
        if latest is None:
            assert done == 0, f"crash {run.name}: {done} saves were over, and nothing is left"
            continue
        manifests.verify(latest, manifests.read(latest))
        # The save that was going on may have come through as well.
        at = int(stored_value(latest))
        assert at in {done - 1, done}, f"crash {run.name}: {done} saves were over, and save {at} is left"
        assert manifests.read(latest).step == steps[at]
        assert not list((run / "checkpoints").glob(".*")), f"crash {run.name}"
        pointed = checkpoints.pointed(LATEST)
        assert pointed is None or pointed.is_dir(), f"crash {run.name}: {pointed} is not there"
    assert interrupted_while_writing > 15


def test_leftovers_of_a_crash_are_cleaned_and_nothing_else(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    for name in (".writing-step-00000006", ".deleting-step-00000004", ".replaced-step-00000005"):
        (path.parent / name).mkdir()
        (path.parent / name / "part").write_text("x")
    (path.parent / "mine.txt").write_text("the user's own file")
    CheckpointFolder(tmp_path).remove_leftovers()
    assert names(path.parent) == {"step-00000005", "mine.txt"}


# Retention


@pytest.mark.parametrize(
    ("cfg", "best", "kept"),
    [
        (CheckpointConfig(keep_last=1), None, {6}),
        (CheckpointConfig(keep_last=3), None, {4, 5, 6}),
        (CheckpointConfig(keep_last=1, keep_every=2), None, {2, 4, 6}),
        (CheckpointConfig(keep_last=2, keep_every=3), None, {3, 5, 6}),
        (CheckpointConfig(keep_last=1, keep_best=True), 2, {2, 6}),
        (CheckpointConfig(keep_last=9), None, {1, 2, 3, 4, 5, 6}),
    ],
)
def test_retention(cfg: CheckpointConfig, best: int | None, kept: set[int], tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in range(1, 7):
        save(tmp_path, step)
    if best:
        checkpoints.point(BEST, f"step-{best:08d}")
    checkpoints.retain(cfg)
    assert set(checkpoints.steps()) == kept
    assert names(checkpoints.folder) == {f"step-{step:08d}" for step in kept}


LOSSES = {1: 5.0, 2: 4.0, 3: 3.0, 4: 3.2, 5: 7.0, 6: 9.0}


def test_retention_spares_what_was_good_when_newer_ones_are_much_worse(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step, loss in LOSSES.items():
        manifest = replace(manifest_of(step), smoothed_loss=loss)
        checkpoints.save(manifest, {"model.w": torch.zeros(3)}, None, MODEL, None)
    besides = checkpoints.retain(CheckpointConfig(keep_last=1), loss=9.5)
    assert [path.name for path in besides] == ["step-00000003"]  # the lowest, and the newest that went on well
    assert set(checkpoints.steps()) == {3, 6}


def test_what_is_kept_apart_is_neither_counted_nor_chosen(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    first = save(tmp_path, 3)
    apart = checkpoints.save(manifest_of(5), {"model.w": torch.zeros(3)}, None, MODEL, None, apart=True)
    assert apart == checkpoints.folder / "stopped-step-00000005"
    manifests.verify(apart, manifests.read(apart))
    assert checkpoints.latest() == checkpoints.pointed(LATEST) == folders.find(tmp_path) == first
    checkpoints.retain(CheckpointConfig(keep_last=1))
    assert names(checkpoints.folder) == {"step-00000003", "stopped-step-00000005"}
    assert folders.find(apart) == apart
    checkpoints.remove_stopped()
    assert names(checkpoints.folder) == {"step-00000003"}


# Finding


def test_the_newest_whole_checkpoint_counts_not_the_pointer(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    assert checkpoints.latest() is None
    assert checkpoints.pointed(LATEST) is None
    save(tmp_path, 9)
    newest = save(tmp_path, 10)
    checkpoints.point(LATEST, "step-00000009")
    (checkpoints.folder / "step-00000011").mkdir()  # without a manifest: not whole
    (checkpoints.folder / "step-notes").mkdir()
    assert checkpoints.latest() == newest
    assert checkpoints.pointed(LATEST) == checkpoints.folder / "step-00000009"


def test_find_takes_a_run_its_pointers_its_checkpoints_folder_or_a_step(tmp_path: Path) -> None:
    first, last = save(tmp_path, 1), save(tmp_path, 2)
    assert folders.find(tmp_path) == last
    assert folders.find(tmp_path / "checkpoints") == last
    assert folders.find(first) == first
    CheckpointFolder(tmp_path).point(BEST, first.name)
    assert folders.find(tmp_path / BEST) == first
    assert folders.find(tmp_path / LATEST) == last
    CheckpointFolder(tmp_path).point(BEST, "step-00000009")
    with pytest.raises(CheckpointError, match="step-00000009: no checkpoint here"):
        folders.find(tmp_path / BEST)
    empty = tmp_path / "empty"
    with pytest.raises(CheckpointError, match="empty: no checkpoint here"):
        folders.find(empty)


def test_going_back_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    """What comes after the step to go on from belongs to a past that is done again: it must not win over it."""
    checkpoints = CheckpointFolder(tmp_path)
    for step in (2, 4, 6):
        save(tmp_path, step)
    checkpoints.point(BEST, "step-00000006")
    aside = checkpoints.go_back_to(4, best_step=2)
    assert [path.name for path in aside] == ["set-aside-step-00000006"]
    assert stored_value(aside[0]) == 6.0
    assert set(checkpoints.steps()) == {2, 4}
    assert checkpoints.pointed(BEST) == checkpoints.folder / "step-00000002"
    assert checkpoints.go_back_to(4, best_step=2) == []


def test_a_best_pointer_to_what_was_set_aside_is_removed(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for step in (2, 4):
        save(tmp_path, step)
    checkpoints.point(BEST, "step-00000004")
    checkpoints.go_back_to(2, best_step=None)
    assert checkpoints.pointed(BEST) is None
    checkpoints.point(BEST, "step-00000002")
    checkpoints.go_back_to(2, best_step=None)
    assert checkpoints.pointed(BEST) == checkpoints.folder / "step-00000002"


# Believing


def damage_missing(file: Path) -> None:
    file.unlink()


def damage_truncated(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def damage_changed(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["state/.metadata", "state/__0_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (damage_missing, "missing"),
        (damage_truncated, r"\d+ bytes, needed \d+"),
        (damage_changed, "contents have changed"),
    ],
)
def test_verify_finds_every_damage(name: str, damage, said: str, tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    damage(path / name)
    with pytest.raises(CheckpointError, match=said) as caught:
        manifests.verify(path, manifests.read(path))
    assert str(path / name) in str(caught.value)
    assert "--resume DIR" in str(caught.value)


def edit(path: Path, **values: object) -> None:
    """Changes a manifest, and writes its checksum anew."""
    file = path / manifests.NAME
    changed = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({**changed, "checksum": manifests.checksum(changed)}))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"version": 99}, r"version 99, needed 3 \(or 1, 2\)"),
        ({"version": "1"}, "version '1', needed 3"),
        ({"version": True}, "version True, needed 3"),
        ({"step": "three"}, "step is 'three', needed int"),
        ({"step": True}, "step is True, needed int"),
        ({"step": 10**12}, "step is 1000000000000, needed 3, as its folder says"),
        ({"step": -3}, "step is -3, needed 0 or more"),
        ({"consumed": -5}, "consumed is -5, needed 0 or more"),
        ({"consumed": 2}, "consumed is 2, needed at least a sample for each of 3 steps"),
        ({"optimizer_updates": 4}, r"optimizer_updates is 4, needed at most step \(3\)"),
        ({"skipped_in_a_row": -1}, "skipped_in_a_row is -1"),
        ({"samples_asked": "all"}, "samples_asked is 'all', needed int or null"),
        ({"smoothed_loss": "low"}, "smoothed_loss is 'low', needed a finite number"),
        ({"held_out_loss": [3]}, r"held_out_loss is \[3\], needed a finite number"),
        ({"best": {"step": 1}}, r"best is \{'step': 1\}, needed step and the number that is best"),
        ({"best": {"step": "one", "held_out_loss": 1.0}}, "best.step is 'one', needed a finite number"),
        ({"best": {"step": -3, "held_out_loss": 1.0}}, r"best.step is -3, needed 0 to step \(3\)"),
        ({"best": {"step": 4, "held_out_loss": 1.0}}, r"best.step is 4, needed 0 to step \(3\)"),
        ({"samples_asked": -4}, "samples_asked is -4, needed 0 or more"),
        ({"scaler": {"scale": None}}, "scale is None, needed a finite number"),
        ({"files": {"../../secret": {"bytes": 1, "sha256": ""}}}, "'../../secret' is not below the checkpoint's own"),
        ({"files": {"/etc/passwd": {"bytes": 1, "sha256": ""}}}, "'/etc/passwd' is not below the checkpoint's own"),
        ({"files": {"C:\\x": {"bytes": 1, "sha256": ""}}}, "is not below the checkpoint's own"),
        ({"files": {"a\\..\\x": {"bytes": 1, "sha256": ""}}}, "is not below the checkpoint's own"),
        ({"files": {"": {"bytes": 1, "sha256": ""}}}, "'' is not below the checkpoint's own"),
        ({"config": None}, "config is None, needed dict"),
        ({"config": {"init": "x"}}, "config.init is 'x', needed keys and values"),
        ({"files": {"x": {"bytes": "many", "sha256": ""}}}, "'x' has no size and hash"),
        ({"files": {"x": {"bytes": -1, "sha256": ""}}}, "'x' has no size and hash"),
        ({"files": {"x": {"bytes": 1, "sha256": None}}}, "'x' has no size and hash"),
        ({"data_identities": "abc"}, "data_identities is 'abc', needed list"),
        ({"files": {"state/.metadata": 12}}, "'state/.metadata' has no size and hash"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_manifest_that_is_not_one_is_refused(values: dict[str, object], said: str, tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    edit(path, **values)
    with pytest.raises(CheckpointError, match=said) as caught:
        manifests.read(path)
    assert str(path / manifests.NAME) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '"text"', "{}", "null", '{"version": 1}', "\0" * 900, "\udcff", "[" * 200_000]
)
def test_a_manifest_with_other_json_is_refused(text: str, tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    (path / manifests.NAME).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DamagedCheckpoint, match="not a manifest"):
        manifests.read(path)


@pytest.mark.parametrize("values", [{"consumed": 13}, {"torch_version": "0.1"}, {"checksum": None}, {"checksum": "0"}])
def test_a_manifest_that_was_changed_does_not_fit_its_checksum(values: dict[str, object], tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    file = path / manifests.NAME
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    with pytest.raises(DamagedCheckpoint, match="does not fit its own checksum") as caught:
        manifests.read(path)
    assert str(file) in str(caught.value)


def test_the_checksum_is_that_of_the_reference_page(tmp_path: Path) -> None:
    """Computed here as docs/reference/run-folder.md says."""
    values = json.loads((save(tmp_path, 3) / manifests.NAME).read_text())
    written = values.pop("checksum")
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    assert hashlib.sha256(text.encode("ascii")).hexdigest() == written
    assert values["version"] == 3


@pytest.mark.parametrize("files", [{}, {"state/.metadata": None}, {"state/__0_0.distcp": None}])
def test_a_manifest_that_lists_no_state_is_refused(files: dict[str, None], tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    listed = json.loads((path / manifests.NAME).read_text())["files"]
    edit(path, files={name: listed[name] for name in files})
    with pytest.raises(DamagedCheckpoint, match=r"lists no state/\.metadata and state/"):
        manifests.verify(path, manifests.read(path))


def test_a_checkpoint_may_be_copied_under_another_name(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    for name in ("mine", "set-aside-step-00000003"):
        manifests.verify(path.rename(path.with_name(name)), manifests.read(path.with_name(name)))
        path = path.with_name(name)
    with pytest.raises(DamagedCheckpoint, match="step is 3, needed 4, as its folder says"):
        manifests.read(path.rename(path.with_name("damaged-step-00000004")))


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a training checkpoint"):
        manifests.read(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    path = save(tmp_path_factory.mktemp("whole"), 3)
    return path, (path / manifests.NAME).read_bytes()


@given(st.data())
def test_damaged_manifest_bytes_never_give_another_error(whole: tuple[Path, bytes], data: st.DataObject) -> None:
    path, good = whole
    start = data.draw(st.integers(0, len(good) - 1))
    length = data.draw(st.integers(0, 8))
    bad = good[:start] + data.draw(st.binary(max_size=8)) + good[start + length :]
    (path / manifests.NAME).write_bytes(bad)
    try:
        manifests.verify(path, manifests.read(path))
    except CheckpointError as error:
        assert str(path) in str(error)


# Room on the disk


def test_too_little_room_is_said_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"MB free, but one checkpoint needs 5,000,000,000,000\.0 MB") as caught:
        folders.check_free_space(tmp_path, 5 * 10**18)
    assert str(tmp_path) in str(caught.value)
    folders.check_free_space(tmp_path, 0)


@pytest.mark.parametrize("text", [b"\xff\xfe\n", b"\0" * 14, b"", b"../../secret\n", b"step-00000003\n" * 9000])
@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_a_pointer_that_holds_something_else_is_refused_by_name(pointer: str, text: bytes, tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    checkpoints = CheckpointFolder(tmp_path)
    (tmp_path / pointer).write_bytes(text)
    assert checkpoints.pointed(pointer) is None
    with pytest.raises(CheckpointError, match=f"{pointer}: holds no name of a checkpoint"):
        folders.find(tmp_path / pointer)
    assert folders.find(tmp_path) == path, "the run itself is as it was"
    checkpoints.go_back_to(3, None)
    assert not (tmp_path / "best").exists()


def test_a_file_that_the_disk_cannot_read_is_damage_and_one_without_permission_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 3)
    manifest = manifests.read(path)

    def fails_with(number: int) -> None:
        def read(self: object, *_: object) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(manifests, "_hash", read)
        monkeypatch.setattr(Path, "read_bytes", read)

    fails_with(errno.EIO)
    with pytest.raises(DamagedCheckpoint, match=r"state/.*: the disk cannot read it \(Input/output error\)"):
        manifests.verify(path, manifest)
    with pytest.raises(DamagedCheckpoint, match=r"manifest.json: the disk cannot read it"):
        manifests.read(path)
    fails_with(errno.ENOENT)
    with pytest.raises(DamagedCheckpoint, match=r"state/.*: missing"):
        manifests.verify(path, manifest)
    fails_with(errno.EACCES)
    for look in (lambda: manifests.verify(path, manifest), lambda: manifests.read(path)):
        with pytest.raises(PermissionError):
            look()
