"""train.guard: a bad document is found, named and passed over; a run that is resumed decides the same."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gptworks.checkpoint import manifest as manifests
from gptworks.data.store import Store
from gptworks.train import loop

Call = Callable[..., Any]
DOCUMENT = 80
# Sequential order and windows of 16: the poisoned document comes after about 60 good steps.
MORE = ["model.vocab_size=1024", "data.order=sequential", "train.steps=110", "checkpoint.every=20"]
GUARD = ["train.guard.window=16", "checkpoint.keep_last=9", "batch.global_size=16", "batch.micro_size=4"]


@pytest.fixture(scope="module")
def poisoned(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the store in which one document consists of ids that stand nowhere else."""
    prefix = tmp_path_factory.mktemp("poisoned") / "small"
    for file in small_store.parent.glob(f"{small_store.name}*"):
        shutil.copy(file, prefix.parent / file.name)
    store = Store(prefix)
    begin, end = store.document_starts[DOCUMENT : DOCUMENT + 2].tolist()
    tokens = np.memmap(f"{prefix}.bin", dtype=store.tokens.dtype, mode="r+")
    tokens[begin : end - 1] = np.random.default_rng(1).integers(512, 1024, end - 1 - begin)
    tokens.flush()
    return prefix


@pytest.fixture
def train(recipe: Path, poisoned: Path, tmp_path: Path, call: Call) -> Call:
    def run(out: str, action: str, *more: str, expect: int = 0) -> Any:
        settings = [*MORE, *GUARD, f"data.path={poisoned}", f"train.guard.action={action}", *more]
        return call("train", "-c", recipe, "--out", tmp_path / out, *settings, expect=expect)

    return run


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def weights(run: Path) -> str:
    """The hashes of the last state."""
    step = (run / "latest").read_text().strip()
    found = manifests.read(run / "checkpoints" / step)
    return json.dumps({name: entry["sha256"] for name, entry in found.files.items() if name.startswith("portable/")})


def documents(event: dict[str, Any]) -> set[int]:
    return {piece["document"] for piece in event["culprit"]["pieces"]}


def test_a_bad_document_is_skipped_and_named(train: Call, tmp_path: Path, metrics: Call, call: Call, poisoned) -> None:
    done = train("skip", "skip")
    found = events(tmp_path / "skip")
    assert found and all(DOCUMENT in documents(event) for event in found)
    assert {event["decision"] for event in found} == {"skip"}
    first = found[0]
    assert f"step {first['step']}: " in done.out and f"document {DOCUMENT}, characters " in done.out
    lines = metrics(tmp_path / "skip")
    assert lines[-1]["skipped"] == len(found)
    # The file of the samples: the culprit first, each with its own loss and text.
    samples = [json.loads(line) for line in (tmp_path / "skip" / first["samples"]).read_text().splitlines()]
    assert sorted(sample["sample"] for sample in samples) == first["sample_ids"] and len(samples) == 16
    losses = [sample["loss"] for sample in samples]
    assert losses == sorted(losses, reverse=True)
    assert np.mean(losses) == pytest.approx(first["loss"], rel=1e-5), "no dropout here: they are those of the step"
    good = samples[-1]
    store = Store(poisoned)
    tokens = store.load_tokenizer()
    assert tokens is not None
    piece = good["pieces"][0]
    begin = int(store.document_starts[piece["document"]])
    text = tokens.decode(store.tokens[begin + piece["tokens"][0] : begin + piece["tokens"][1]].tolist())
    assert piece["text"] == text and good["store"] == str(store.file)

    shown = call("inspect", tmp_path / "skip", "--events").out
    assert shown.startswith(f"step {first['step']}: ") and f"document {DOCUMENT}, " in shown
    assert json.loads(call("inspect", tmp_path / "skip", "--events", "--json").out) == found


