"""Held-out loss and bits per byte against a computation of its own, and the simple models against naive ones."""

import itertools
import math
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptworks.config.schema import DataConfig, InitConfig, ModelConfig
from gptworks.data.dataset import Dataset
from gptworks.errors import DataError
from gptworks.evaluate import baselines
from gptworks.evaluate.heldout import HeldOut, held_out_loss
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt

LENGTH, EOD = 32, 511
CPU = torch.device("cpu")


def tiny(**changes: object) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 520, "max_positions": LENGTH, **changes}
    cfg = ModelConfig.model_validate(shape)
    return build_gpt(cfg, World(CPU), torch.float32, FreshWeights(InitConfig(std=0.1), cfg.num_layers, seed=1)).eval()


def dataset_of(store: Path, **changes: object) -> Dataset:
    cfg = DataConfig.model_validate({"path": str(store), "seq_len": LENGTH, "split": "120,30,10", **changes})
    return Dataset(cfg, vocab_size=520)


@pytest.fixture(scope="module")
def held_out_ids(corpus_file: Path, small_tokenizer: Any) -> list[int]:
    """Tokens of documents 120 to 149, made from the text again."""
    documents = corpus_file.read_text(encoding="utf-8").split("\n\n")[120:150]
    return [token for document in documents for token in [*small_tokenizer.encode(document), EOD]]


def windows_of(ids: list[int]) -> list[list[int]]:
    return [ids[i : i + LENGTH + 1] for i in range(0, len(ids) - LENGTH, LENGTH)]


@torch.no_grad()
def nats_of(model: GPT, windows: list[list[int]], *, mask_eod: bool) -> tuple[float, int]:
    """One window, one target at a time."""
    nats, count = 0.0, 0
    for window in windows:
        log_probabilities = model(torch.tensor([window[:-1]]))[0].double().log_softmax(-1)
        for place, target in enumerate(window[1:]):
            if mask_eod and window[place] == EOD:
                continue
            nats -= log_probabilities[place, target].item()
            count += 1
    return nats, count


@pytest.mark.parametrize("mask_eod", [False, True])
@pytest.mark.parametrize("micro_size", [1, 11])
def test_the_loss_equals_an_independent_one(
    small_store: Path, held_out_ids: list[int], mask_eod: bool, micro_size: int
) -> None:
    model, dataset = tiny(), dataset_of(small_store, mask_eod=mask_eod)
    got = held_out_loss(model, dataset.samples("held_out"), dataset.eod_policy, micro_size=micro_size, device=CPU)
    windows = windows_of(held_out_ids)
    nats, count = nats_of(model, windows, mask_eod=mask_eod)
    assert len(windows) % 11, "the last batch is meant to be smaller"
    assert (got.samples, got.tokens) == (len(windows), count)
    assert got.nats == pytest.approx(nats, rel=1e-6)
    assert got.loss == pytest.approx(nats / count, rel=1e-6)
    assert got.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert got.bits_per_byte is None
    assert (count < len(windows) * LENGTH) == mask_eod


def test_bits_per_byte(small_store: Path, held_out_ids: list[int], small_tokenizer: Any) -> None:
    model, dataset = tiny(), dataset_of(small_store)
    got = held_out_loss(
        model,
        dataset.samples("held_out"),
        dataset.eod_policy,
        micro_size=16,
        device=CPU,
        byte_lengths=small_tokenizer.byte_lengths,
    )
    windows = windows_of(held_out_ids)
    nats, _ = nats_of(model, windows, mask_eod=False)
    text = small_tokenizer.decode([token for window in windows for token in window[1:]])
    assert "<|endoftext|>" in text and "\ufffd" not in text and not text.isascii()
    num_bytes = len(text.replace("<|endoftext|>", "").encode("utf-8"))
    assert got.text_bytes == num_bytes
    assert got.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)


