"""Going on after a fault: a rate that exploded, damaged checkpoints, records full of garbage, old formats."""

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gptworks.checkpoint import manifest as manifests
from gptworks.checkpoint.folder import CheckpointFolder
from gptworks.errors import DamagedCheckpoint

Call = Callable[..., Any]
Lines = Callable[[Path], list[dict[str, Any]]]
FIXTURES = Path(__file__).parent.parent / "fixtures" / "checkpoints"
EXPLODES = ["optim.lr=1e38", "optim.schedule=constant", "optim.clip=0"]


def names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def advised(text: str) -> list[str]:
    """The command that an error says to type, without the name of the program."""
    (command,) = re.findall(r"^  (gptworks train .*)$", text, re.MULTILINE)
    return shlex.split(command)[1:]


# A loss that is not finite


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_advised_command_goes_on_from_the_last_good_checkpoint(
    every: int, recipe: Path, tmp_path: Path, call: Call, metrics: Lines
) -> None:
    """Wherever the checkpoints lie: the update of step 5 explodes, so that one saved after it is bad already."""
    out = tmp_path / "a run"
    settings = ["checkpoint.keep_last=1", f"checkpoint.every={every}"]
    call("train", "-c", recipe, "--out", out, "train.steps=4", *settings)
    done = call(
        "train", "-c", recipe, "--out", out, "train.steps=9", *settings, *EXPLODES, "--resume", "auto", expect=2
    )
    assert "step 6: loss nan" in done.err
    good = out / "checkpoints" / "step-00000004"
    assert f"The last good checkpoint is {good}." in done.err
    assert names(out) == {"step-00000004", "stopped-step-00000005"}, "also where step 5 was saved before it was known"
    assert CheckpointFolder(out).pointed("latest") == good
    again = Path(shutil.copytree(out, tmp_path / "unattended"))
    done_again = call("train", "-c", recipe, "--out", again, "train.steps=9", *settings, "--resume", "auto")
    assert f"resuming from {again / 'checkpoints' / 'step-00000004'}" in done_again.out, "auto with a lower rate"
    command = advised(done.err)
    assert command[command.index("--resume") + 1] == str(good)
    assert "optim.lr=0.003" in command, "the rate that the checkpoint was trained with"
    done = call(*command, "optim.clip=1")
    assert f"resuming from {good}" in done.out
    losses = [line["loss"] for line in metrics(out) if "loss" in line]
    assert len(losses) == 9 and all(math.isfinite(loss) for loss in losses)
    assert max(losses[4:]) < losses[0]
    assert CheckpointFolder(out).pointed("latest") == out / "checkpoints" / "step-00000009"


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_two_ranks_that_explode_while_they_save_in_the_background(
    every: int, recipe: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "run"
    settings = ["checkpoint.keep_last=1", f"checkpoint.every={every}", "checkpoint.asynchronous=true"]
    words = ["train", "-c", recipe, "--out", out, *settings, "--nproc", "2", "parallel.fsdp=2"]
    call(*words, "train.steps=4")
    done = call(*words, "train.steps=9", *EXPLODES, "--resume", "auto", expect=2)
    good = out / "checkpoints" / "step-00000004"
    assert f"The last good checkpoint is {good}." in done.err
    assert names(out) == {"step-00000004", "stopped-step-00000005"}
    command = advised(done.err)
    assert command[command.index("--nproc") + 1] == "2"
    call(*words, "train.steps=9", "--resume", "auto")
    assert names(out) == {"step-00000009", "stopped-step-00000005"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state/__1_0.distcp", "manifest.json"])
def test_two_ranks_set_a_damaged_newest_checkpoint_aside(
    name: str, recipe: Path, tmp_path: Path, call: Call, metrics: Lines
) -> None:
    """What one of them has found, both go back for."""
    out = tmp_path / "run"
    words = ["train", "-c", recipe, "--out", out, "--nproc", "2", "parallel.fsdp=2"]
    call(*words)
    wanted = metrics(out)
    empty(out / "checkpoints" / "step-00000006" / name)
    call(*words, "--resume", "auto")
    assert names(out) == {"step-00000002", "step-00000004", "step-00000006", "damaged-step-00000006"}
    assert metrics(out) == wanted


def test_what_has_exploded_is_neither_counted_nor_chosen(
    recipe: Path, tmp_path: Path, call: Call, checked: Callable[[Path], int]
) -> None:
    out = tmp_path / "run"
    settings = ["checkpoint.keep_last=1", "checkpoint.every=4", "train.steps=9"]
    call("train", "-c", recipe, "--out", out, *settings, "train.steps=4")
    for _ in range(2):  # the same mistake twice leaves no more than once
        call("train", "-c", recipe, "--out", out, *settings, *EXPLODES, "--resume", "auto", expect=2)
        assert names(out) == {"step-00000004", "stopped-step-00000005"}
    assert checked(out) == 4
    done = call("train", "-c", recipe, "--out", out, *settings, "--resume", "auto")
    assert f"resuming from {out / 'checkpoints' / 'step-00000004'}" in done.out
    assert checked(out) == 9
    apart = out / "checkpoints" / "stopped-step-00000005"
    done = call("train", "-c", recipe, "--out", out, *settings, "--resume", apart, expect=2)
    assert f"resuming from {apart} (20 samples done)" in done.out, "it can be had by name"
    assert "step 6: loss nan" in done.err, "and is as bad as it was"


def test_without_a_good_checkpoint_the_advice_is_to_begin_again(recipe: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    done = call("train", "-c", recipe, "--out", out, *EXPLODES, "checkpoint.every=1", expect=2)
    assert "No checkpoint is known to be good. Begin again with a lower rate:" in done.err
    command = advised(done.err)
    assert command[-1] == "optim.lr=5e+37"
    call(*command[:-1], "optim.lr=1e-3")
    assert names(tmp_path / "run-2") >= {"step-00000006"}


def test_a_stop_says_also_that_its_state_could_not_be_kept(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gptworks.checkpoint import portable

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(portable, "write", full)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", *EXPLODES, expect=2)
    assert "step 2: loss nan" in done.err
    assert "The state before this step could not be kept: " in done.err
    assert "No space left on device" in done.err
    assert "No checkpoint is known to be good." in done.err


# Damaged checkpoints


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zero(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("manifest.json", cut),
        ("manifest.json", empty),
        ("manifest.json", zero),
        ("manifest.json", flip),
        ("manifest.json", Path.unlink),
        ("state/__0_0.distcp", flip),
        ("state/__0_0.distcp", empty),
        ("state/.metadata", cut),
        ("portable/model.safetensors", Path.unlink),
    ],
)
def test_a_damaged_newest_checkpoint_is_set_aside(
    name: str, damage: Callable[[Path], object], finished: Path, recipe: Path, call: Call, metrics: Lines
) -> None:
    wanted = metrics(finished)
    newest, before = (finished / "checkpoints" / f"step-0000000{step}" for step in (6, 4))
    damage(newest / name)
    was = {path.name for path in newest.rglob("*")}
    if name != "manifest.json" or damage is not Path.unlink:
        done = call("train", "-c", recipe, "--out", finished, "--resume", newest, expect=2)
        assert str(newest / name) in done.err, "what is asked for by name is refused"
    assert names(finished) == {"step-00000002", "step-00000004", "step-00000006"}
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto")
    assert f"resuming from {before}" in done.out
    assert f"damaged: {newest}" in done.out
    aside = finished / "checkpoints" / "damaged-step-00000006"
    assert f"later checkpoint set aside: {aside}" in done.out
    assert "the steps after 4 are computed again" in done.out
    assert {path.name for path in aside.rglob("*")} == was
    assert metrics(finished) == wanted, "computed again, never skipped"
    assert "resuming from" in call("train", "-c", recipe, "--out", finished, "--resume", "auto").out


def test_two_damaged_ones_and_then_all(finished: Path, recipe: Path, call: Call) -> None:
    steps = [finished / "checkpoints" / f"step-0000000{step}" for step in (2, 4, 6)]
    for path in steps[1:]:
        empty(path / "manifest.json")
    copy = Path(shutil.copytree(finished, finished.with_name("copy")))
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto")
    assert f"resuming from {steps[0]}" in done.out
    assert {"damaged-step-00000004", "damaged-step-00000006"} <= names(finished)

    empty(copy / "checkpoints" / "step-00000002" / "manifest.json")
    for _ in range(2):  # a run that is started again and again does not begin at step 0 one day
        done = call("train", "-c", recipe, "--out", copy, "--resume", "auto", expect=2)
        assert "no checkpoint is whole" in done.err
        assert all(f"{copy / 'checkpoints' / path.name}" in done.err for path in steps)
        assert names(copy) == {path.name for path in steps}


def test_a_refusal_that_is_no_damage_stays_one(finished: Path, recipe: Path, call: Call) -> None:
    """Another model, or a manifest of a later version, must not send a run back."""
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.seed=5", expect=2)
    assert "train.seed: 1234 -> 5" in done.err
    manifest = finished / "checkpoints" / "step-00000006" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "version": 4}))
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", expect=2)
    assert f"{manifest}: version 4, needed 3" in done.err
    assert names(finished) == {"step-00000002", "step-00000004", "step-00000006"}