@pytest.mark.slow
def test_a_bad_document_is_seen_by_its_samples_alone(train: Call, tmp_path: Path) -> None:
    """Where the means of the step are not judged; and nothing is seen where the samples are not judged either."""
    blind = ["train.guard.loss_z=0", "train.guard.grad_norm_z=0", "train.guard.sample_low_z=0"]
    train("samples", "skip", *blind)
    found = events(tmp_path / "samples")
    assert found and {event["rule"] for event in found} == {"sample_high"}
    assert all(DOCUMENT in documents(event) for event in found)
    train("blind", "skip", *blind, "train.guard.sample_high_z=0")
    assert not (tmp_path / "blind" / "events.jsonl").exists()


@pytest.mark.slow
def test_warning_changes_nothing(train: Call, tmp_path: Path, metrics: Call) -> None:
    train("off", "off")
    train("warn", "warn")
    assert metrics(tmp_path / "warn") == metrics(tmp_path / "off")
    assert {event["decision"] for event in events(tmp_path / "warn")} == {"update"}
    assert not (tmp_path / "off" / "events.jsonl").exists()


def test_a_rollback_passes_over_all_samples_since_the_good_checkpoint(
    train: Call, tmp_path: Path, metrics: Call
) -> None:
    done = train("back", "rollback")
    found = events(tmp_path / "back")
    first = found[0]
    assert DOCUMENT in documents(first) and first["decision"] == "rollback"
    assert first["back_to"] % 20 == 0 and first["back_to"] < first["step"]
    assert first["passed_over"] == [[first["back_to"] * 16, first["step"] * 16]]
    assert (
        f"back to {tmp_path / 'back' / 'checkpoints'}/step-{first['back_to']:08d} (rollback 1 of at most 3)" in done.out
    )
    lines = metrics(tmp_path / "back")
    assert [line["step"] for line in lines] == list(range(1, 111)), "each step once"
    manifest = manifests.read(tmp_path / "back" / "checkpoints" / "step-00000110")
    assert manifest.consumed == 110 * 16 and manifest.rollbacks == len(found)
    assert manifest.passed_over == found[-1]["passed_over"]
    # What comes after is what a run without those samples has: bit for bit, from the same checkpoint.
    assert max(line["loss"] for line in lines[first["back_to"] :]) < first["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("stop", [45, 58, 70])
def test_a_run_that_was_stopped_decides_the_same(train: Call, tmp_path: Path, metrics: Call, stop: int) -> None:
    """Before the bad document, between the rollback and the next checkpoint, and after it: bit for bit."""
    train("whole", "rollback")
    train("parts", "rollback", f"train.steps={stop}", "optim.decay_steps=110")
    train("parts", "rollback", "optim.decay_steps=110", "--resume", "auto")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)
    assert events(parts) == events(whole)


@pytest.mark.slow
def test_a_rollback_is_known_to_the_checkpoint_that_it_went_back_to(train: Call, tmp_path: Path) -> None:
    """As after a kill right behind it: what was saved there goes on behind the samples that were passed over."""
    train("back", "rollback")
    first = events(tmp_path / "back")[0]
    run = tmp_path / "back"
    for step in (run / "checkpoints").glob("step-*"):
        if int(step.name[5:]) > first["back_to"]:
            shutil.rmtree(step)
    wanted = (run / "metrics.jsonl").read_text()
    train("back", "rollback", "--resume", "auto")
    kept = [{k: v for k, v in json.loads(line).items() if k in ("step", "loss")} for line in wanted.splitlines()]
    again = (run / "metrics.jsonl").read_text().splitlines()
    assert [{k: v for k, v in json.loads(line).items() if k in ("step", "loss")} for line in again] == kept
    assert events(run)[0] == first


def test_after_so_many_rollbacks_it_stops(train: Call, tmp_path: Path) -> None:
    done = train("stop", "rollback", "train.guard.max_rollbacks=0", expect=2)
    assert "so training stopped (train.guard.max_rollbacks: 0)" in done.err
    assert "The last good checkpoint is " in done.err
    (event,) = events(tmp_path / "stop")
    assert event["decision"] == "stop" and DOCUMENT in documents(event)