def test_only_the_first_batches_when_asked(small_store: Path, held_out_ids: list[int]) -> None:
    model, dataset = tiny(), dataset_of(small_store)
    samples = dataset.samples("held_out")
    got = held_out_loss(model, samples, dataset.eod_policy, micro_size=3, num_samples=6, device=CPU)
    nats, count = nats_of(model, windows_of(held_out_ids)[:6], mask_eod=False)
    assert (got.samples, got.tokens) == (6, count)
    assert got.nats == pytest.approx(nats, rel=1e-6)
    larger = held_out_loss(model, samples, dataset.eod_policy, micro_size=4, num_samples=6, device=CPU)
    assert (larger.samples, larger.tokens) == (6, count)  # whatever the micro-batch
    assert larger.nats == pytest.approx(nats, rel=1e-6)
    everything = held_out_loss(model, samples, dataset.eod_policy, micro_size=3, num_samples=10**6, device=CPU)
    assert everything.samples == len(windows_of(held_out_ids))


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_off_and_the_mode_comes_back(small_store: Path, training: bool) -> None:
    dataset = dataset_of(small_store)
    samples = dataset.samples("held_out")
    model = tiny(dropout_hidden=0.5).train(training)
    got = held_out_loss(model, samples, dataset.eod_policy, micro_size=8, num_samples=8, device=CPU)
    plain = held_out_loss(tiny(), samples, dataset.eod_policy, micro_size=8, num_samples=8, device=CPU)
    assert got.nats == plain.nats
    assert model.training is training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_mode_comes_back_after_a_failure_too(small_store: Path) -> None:
    dataset = dataset_of(small_store)
    model = tiny(vocab_size=100).train()
    with pytest.raises(DataError, match="100"):
        held_out_loss(model, dataset.samples("held_out"), dataset.eod_policy, micro_size=8, device=CPU)
    assert model.training


def test_the_perplexity_of_a_hopeless_model_is_infinite_and_no_error() -> None:
    assert HeldOut(nats=1e6, tokens=10, text_bytes=0, samples=1).perplexity == math.inf
    assert HeldOut(nats=6990.0, tokens=10, text_bytes=0, samples=1).perplexity == pytest.approx(math.exp(699))


# Simple models


@pytest.fixture(scope="module")
def sequences() -> tuple[np.ndarray, np.ndarray]:
    """(training tokens, measured tokens) of a vocabulary of 12, with pairs and tokens that training has not seen."""
    generator = np.random.default_rng(0)
    train = (generator.integers(0, 10, 400) * generator.integers(0, 2, 400)).astype(np.uint16)
    measured = generator.integers(0, 12, 150).astype(np.uint16)
    assert {10, 11} <= set(measured.tolist()) - set(train.tolist())
    return train, measured


def naive_unigram(train: list[int], vocab_size: int) -> list[float]:
    counts = Counter(train)
    return [(counts[token] + 1) / (len(train) + vocab_size) for token in range(vocab_size)]


def test_unigram_equals_a_naive_one(sequences: tuple[np.ndarray, np.ndarray]) -> None:
    train, measured = sequences
    probabilities = naive_unigram(train.tolist(), 12)
    assert sum(probabilities) == pytest.approx(1.0)
    expected = -sum(math.log2(probabilities[token]) for token in measured.tolist())
    assert baselines.unigram_bits(train, measured, 12) == pytest.approx(expected, rel=1e-12)


def naive_bigram(train: list[int], vocab_size: int) -> list[list[float]]:
    """p(next | context): each seen pair gives up 0.75 of its count, which is shared out by the unigram."""
    unigram = naive_unigram(train, vocab_size)
    followers = [Counter(b for a, b in itertools.pairwise(train) if a == c) for c in range(vocab_size)]
    table = []
    for seen in followers:
        total = sum(seen.values())
        if total == 0:
            table.append(unigram)
            continue
        left = 0.75 * len(seen) / total
        table.append([max(seen[t] - 0.75, 0) / total + left * unigram[t] for t in range(vocab_size)])
    return table


def test_bigram_equals_a_naive_one(sequences: tuple[np.ndarray, np.ndarray]) -> None:
    train, measured = sequences
    table = naive_bigram(train.tolist(), 12)
    for row in table:
        assert sum(row) == pytest.approx(1.0)
    pairs = list(itertools.pairwise(measured.tolist()))
    expected = -sum(math.log2(table[context][target]) for context, target in pairs)
    got = baselines.bigram_bits(train, measured[:-1], measured[1:], 12)
    assert got == pytest.approx(expected, rel=1e-12)


def test_a_bigram_beats_a_unigram_on_real_text(small_store: Path, held_out_ids: list[int]) -> None:
    ids = np.array(held_out_ids, dtype=np.uint16)
    every = np.fromfile(small_store.with_suffix(".bin"), dtype=np.uint16)
    start = next(i for i in range(len(every)) if np.array_equal(every[i : i + len(ids)], ids))
    train = every[:start]
    unigram = baselines.unigram_bits(train, ids[1:], 512)
    bigram = baselines.bigram_bits(train, ids[:-1], ids[1:], 512)
    uniform = 9.0 * (len(ids) - 1)
    assert bigram < 0.8 * unigram < 0.8 * uniform


def test_gzip_counts_compressed_bits() -> None:
    text = "naïve " * 100
    deflate = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = deflate.compress(text.encode("utf-8")) + deflate.flush()
    assert baselines.gzip_bits(text) == 8 * (10 + len(body) + 8)  # with gzip's header and trailer
