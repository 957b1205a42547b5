"""What train.guard is for: with one poisoned document among the text of one of four ranks, a run with the guard ends
where runs without that document end."""

import contextlib
import io
import json
import runpy
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import gptworks
from gptworks.config.derive import Layout
from gptworks.config.schema import RunConfig
from gptworks.data import prepare
from gptworks.data.store import Store
from gptworks.data.text_blocks import TextRules
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.train import loop

pytestmark = pytest.mark.slow

VOCABULARY, NOWHERE = 600, 590  # the tokenizer has 512: ids from there on are in no text
STEPS, SAMPLES, LENGTH, RANKS = 300, 16, 64, 4
Fill = Callable[[int, np.ndarray], np.ndarray]  # so many tokens, and those of the store
BAD_STEP = range(140, 200)  # one of these reads the document
SEEDS = (1, 2, 3, 4, 5)
SETTINGS = [
    "model.num_layers=2", "model.hidden_size=32", "model.num_heads=2", f"model.vocab_size={VOCABULARY}",
    f"model.max_positions={LENGTH}", "model.tied=false", f"data.seq_len={LENGTH}", "data.split=95,5",
    "data.order=sequential", f"batch.global_size={SAMPLES}", f"train.steps={STEPS}", "optim.lr=5e-3",
    "optim.warmup_steps=20", "checkpoint.every=50", "checkpoint.keep_last=9", "evaluate.every=1000",
    "evaluate.batches=8", "run.device=cpu", "run.threads=1", "train.guard.action=rollback",
]  # fmt: skip


@pytest.fixture(scope="module")
def store(corpus_file: Path, small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More text than 300 steps read, so that no sample comes twice."""
    folder = tmp_path_factory.mktemp("proof")
    make_corpus: Callable[..., str] = runpy.run_path(str(corpus_file.with_name("make_corpus.py")))["make_corpus"]
    (folder / "corpus.txt").write_text(make_corpus(2600, seed=7), encoding="utf-8")
    rules = TextRules(keep_separator=False)
    job = prepare.PrepareJob(
        [str(folder / "corpus.txt")], folder / "clean", small_tokenizer, rules=rules, append_eod=True
    )
    prepare.prepare(job)
    return folder / "clean"


def document_of_one_rank(store: Store) -> int:
    """The longest document of which one rank reads all, in one of BAD_STEP."""
    starts, of_rank = store.document_starts.tolist(), SAMPLES // RANKS * LENGTH
    found = [
        (end - begin, number)
        for number, (begin, end) in enumerate(pairwise(starts))
        if begin // of_rank == (end - 1) // of_rank and begin // of_rank // RANKS + 1 in BAD_STEP
    ]
    return max(found)[1]


def poisoned(clean: Path, folder: Path, fill: Fill) -> tuple[Path, int]:
    """A copy of the store with other tokens in one document, and which."""
    folder.mkdir()
    for file in clean.parent.glob(f"{clean.name}.*"):
        shutil.copy(file, folder / file.name)
    store = Store(folder / clean.name)
    document = document_of_one_rank(store)
    begin, end = store.document_starts[document : document + 2].tolist()
    tokens = np.memmap(store.file, dtype=store.tokens.dtype, mode="r+")
    tokens[begin : end - 1] = fill(end - 1 - begin, tokens)
    tokens.flush()
    return folder / clean.name, document


def settings(store: Path, out: Path, *overrides: str) -> RunConfig:
    return gptworks.load_config(overrides=[*SETTINGS, f"data.path={store}", f"run.out={out}", *overrides])


def trained(cfg: RunConfig) -> float:
    with contextlib.redirect_stdout(io.StringIO()):
        outcome = loop.train(cfg)
    assert outcome.step == cfg.train.steps and outcome.held_out_loss is not None
    return outcome.held_out_loss


@dataclass(frozen=True)
class Healthy:
    """Held-out losses of runs without the document, by their seed."""

    losses: dict[int, float]

    @property
    def middle_seed(self) -> int:
        return sorted(self.losses, key=self.losses.__getitem__)[len(self.losses) // 2]


@pytest.fixture(scope="module")
def healthy(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Healthy:
    folder = tmp_path_factory.mktemp("healthy")
    losses = {seed: trained(settings(store, folder / str(seed), f"train.seed={seed}")) for seed in SEEDS}
    assert not list(folder.glob("*/events.jsonl")), "nothing is wrong with them"
    return Healthy(losses)


def a_model_that_overflows(store: Path, folder: Path, seed: int) -> Path:
    """As seed makes it, but for one row of the embedding, which fp16 cannot hold."""
    fresh = [f"train.seed={seed}", "train.steps=1", "optim.warmup_steps=1", "optim.warmup_from=0"]
    trained(settings(store, folder, *fresh))
    portable = folder / "checkpoints" / "step-00000001" / "portable"
    (file,) = portable.glob("*.safetensors")
    tensors = load_file(file)
    (name,) = [name for name in tensors if name.endswith("wte.weight")]
    tensors[name][NOWHERE] = 1e6
    save_file(tensors, file, {"format": "pt"})
    return portable


def random_ids(count: int, text: np.ndarray) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 512, count)


def one_word_again_and_again(count: int, text: np.ndarray) -> np.ndarray:
    return np.full(count, 300)


def the_most_common_word_again_and_again(count: int, text: np.ndarray) -> np.ndarray:
    """Which the model finds neither hard nor easy."""
    return np.full(count, np.bincount(text).argmax())


def what_overflows(count: int, text: np.ndarray) -> np.ndarray:
    return np.full(count, NOWHERE)


@pytest.mark.parametrize(
    ("fill", "rule"),
    [
        (random_ids, "sample_high"),
        (one_word_again_and_again, "variety"),
        (the_most_common_word_again_and_again, "variety"),
        (what_overflows, "nonfinite"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_a_poisoned_document_is_found_named_and_passed_over_and_the_model_is_as_good_as_without(
    fill: Fill, rule: str, store: Path, healthy: Healthy, run_layout: Any, tmp_path: Path
) -> None:
    path, document = poisoned(store, tmp_path / "data", fill)
    seed, run = healthy.middle_seed, tmp_path / "run"
    more = [f"train.seed={seed}", f"parallel.dp={RANKS}"]
    if fill is what_overflows:
        weights = a_model_that_overflows(store, tmp_path / "fresh", seed)
        more += ["precision.compute=fp16", "precision.scaler.init=64", f"init.checkpoint={weights}"]
    cfg = settings(path, run, *more)

    def on_a_rank(world: World) -> float:
        process_group.start = lambda *_: world  # type: ignore[assignment]
        return trained(cfg)

    held_out, *others = run_layout(Layout(dp=RANKS), on_a_rank)
    assert others == [held_out] * (RANKS - 1)
    (event,) = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert event["step"] in BAD_STEP and (event["decision"], event["rule"]) == ("rollback", rule)
    assert document in {piece["document"] for piece in event["culprit"]["pieces"]}
    assert event["passed_over"] == [[event["back_to"] * SAMPLES, event["step"] * SAMPLES]]
    spread = healthy.losses.values()
    print(fill.__name__, "held-out", held_out, "healthy", sorted(spread), event["rule"])
    assert min(spread) <= held_out <= max(spread), (held_out, sorted(spread))