@pytest.mark.slow
def test_without_a_checkpoint_a_rollback_is_a_skip(train: Call, tmp_path: Path) -> None:
    done = train("none", "rollback", "checkpoint.every=0", "train.steps=70")
    assert {event["decision"] for event in events(tmp_path / "none")} == {"skip"}
    assert "for want of a good checkpoint to go back to" in done.out


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["manifest", "state"])
def test_a_rollback_goes_past_a_damaged_checkpoint(
    fault: str, train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was damaged since this very run wrote it: it is neither loaded nor does it end the run."""
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    backward = loop.backward

    def breaking(*arguments: Any, step: int, **options: Any) -> Any:
        if step == 24:
            newest = folder / "step-00000020"
            victim = newest / "manifest.json" if fault == "manifest" else next((newest / "state").glob("*.distcp"))
            if newest.is_dir():
                data = bytearray(victim.read_bytes())
                data[data.index(b'"step": 20') + 9 if fault == "manifest" else len(data) // 2] ^= 1  # 20 -> 21
                victim.write_bytes(data)
        gradients = backward(*arguments, step=step, **options)
        return replace(gradients, loss=float("nan")) if 400 in gradients.sample_ids else gradients  # in the 26th step

    monkeypatch.setattr(loop, "backward", breaking)
    done = train("run", "rollback", "train.steps=30", "checkpoint.every=10")
    (event,) = events(run)
    assert (event["decision"], event["back_to"], event["passed_over"]) == ("rollback", 10, [[160, 416]])
    told = "does not fit its own checksum" if fault == "manifest" else "contents have changed"
    assert f"  damaged: {folder / 'step-00000020'}" in done.out and told in done.out
    assert (folder / "damaged-step-00000020").is_dir()
    assert {each.name for each in folder.glob("step-*")} == {"step-00000010", "step-00000020", "step-00000030"}


def test_a_stop_beside_a_damaged_checkpoint_still_says_why(
    train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "run" / "checkpoints" / "step-00000020" / "manifest.json"
    backward = loop.backward

    def breaking(*arguments: Any, **options: Any) -> Any:
        gradients = backward(*arguments, **options)
        if 400 not in gradients.sample_ids:
            return gradients
        manifest.write_bytes(b"")
        return replace(gradients, loss=float("nan"))

    monkeypatch.setattr(loop, "backward", breaking)
    done = train("run", "warn", "train.steps=30", "checkpoint.every=10", expect=2)
    assert "step 26: loss nan" in done.err and "so training stopped (train.nonfinite: stop)" in done.err
    assert f"The last good checkpoint is {tmp_path / 'run' / 'checkpoints' / 'step-00000010'}" in done.err


@pytest.mark.slow
def test_what_is_not_finite_goes_the_same_way(train: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = loop.backward

    def broken(*arguments: Any, **options: Any) -> Any:
        gradients = backward(*arguments, **options)
        is_bad = 400 in gradients.sample_ids  # in the 26th step
        return replace(gradients, loss=float("nan")) if is_bad else gradients

    monkeypatch.setattr(loop, "backward", broken)
    assert "loss nan" in train("stop", "warn", "train.steps=30", expect=2).err, "train.nonfinite: stop"
    for action, nonfinite, decision in (("skip", "stop", "skip"), ("rollback", "stop", "rollback"),
                                        ("rollback", "skip", "skip")):  # fmt: skip
        out = f"{action}-{nonfinite}"
        train(out, action, "train.steps=30", f"train.nonfinite={nonfinite}")
        (event,) = events(tmp_path / out)
        assert (event["step"], event["rule"], event["decision"]) == (26, "nonfinite", decision)
        assert event["loss"] == "nan"


def test_the_order_of_another_system_has_no_samples_to_spare(train: Call) -> None:
    done = train("never", "rollback", "data.order=megatron", expect=2)
    assert (
        "train.guard.action: rollback passes over samples, but data.order: megatron is laid out for a fixed" in done.err
    )


def test_events_are_of_runs(call: Call, small_store: Path) -> None:
    assert "is not the folder of a run" in call("inspect", small_store, "--events", expect=2).err
