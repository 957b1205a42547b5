"""What `gptworks train` refuses, in which words, and that nothing is lost by it."""

import json
import resource
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gptworks.train import run_folder

Call = Callable[..., Any]


def files(folder: Path) -> dict[str, bytes]:
    """All that is in a folder, but not the lock."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.fixture
def other_store(tmp_path: Path, small_tokenizer, corpus_file: Path) -> Path:
    """Other text, same tokenizer."""
    from gptworks.data import prepare

    text = tmp_path / "other.txt"
    text.write_text(corpus_file.read_text(encoding="utf-8").upper(), encoding="utf-8")
    prepare.prepare(prepare.PrepareJob([str(text)], tmp_path / "other", small_tokenizer, append_eod=True))
    return tmp_path / "other"


@pytest.fixture
def foreign_store(tmp_path: Path, corpus_file: Path) -> Path:
    """The same text under another tokenizer of the same size."""
    from gptworks.data import prepare
    from gptworks.tokenizer import Tokenizer

    tokenizer = Tokenizer.train(["quite another text, from which other pieces are learned " * 40], 300)
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], tmp_path / "foreign", tokenizer, append_eod=True))
    return tmp_path / "foreign"


# The run folder


def test_a_folder_that_is_not_empty_needs_resume(recipe: Path, finished: Path, call: Call) -> None:
    before = files(finished)
    done = call("train", "-c", recipe, "--out", finished, expect=2)
    assert f"{finished}: not empty (checkpoints, config.yaml, environment.json, latest, ...)" in done.err
    assert "--resume auto" in done.err
    assert files(finished) == before


def test_someone_elses_folder_is_not_written_to(recipe: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    done = call("train", "-c", recipe, "--out", tmp_path, expect=2)
    assert "not empty (thesis.tex)" in done.err
    assert files(tmp_path) == {"thesis.tex": b"years of work"}


def test_two_writers(recipe: Path, finished: Path, call: Call) -> None:
    before = files(finished)
    with run_folder.locked(finished):
        done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=8", expect=2)
    assert f"{finished}: another process (process " in done.err
    assert "choose another --out" in done.err
    assert files(finished) == before
    call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=8")


@pytest.mark.parametrize("below", ["", "deeper"])
def test_an_out_that_cannot_be_a_folder(below: str, recipe: Path, tmp_path: Path, call: Call) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / below
    done = call("train", "-c", recipe, "--out", out, expect=2)
    assert f"{out}: cannot be written to" in done.err


def test_resume_from_nowhere(recipe: Path, tmp_path: Path, call: Call) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "--resume", tmp_path / "nowhere", expect=2)
    assert f"{tmp_path / 'nowhere'}: no checkpoint here" in done.err


# What may change on resume


@pytest.mark.parametrize(
    ("setting", "change"),
    [
        ("model.hidden_size=64", "model.hidden_size: 32 -> 64"),
        ("model.num_layers=3", "model.num_layers: 2 -> 3"),
        ("model.gelu=erf", "model.gelu: tanh -> erf"),
        ("train.seed=5", "train.seed: 1234 -> 5"),
        ("data.order=sequential", "data.order: shuffled -> sequential"),
        ("data.split='80,20'", "data.split: [90.0, 10.0] -> [80.0, 20.0]"),
        ("data.seq_len=32", "data.seq_len: 16 -> 32"),
        ("data.mask_eod=true", "data.mask_eod: False -> True"),
        ("init.std=0.5", "init.std: 0.02 -> 0.5"),
    ],
)
def test_what_may_not_change(setting: str, change: str, recipe: Path, finished: Path, call: Call) -> None:
    before = files(finished)
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=8", setting, expect=2)
    assert change in done.err
    assert "checkpoints/step-00000006: cannot go on" in done.err
    assert "train.steps" not in done.err, "what may change is not a problem"
    assert files(finished) == before


def test_all_that_may_not_change_is_listed_together(recipe: Path, finished: Path, call: Call) -> None:
    settings = ["model.hidden_size=64", "train.seed=5"]
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", *settings, expect=2)
    assert "model.hidden_size: 32 -> 64" in done.err
    assert "model.ffn_size: 128 -> 256" in done.err
    assert "train.seed: 1234 -> 5" in done.err


def test_what_may_change_is_printed(recipe: Path, finished: Path, call: Call) -> None:
    settings = ["train.steps=7", "optim.lr=1e-4", "model.dropout_hidden=0.1", "train.recompute=full"]
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", *settings)
    assert f"resuming from {finished / 'checkpoints' / 'step-00000006'} (24 samples done)" in done.out
    for change in (
        "train.steps: 6 -> 7",
        "optim.lr: 0.003 -> 0.0001",
        "model.dropout_hidden: 0.0 -> 0.1",
        "train.recompute: none -> full",
    ):
        assert f"changed: {change}" in done.out
    assert "step 7/7" in done.out
    assert "seed" not in done.out


def test_other_data_is_refused(recipe: Path, finished: Path, other_store: Path, call: Call) -> None:
    before = files(finished)
    more = ["--resume", "auto", "train.steps=8", f"data.path={other_store}"]
    done = call("train", "-c", recipe, "--out", finished, *more, expect=2)
    assert "was trained on other data (store " in done.err
    assert files(finished) == before


def test_the_same_store_at_another_place_is_accepted(
    recipe: Path, finished: Path, small_store: Path, tmp_path: Path, call: Call
) -> None:
    moved = Path(shutil.copytree(small_store.parent, tmp_path / "moved")) / small_store.name
    done = call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=7", f"data.path={moved}")
    assert "step 7/7" in done.out


# Tokenizers


def test_resume_with_another_tokenizer(
    recipe: Path, small_store: Path, foreign_store: Path, tmp_path: Path, call: Call
) -> None:
    """The pair of a store that does not say which tokenizer it was made with."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{small_store}{suffix}", tmp_path / f"pair{suffix}")
    common = ["train", "-c", recipe, "--out", tmp_path / "run", f"data.path={tmp_path / 'pair'}"]
    call(*common, f"data.tokenizer={small_store}.tokenizer.json")
    done = call(*common, "--resume", "auto", f"data.tokenizer={foreign_store}.tokenizer.json", expect=2)
    assert f"{tmp_path / 'run' / 'checkpoints' / 'step-00000006'} was made with another tokenizer" in done.err
    assert f"got {foreign_store}.tokenizer.json" in done.err


