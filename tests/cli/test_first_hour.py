"""What a run does where nobody says: its batch, its evaluation, its vocabulary, its log."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gptworks
from gptworks.config import load

Call = Callable[..., Any]
Metrics = Callable[[Path], list[dict[str, Any]]]
# A model of the size of the quickstart's would take seconds: a thinner one, whose usual batch is the same.
SMALL = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=1", "model.max_positions=64", "run.threads=1"]
SMALL += ["run.device=cpu", "optim.lr=3e-3"]


def held_out(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(line["step"], line["held_out_tokens"]) for line in lines if "held_out_loss" in line]


def test_a_run_of_which_little_is_said(small_store: Path, tmp_path: Path, call: Call, metrics: Metrics) -> None:
    out = tmp_path / "run"
    done = call("train", *SMALL, f"data.path={small_store}", "data.split=90,10", "train.steps=20", "--out", out)
    # 2,048 tokens of a step are 32 samples of 64, as `plan` says too.
    assert "batch: 32 samples of 64 tokens = 32 micro-batch x 1 accumulation x 1 data-parallel" in done.out
    planned = json.loads(call("plan", *SMALL, "--device", "cpu", "--json").out)
    assert planned["settings"]["batch.global_size"] == 32 and planned["settings"]["batch.micro_size"] == 32
    # Something is held out, so it is evaluated: with every log line, since a tenth of the run is more often.
    assert [step for step, _ in held_out(metrics(out))] == [10, 20]
    assert "step 20: held-out loss " in done.out
    # The vocabulary and the end of a document are those of the store.
    config = load(out / "config.yaml")
    assert config.model.vocab_size == 512 and config.batch.global_size == 0 and config.evaluate.every == "auto"
    portable = json.loads((out / "checkpoints" / "step-00000020" / "portable" / "config.json").read_text())
    sidecar = json.loads(small_store.with_suffix(".json").read_text())
    assert (portable["vocab_size"], portable["eos_token_id"]) == (512, sidecar["eod_id"])
    assert "model.vocab_size:" not in done.out  # nothing of it is unused
    # The same run goes on: what was derived is derived again.
    again = call("train", "-c", out / "config.yaml", "train.steps=30", "--resume", "auto")
    assert "step 30/30" in again.out and held_out(metrics(out))[-1][0] == 30


def test_what_is_derived_is_shown_with_its_origin(small_store: Path, call: Call) -> None:
    shown = call("config", "show", "--origin", f"data.path={small_store}", "train.steps=500", *SMALL).out.splitlines()
    lines = {line.split(":")[0]: " ".join(line.split()) for line in shown}
    assert lines["batch.global_size"] == ("batch.global_size: 32 # derived: suits a model of this size, 64 tokens each")
    assert lines["batch.micro_size"] == "batch.micro_size: 32 # derived: from the rest of the batch"
    assert lines["evaluate.every"] == "evaluate.every: 50 # derived: a tenth of train.steps, or train.log_every"
    assert lines["model.vocab_size"] == f"model.vocab_size: 512 # tokenizer of {small_store}"
    assert gptworks.load_config(overrides=[f"data.path={small_store}"]).model.vocab_size == 512, "in Python too"


def test_rows_that_no_token_uses_are_said_with_the_saving(recipe: Path, tmp_path: Path, call: Call) -> None:
    """2 x 32 with 40,000 rows: 39,488 of them are unused, 1,263,616 of 1,306,752 parameters. Below a million (31,762
    rows) it is not worth a word, however large the share."""
    done = call("train", "-c", recipe, "model.vocab_size=40000", "train.steps=1", "--out", tmp_path / "run")
    assert (
        "note:  model.vocab_size: 40,000 rows, but the tokenizer of the data has 512 tokens. A new run with "
        "model.vocab_size=512 saves 1.3M of 1.3M parameters (97%)." in done.out
    )
    few = call("train", "-c", recipe, "model.vocab_size=31700", "train.steps=1", "--out", tmp_path / "few")
    assert "model.vocab_size" not in few.out
    tuned = ["init.checkpoint=" + str(tmp_path / "run"), "model.vocab_size=40000", "train.steps=1"]
    assert "note:  model.vocab_size" not in call("train", "-c", recipe, *tuned, "--out", tmp_path / "tuned").out


def test_a_corpus_that_leaves_nothing_to_evaluate_on(tmp_path: Path, call: Call, metrics: Metrics) -> None:
    """Nobody asked for an evaluation: it is off, and that is said. Who asks for it is refused."""
    text, store = tmp_path / "two.txt", tmp_path / "two"
    text.write_text("one two three four five six\n\nseven eight nine ten eleven twelve\n")
    call("prepare", text, "--train-tokenizer", "300", "--append-eod", "--out", store)
    said = [*SMALL, "data.seq_len=4", f"data.path={store}", "train.steps=1", "batch.global_size=2"]
    done = call("train", *said, "--out", tmp_path / "run")
    assert f"note:  no evaluation: {store}.bin: the held_out split has 0 of 2 documents" in done.out
    assert held_out(metrics(tmp_path / "run")) == []
    for asked in ("evaluate.every=1", "checkpoint.keep_best=true"):
        err = call("train", *said, asked, "--out", tmp_path / "asked", expect=2).err
        assert "the held_out split has 0 of 2 documents" in err and not (tmp_path / "asked").exists()


def test_the_held_out_loss_does_not_depend_on_the_micro_batch(
    recipe: Path, tmp_path: Path, call: Call, metrics: Metrics
) -> None:
    found = []
    for micro in (1, 4):
        out = tmp_path / f"micro{micro}"
        said = [f"batch.micro_size={micro}", "evaluate.every=2", "evaluate.batches=2", "train.steps=2"]
        call("train", "-c", recipe, *said, "--out", out)
        found.append([line for line in metrics(out) if "held_out_loss" in line])
    (one,), (four,) = found
    assert one["held_out_tokens"] == four["held_out_tokens"] == 2 * 4 * 16  # two batches of four samples of 16
    assert one["held_out_loss"] == pytest.approx(four["held_out_loss"], abs=5e-6)


# The log


@pytest.mark.slow
def test_a_logged_loss_is_the_mean_since_the_last_line(
    recipe: Path, tmp_path: Path, call: Call, metrics: Metrics
) -> None:
    """Also over a checkpoint that lies between two lines."""
    every, some = tmp_path / "every", tmp_path / "some"
    call("train", "-c", recipe, "--out", every)
    call("train", "-c", recipe, "train.log_every=4", "--out", some)
    losses = [line["loss"] for line in metrics(every)]
    assert len(losses) == 6 and len(set(losses)) == 6
    logged = {line["step"]: line["loss"] for line in metrics(some)}
    assert logged.keys() == {4, 6}
    assert logged[4] == pytest.approx(sum(losses[:4]) / 4, rel=1e-12)
    assert logged[6] == pytest.approx(sum(losses[4:]) / 2, rel=1e-12)
    before = metrics(some)
    resumed = call("train", "-c", some / "config.yaml", "--resume", some / "checkpoints" / "step-00000002")
    assert "resuming from" in resumed.out
    assert metrics(some) == before


def test_compiling_is_said(recipe: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without doing it: what is said comes before the first step."""
    from gptworks.train import run

    monkeypatch.setattr(run, "can_compile", lambda _: True)
    build = run.build_part
    monkeypatch.setattr(
        run,
        "build_part",
        lambda cfg, *rest: build(
            cfg.model_copy(update={"train": cfg.train.model_copy(update={"compile": False})}), *rest
        ),
    )
    done = call("train", "-c", recipe, "train.compile=true", "train.steps=1", "--out", tmp_path / "run")
    said = "train.compile: the first step compiles the blocks, which may take a minute; later steps are faster"
    assert done.out.index(said) < done.out.index("step 1/1")
