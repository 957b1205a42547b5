"""train.guard with several ranks: one poisoned document, read by one of them; other layouts decide the same."""

import contextlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gptworks
from gptworks.checkpoint import manifest as manifests
from gptworks.config.derive import Layout
from gptworks.config.schema import RunConfig
from gptworks.data.store import Store
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.train import loop

RunLayout = Callable[..., list[Any]]
Fill = Callable[[int], np.ndarray]
DOCUMENT, VOCABULARY, RARE = 80, 1024, 1000


def random_ids(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, VOCABULARY, count)


def a_long_repetition(count: int) -> np.ndarray:
    return np.full(count, RARE)


def poisoned(store: Path, folder: Path, fill: Fill) -> Path:
    """A copy of a store with other tokens in one document."""
    folder.mkdir()
    for file in store.parent.glob(f"{store.name}*"):
        shutil.copy(file, folder / file.name)
    copied = Store(folder / store.name)
    begin, end = copied.document_starts[DOCUMENT : DOCUMENT + 2].tolist()
    tokens = np.memmap(copied.file, dtype=copied.tokens.dtype, mode="r+")
    tokens[begin : end - 1] = fill(end - 1 - begin)
    tokens.flush()
    return folder / store.name


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(store: Path, out: str, *overrides: str) -> RunConfig:
        model = ["num_layers=2", "hidden_size=16", "num_heads=2", f"vocab_size={VOCABULARY}", "max_positions=32"]
        data = [f"data.path={store}", "data.split=90,10", "data.seq_len=32", "data.order=sequential"]
        steps = ["batch.global_size=8", "train.steps=75", "train.log_every=1", "checkpoint.every=20", "optim.lr=3e-3"]
        here = [f"run.out={tmp_path / out}", "run.device=cpu", "run.threads=1", "evaluate.every=0"]
        guard = ["train.guard.action=rollback", "train.guard.window=16", "checkpoint.portable=false"]
        return gptworks.load_config(
            overrides=[*(f"model.{word}" for word in model), *data, *steps, *here, *guard, *overrides]
        )

    return make


def train(cfg: RunConfig, world: World, **options: Any) -> tuple[Any, str]:
    process_group.start = lambda *_: world  # type: ignore[assignment]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return loop.train(cfg, **options), printed.getvalue()


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def decisions(run: Path) -> list[Any]:
    names = ("step", "rule", "decision", "sample_ids", "back_to", "passed_over", "rollback")
    return [[event.get(name) for name in names] + [event["culprit"]["sample"]] for event in events(run)]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


FOUR = Layout(dp=4)
OTHERS = [Layout(), Layout(fsdp=2, tp=2), Layout(pp=2, dp=2)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_other_layouts_decide_the_same_and_pass_over_the_same_samples(
    layout: Layout, small_store: Path, configured: Any, run_layout: RunLayout, tmp_path: Path
) -> None:
    store = poisoned(small_store, tmp_path / "data", random_ids)
    four = run_layout(FOUR, lambda world: train(configured(store, "four", "parallel.dp=4"), world))
    found = decisions(tmp_path / "four")
    assert [outcome.step for outcome, _ in four] == [75] * 4
    assert "rollback" in [event["decision"] for event in events(tmp_path / "four")]
    assert all(
        DOCUMENT in {piece["document"] for piece in event["culprit"]["pieces"]} for event in events(tmp_path / "four")
    )
    assert four[1][1] == "", "only the main process speaks"

    degrees = [f"parallel.{axis}={degree}" for axis, degree in vars(layout).items() if degree > 1]
    micro = ["batch.micro_size=2"] if layout.pp > 1 else []
    run_layout(layout, lambda world: train(configured(store, "other", *degrees, *micro), world))
    assert decisions(tmp_path / "other") == found
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "four"), abs=2e-4)

    # Stopped before the document on four ranks, and gone on with the other layout.
    stop = found[0][0] - 4
    until = [f"train.steps={stop}", "optim.decay_steps=75", "parallel.dp=4"]
    run_layout(FOUR, lambda world: train(configured(store, "both", *until), world))
    more = ["optim.decay_steps=75", *degrees, *micro]
    run_layout(layout, lambda world: train(configured(store, "both", *more), world, resume_from="auto"))
    assert decisions(tmp_path / "both") == found
    last = manifests.read(tmp_path / "both" / "checkpoints" / "step-00000075")
    assert last.passed_over == manifests.read(tmp_path / "four" / "checkpoints" / "step-00000075").passed_over


@pytest.mark.slow
def test_an_overflow_of_fp16_in_one_document(small_store: Path, configured: Any, run_layout, tmp_path: Path) -> None:
    """An embedding that fp16 cannot hold: the loss of whatever has this id is not finite, whatever the loss scale."""
    clean = configured(
        small_store, "clean", "train.steps=1", "train.guard.action=off", "model.tied=false", "checkpoint.portable=true"
    )
    run_layout(Layout(), lambda world: train(clean, world))
    portable = tmp_path / "clean" / "checkpoints" / "step-00000001" / "portable"
    from safetensors.torch import load_file, save_file

    (file,) = portable.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("wte.weight")]
    tensors[name][RARE] = 1e6
    save_file(tensors, file, {"format": "pt"})
    store = poisoned(small_store, tmp_path / "data", a_long_repetition)
    half = ["precision.compute=fp16", "model.tied=false", f"init.checkpoint={portable}", "precision.scaler.init=64"]
    four = run_layout(FOUR, lambda world: train(configured(store, "half", "parallel.dp=4", *half), world))
    assert [outcome.step for outcome, _ in four] == [75] * 4
    found = events(tmp_path / "half")
    assert found and {(event["rule"], event["decision"]) for event in found} == {("nonfinite", "rollback")}
    for event in found:
        assert DOCUMENT in {piece["document"] for piece in event["culprit"]["pieces"]}
        assert event["culprit"]["loss"] == "nan"
    assert all(np.isfinite(losses(tmp_path / "half")))


# A model that learns for a while


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_healthy_run_of_500_steps_triggers_nothing(
    seed: int, small_store: Path, configured: Any, run_layout: RunLayout, tmp_path: Path
) -> None:
    """With the default window: a short one takes the rise of the gradient norm after the warmup for a bad step."""
    healthy = configured(
        small_store, "healthy", "data.order=shuffled", "train.steps=500", f"train.seed={seed}", "checkpoint.every=25",
        "optim.warmup_steps=20", "model.hidden_size=32", "train.guard.window=64",
    )  # fmt: skip
    ((outcome, _),) = run_layout(Layout(), lambda world: train(healthy, world))
    assert outcome.step == 500
    assert not (tmp_path / "healthy" / "events.jsonl").exists()