# Garbage in the records


def test_garbage_in_the_records_does_not_end_a_run(finished: Path, recipe: Path, call: Call, metrics: Lines) -> None:
    wanted = metrics(finished)
    records = finished / "metrics.jsonl"
    records.write_bytes(b"\xff\n" + records.read_bytes() + b'not JSON\n{"loss": 1}\n')
    (finished / "nonfinite.jsonl").write_bytes(b"\0\0\0\n")
    (finished / "events.jsonl").write_bytes(b'no event\n{"step": 9, "samples": "config.yaml"}\n')
    done = call("plot", finished)
    assert f"{records}: 3 lines that cannot be read are left out" in done.err
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=7")
    assert f"{records}: 3 lines that cannot be read set aside in {records}.bad" in done.out
    assert f"nonfinite.jsonl: 1 line that cannot be read set aside in {finished / 'nonfinite.jsonl'}.bad" in done.out
    assert f"events.jsonl: 1 line that cannot be read set aside in {finished / 'events.jsonl'}.bad" in done.out
    assert (finished / "events.jsonl.bad").read_bytes() == b"no event\n"
    assert (finished / "config.yaml").is_file() and not (finished / "events.jsonl").read_bytes()
    assert metrics(finished)[:6] == wanted
    assert (finished / "metrics.jsonl.bad").read_bytes() == b'\xff\nnot JSON\n{"loss": 1}\n'