def test_init_from_a_model_with_another_tokenizer(
    recipe: Path, finished: Path, foreign_store: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "tuned"
    more = [f"init.checkpoint={finished}", f"data.path={foreign_store}"]
    done = call("train", "-c", recipe, "--out", out, *more, expect=2)
    assert "was made with another tokenizer" in done.err
    assert str(finished) in done.err
    assert files(out) == {}, "nothing was trained"


def test_init_from_a_checkpoint_without_a_portable_folder_knows_its_tokenizer_too(
    recipe: Path, foreign_store: Path, tmp_path: Path, call: Call
) -> None:
    call("train", "-c", recipe, "--out", tmp_path / "base", "checkpoint.portable=false", "train.steps=1")
    more = [f"init.checkpoint={tmp_path / 'base'}", f"data.path={foreign_store}", "train.steps=1"]
    done = call("train", "-c", recipe, "--out", tmp_path / "tuned", *more, expect=2)
    assert "was made with another tokenizer" in done.err


def test_data_with_another_tokenizer_than_asked_for(recipe: Path, tmp_path: Path, call: Call) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "data.tokenizer=gpt2", expect=2)
    assert "was made with another tokenizer: got gpt2" in done.err
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_larger_than_the_models(recipe: Path, tmp_path: Path, call: Call) -> None:
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "model.vocab_size=400", expect=2)
    assert "has 512 tokens, but model.vocab_size is 400" in done.err
    assert not (tmp_path / "run").exists()


# Checkpoints


def test_a_checkpoint_of_another_size(recipe: Path, finished: Path, tmp_path: Path, call: Call) -> None:
    more = [f"init.checkpoint={finished}", "model.hidden_size=64", "model.num_layers=3"]
    done = call("train", "-c", recipe, "--out", tmp_path / "tuned", *more, expect=2)
    assert f"{finished}: holds another model" in done.err
    assert "model.hidden_size: 32 there, 64 here" in done.err
    assert "model.num_layers: 2 there, 3 here" in done.err


def test_fine_tuning_from_a_file_with_more_tensors_than_the_model(
    recipe: Path, finished: Path, tmp_path: Path, call: Call
) -> None:
    import safetensors.torch
    import torch

    portable = Path(shutil.copytree(finished / "checkpoints/step-00000006/portable", tmp_path / "hf"))
    tensors = safetensors.torch.load_file(portable / "model.safetensors")
    more = {"transformer.h.2.ln_1.weight": torch.ones(32)}
    safetensors.torch.save_file(tensors | more, portable / "model.safetensors")
    done = call("train", "-c", recipe, "--out", tmp_path / "run", f"init.checkpoint={portable}", expect=2)
    assert "1 that have no place in the model: 'transformer.h.2.ln_1.weight'" in done.err


