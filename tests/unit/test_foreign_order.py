"""Orders of other systems: what they are asked for, and what is refused. Their contents: tests/parity."""

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gptworks.config import DataConfig
from gptworks.data import corpus, prepare
from gptworks.data.dataset import Dataset
from gptworks.data.foreign_order import ORDERS, IndexedSource, build_samples, num_samples, refuse_unfit, sample_index
from gptworks.data.formats import file_names, megatron
from gptworks.data.store import Store
from gptworks.errors import DataError


def write_store(prefix: Path, lengths: list[int]) -> Store:
    sizes = np.array(lengths, np.int32)
    file = io.BytesIO()
    megatron.write_index(file, megatron.Index(np.dtype(np.uint16), sizes, np.arange(len(sizes) + 1)))
    file_names.beside(prefix, ".idx").write_bytes(file.getvalue())
    file_names.beside(prefix, ".bin").write_bytes(np.arange(sizes.sum(), dtype=np.uint16).tobytes())
    return Store(prefix)


@pytest.mark.parametrize(
    ("part", "every", "batches", "expected"),
    [
        ("train", 0, 10, 100 * 8),
        ("train", 30, 10, 100 * 8),
        ("held_out", 30, 10, (3 + 1) * 10 * 8),
        ("held_out", 30, 0, None),  # the whole part: one epoch
    ],
)
def test_how_many_samples_the_originals_ask_for(part: str, every: int, batches: int, expected: int | None) -> None:
    asked = num_samples(part, steps=100, global_size=8, evaluate_every=every, evaluate_batches=batches)
    assert asked == expected


def test_wide_offsets_where_32_bits_do_not_do() -> None:
    """Sequences longer than int32 counts; nothing of that size is read."""
    sizes = np.array([2**31 + 10, 5], np.int64)
    index = sample_index(sizes, np.array([1, 0], np.int32), 2**30, 2)
    assert index.dtype == np.int64
    assert index.tolist() == [[0, 0], [1, 2**30 - 5], [1, 2**31 - 5]]


def test_the_note_says_what_was_laid_out(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [10] * 10)
    cfg = DataConfig(order="megatron", seq_len=9, split=(1.0,))
    source = IndexedSource(store, "train", cfg, 0, 14)
    assert source.note.endswith(
        "as megatron-core would lay out 14 of them, 2 epochs of 10 sequences, the last epoch shuffled apart"
    )
    assert IndexedSource(store, "train", cfg, 0, 22).note.endswith("22 of them, 2 epochs of 10 sequences")


@pytest.mark.parametrize("order", ORDERS)
def test_one_sample_too_many(order: str, tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [10] * 10)
    samples = build_samples([store], "train", DataConfig(order=order, seq_len=9, split=(1.0,)), 0, 5)
    assert len(samples.at(3, 2)) == 2
    with pytest.raises(DataError, match="samples 4 to 5: the order was laid out for 5 samples"):
        samples.at(4, 2)


def test_an_absurd_number_of_samples_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [10] * 10)
    with pytest.raises(DataError, match="keeps a table of all samples, and 10,000,000,000,000 samples"):
        build_samples([store], "train", DataConfig(order="megatron", seq_len=9, split=(1.0,)), 0, 10**13)


@pytest.mark.parametrize("order", ["paddle", "oneflow"])
def test_of_several_stores_each_gives_as_much_as_it_has(order: str, tmp_path: Path) -> None:
    """The originals read one."""
    stores = [write_store(tmp_path / name, lengths) for name, lengths in (("a", [31] * 4), ("b", [31] * 12))]
    cfg = DataConfig(path=("a", "b"), order=order, seq_len=4, split=(1.0,))
    for asked in (8, 400):  # less than an epoch, and several
        samples = build_samples(stores, "train", cfg, 3, asked)
        assert samples.available == asked and samples.blend is not None
        from_the_first = int((samples.blend[0][:asked] == 0).sum())
        assert abs(from_the_first - asked * 30 / (30 + 92)) <= 1
    assert build_samples(stores, "train", cfg, 3, None).available == samples.per_epoch == 30 + 92


def test_several_stores_without_weights_are_gone_through_once(tmp_path: Path) -> None:
    stores = [write_store(tmp_path / name, [30] * 4) for name in "ab"]
    cfg = DataConfig(path=("a", "b"), order="megatron", seq_len=4, split=(1, 1))
    with pytest.raises(DataError, match=r"data.weights: not set.*28 samples, but the run asks for 29"):
        build_samples(stores, "train", cfg, 0, 29)
    assert build_samples(stores, "train", cfg, 0, 28).available == 28
    # In an evaluation there is no more to read than there is.
    assert build_samples(stores, "held_out", cfg, 0, 29).available == 28


def test_a_seed_numpy_does_not_take(tmp_path: Path) -> None:
    write_store(tmp_path / "s", [30] * 4)
    cfg = DataConfig(path=(str(tmp_path / "s"),), order="paddle", seq_len=4)
    with pytest.raises(DataError, match=r"train.seed: 4294967296; data.order: paddle needs one below 4294967296"):
        Dataset(cfg, vocab_size=512, seed=2**32)


@pytest.mark.parametrize("order", ORDERS)
def test_examples_and_rows_have_no_such_order(order: str, small_tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "pairs.jsonl"
    source.write_text('{"prompt": "one", "completion": "two"}\n' * 3)
    rules = corpus.TextRules(keys=("prompt", "completion"))
    prepare.prepare(
        prepare.PrepareJob([str(source)], tmp_path / "pairs", small_tokenizer, rules=rules, append_eod=True)
    )
    cfg = DataConfig(path=(str(tmp_path / "pairs"),), order=order, seq_len=4)
    with pytest.raises(DataError, match=f"data.order: {order} cuts running text.*holds prompts and completions"):
        Dataset(cfg, vocab_size=512)
    rows = write_store(tmp_path / "rows", [5] * 4)
    rows.contents = replace(rows.contents, is_rows=True)
    with pytest.raises(DataError, match="holds rows that are samples already"):
        refuse_unfit([rows], cfg, 0)