# Checkpoints of an earlier version


@pytest.mark.parametrize("version", [1, 2])
def test_a_checkpoint_of_an_earlier_version_goes_on(
    version: int, tmp_path: Path, call: Call, metrics: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = FIXTURES / f"version{version}"
    shutil.copytree(fixture, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    first = tmp_path / "run" / "checkpoints" / "step-00000002"
    manifest = json.loads((first / "manifest.json").read_text())
    assert manifest["version"] == version and ("checksum" in manifest) == (version > 1) and "guard" not in manifest
    (tmp_path / "run" / "environment.json").write_text("{}")
    (tmp_path / "c.yaml").write_text(json.dumps(manifest["config"]))
    call("generate", "--model", first, "--prompt", "the", "--max-new-tokens", 3)
    done = call("train", "-c", "c.yaml", "--resume", "auto", "train.steps=4")
    assert "resuming from run/checkpoints/step-00000002 (4 samples done)" in done.out
    wanted = json.loads((fixture / "losses.json").read_text())
    losses = {str(line["step"]): line["loss"] for line in metrics(tmp_path / "run") if "loss" in line}
    assert losses == pytest.approx(wanted, rel=1e-5)
    newer = json.loads((tmp_path / "run" / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert newer["version"] == 3 and newer["smoothed_loss"] > 5 and newer["guard"] == {}


def test_a_changed_checkpoint_of_version_2_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "version2", tmp_path, dirs_exist_ok=True)
    step = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert manifests.read(step).rollbacks == 0
    text = (step / "manifest.json").read_text()
    (step / "manifest.json").write_text(text.replace('"consumed": 4', '"consumed": 5'))
    with pytest.raises(DamagedCheckpoint, match="does not fit its own checksum"):
        manifests.read(step)