def test_a_damaged_checkpoint_and_going_back_to_an_earlier_one(
    recipe: Path, finished: Path, call: Call, metrics: Callable[[Path], Any], checked: Callable[[Path], int]
) -> None:
    expected = metrics(finished)
    damaged = finished / "checkpoints" / "step-00000006" / "state" / "__0_0.distcp"
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 1
    damaged.write_bytes(data)
    common = ["train", "-c", recipe, "--out", finished, "checkpoint.keep_last=1", "--resume"]
    done = call(*common, finished / "checkpoints" / "step-00000006", expect=2)
    assert f"{damaged}: contents have changed" in done.err
    assert "--resume auto takes the newest whole one, --resume DIR the one you name" in done.err

    done = call(*common, finished / "checkpoints" / "step-00000004", "train.steps=5")
    assert "later checkpoint set aside:" in done.out
    assert checked(finished) == 5, "the new step 5 counts, not the damaged step 6"
    call(*common, "auto", "train.steps=6")
    assert checked(finished) == 6
    # Step 5 was the last of a shorter run, with a learning rate of its own: what comes before is as it was.
    assert metrics(finished)[:4] == expected[:4]
    assert [line["step"] for line in metrics(finished)] == [1, 2, 3, 4, 5, 6]


# Room on the disk


def with_file_size_limit(kilobytes: int) -> Callable[[], None]:
    """No file may become longer: what the operating system answers is an error while writing, as on a full disk."""
    return partial(resource.setrlimit, resource.RLIMIT_FSIZE, (kilobytes * 1024, kilobytes * 1024))


def test_the_disk_is_full_while_saving(
    recipe: Path,
    finished: Path,
    call: Call,
    run_cli: Call,
    metrics: Callable[[Path], Any],
    checked: Callable[[Path], int],
) -> None:
    before = files(finished / "checkpoints")
    more = ["--resume", "auto", "train.steps=10", "checkpoint.every=2"]
    command = ["train", "-c", recipe, "--out", finished, *more]
    done = run_cli(*command, before=with_file_size_limit(200), expect=2)
    assert "Traceback" not in done.stderr
    assert f"{finished / 'checkpoints' / 'step-00000008'}: could not be saved" in done.stderr
    assert "File too large" in done.stderr
    assert "Earlier checkpoints are untouched" in done.stderr
    assert files(finished / "checkpoints") == before
    assert not list((finished / "checkpoints").glob(".*"))
    assert checked(finished) == 6

    call("train", "-c", recipe, "--out", finished, *more)
    assert checked(finished) == 10
    assert [line["step"] for line in metrics(finished)] == list(range(1, 11))


def test_the_disk_is_full_elsewhere(recipe: Path, tmp_path: Path, run_cli: Call) -> None:
    done = run_cli("train", "-c", recipe, "--out", tmp_path / "run", before=with_file_size_limit(1), expect=2)
    assert "Traceback" not in done.stderr
    assert "File too large. Free some space." in done.stderr
    assert done.stdout == "", "which is a file too, but not the one that was too large"


def test_too_little_room_before_the_first_step(
    recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    done = call("train", "-c", recipe, "--out", tmp_path / "run", expect=2)
    assert f"{tmp_path / 'run'}: 0.0 MB free, but one checkpoint needs 0.7 MB" in done.err
    assert files(tmp_path / "run") == {}


# Numbers that are not finite


def nonfinite(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "nonfinite.jsonl").read_text().splitlines()]


EXPLODES = ["optim.lr=1e38", "optim.schedule=constant", "optim.clip=0"]


def test_a_loss_that_is_not_finite_stops_the_run(recipe: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "run"
    done = call("train", "-c", recipe, "--out", out, *EXPLODES, expect=2)
    assert "step 2: loss " in done.err
    assert "in samples 4, 5, 6, 7: not finite, so training stopped (train.nonfinite: stop)" in done.err
    assert str(out / "nonfinite.jsonl") in done.err
    (entry,) = nonfinite(out)
    assert entry["step"] == 2
    assert entry["sample_ids"] == [4, 5, 6, 7]
    (apart,) = (out / "checkpoints").iterdir()
    assert apart.name == "stopped-step-00000001"
    assert str(apart) in done.err
    manifest = json.loads((apart / "manifest.json").read_text())
    assert manifest["consumed"] == 4, "the bad batch comes again after --resume"


def test_skipping_has_an_end_and_a_count(
    recipe: Path, tmp_path: Path, call: Call, metrics: Callable[[Path], Any]
) -> None:
    out = tmp_path / "run"
    more = ["train.nonfinite=skip", "train.max_skips=3"]
    done = call("train", "-c", recipe, "--out", out, *EXPLODES, *more, expect=2)
    assert "step 2: not finite, skipped (1 in a row)" in done.out
    assert "step 3: not finite, skipped (2 in a row)" in done.out
    assert "(train.max_skips: 3 in a row)" in done.err
    assert [entry["step"] for entry in nonfinite(out)] == [2, 3, 4]
    assert [entry["sample_ids"][0] for entry in nonfinite(out)] == [4, 8, 12]
    assert [line.get("skipped", 0) for line in metrics(out)] == [0, 1, 2]


def test_an_overflow_of_fp16_is_skipped_and_counted(
    recipe: Path, tmp_path: Path, call: Call, metrics: Callable[[Path], Any]
) -> None:
    out = tmp_path / "run"
    more = ["precision.compute=fp16", "precision.scaler.init=1e12", "precision.scaler.backoff=0.001"]
    done = call("train", "-c", recipe, "--out", out, *more)
    assert "step 1: not finite, skipped (1 in a row)" in done.out
    lines = metrics(out)
    assert lines[0]["loss_scale"] == 1e12
    assert lines[0]["grad_norm"] in ("inf", "nan"), "JSON has no infinity: it is a text"
    assert lines[-1]["loss_scale"] < 1e12
    assert lines[-1]["skipped"] == len(nonfinite(out)) > 0
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_fp16_after_fp32_begins_with_its_own_scale(
    recipe: Path, finished: Path, call: Call, metrics: Callable[[Path], Any]
) -> None:
    more = ["precision.compute=fp16", "precision.scaler.init=1024"]
    call("train", "-c", recipe, "--out", finished, "--resume", "auto", "train.steps=7", *more)
    assert metrics(finished)[-1]["loss_scale"] == 1024


# Before anything else


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.path="], "data.path: not set"),
        (["data.path=nowhere/store"], "nowhere/store: no such dataset"),
        (["parallel.tp=3"], "parallel.tp: 3 does not divide"),
        (["train.steps=0"], "how long to train is not said"),
        (["train.epochs=1"], "several ends are given (train.steps=6, train.epochs=1)"),
        (["batch.global_size=5"], "5 is not a multiple of"),
        (["data.seq_len=33"], "33 is longer than model.max_positions (32)"),
        (["data.seq_len=32", "data.split='999,1'"], None),
        (["optim.warmup_steps=7"], "7 is longer than train.steps (6)"),
        (["evaluate.patience=2"], "needs a held-out loss"),
        (["init.checkpoint=nowhere"], "nowhere: no such folder"),
        (["data.weights=[1, 2]"], "2 weights for 1 paths"),
    ],
)
def test_refused_before_training(
    settings: list[str], said: str | None, recipe: Path, tmp_path: Path, call: Call
) -> None:
    out = tmp_path / "run"
    if said is None:  # a held-out part that is empty matters only when it is evaluated
        call("train", "-c", recipe, "--out", out, "--dry-run", *settings)
        settings, said = [*settings, "evaluate.every=1"], "the held_out split has 0 of 160 documents"
    done = call("train", "-c", recipe, "--out", out, *settings, expect=2)
    assert said in done.err
    assert done.err.startswith("error: ")
    assert "Traceback" not in done.err
    assert not out.exists() or files(out) == {}


def test_a_device_that_is_not_there(recipe: Path, tmp_path: Path, call: Call) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    done = call("train", "-c", recipe, "--out", tmp_path / "run", "--device", "cuda", expect=2)
    assert "cuda is not available here" in done.err
    assert "--device cpu" in done.err


def test_verify_takes_the_configuration_of_a_run_for_a_layout(finished: Path, tmp_path: Path, call: Call) -> None:
    """The obvious first try; what is no run is told from an override."""
    asked = call("verify", tmp_path, "--layout", "dp2", expect=2)
    assert "a layout is compared for a configuration. Needed: -c FILE, or a run folder" in asked.err
    refused = call("verify", finished, "--layout", "tp3", expect=2)
    assert "3 does not divide model.num_heads (2)" in refused.err
