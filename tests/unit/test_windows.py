"""Documents to samples: windows over text, prompts with completions, several stores, and one order for all."""

import io
import json
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import DataConfig
from gptworks.data import corpus, prepare
from gptworks.data.formats import megatron
from gptworks.data.formats.file_names import beside
from gptworks.data.mixture import Stage
from gptworks.data.store import Sidecar, Store
from gptworks.data.windows import Sample, Samples, Windows, build_samples, build_source
from gptworks.errors import DataError


def write_store(prefix: Path, documents: list[list[int]]) -> Store:
    """A store as Megatron leaves it, without a sidecar. One sequence per document."""
    sizes = np.array([len(document) for document in documents], np.int32)
    file = io.BytesIO()
    megatron.write_index(file, megatron.Index(np.dtype(np.uint16), sizes, np.arange(len(documents) + 1)))
    beside(prefix, ".idx").write_bytes(file.getvalue())
    beside(prefix, ".bin").write_bytes(np.array([t for d in documents for t in d], np.uint16).tobytes())
    return Store(prefix)


def data_config(seq_len: int, split: tuple[float, ...] = (1,), **values: object) -> DataConfig:
    return DataConfig(seq_len=seq_len, split=split, **values)


def lists(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


# Windows over text


@given(st.integers(0, 100), st.integers(1, 12))
def test_windows_cover_the_text_and_predict_every_token_once(num_tokens: int, seq_len: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    windows = Windows(tokens, seq_len)
    expected = [
        tokens[start : start + seq_len + 1].tolist()
        for start in range(0, num_tokens, seq_len)
        if start + seq_len < num_tokens
    ]
    assert lists([windows.sample(i) for i in range(len(windows))]) == expected
    targets = [token for window in expected for token in window[1:]]
    assert targets == list(range(1, 1 + len(expected) * seq_len))


def test_samples_are_wide_integers_and_all_scored(small_store: Path) -> None:
    source = build_source(Store(small_store), "train", data_config(16))
    sample = source.sample(3)
    assert sample.tokens.dtype == np.int64 and sample.tokens.shape == (17,)
    assert sample.scored is None


def test_parts_hold_their_own_documents_and_nothing_else(tmp_path: Path) -> None:
    store = write_store(tmp_path / "s", [[document] * 9 for document in range(10)])
    cfg = data_config(4, split=(6, 3, 1))
    seen = {}
    for part in ("train", "held_out", "test"):
        source = build_source(store, part, cfg)
        seen[part] = {int(t) for i in range(len(source)) for t in source.sample(i).tokens}
    assert seen == {"train": set(range(6)), "held_out": {6, 7, 8}, "test": {9}}


def test_documents_of_several_sequences_stay_together(tmp_path: Path) -> None:
    file = io.BytesIO()
    index = megatron.Index(np.dtype(np.uint16), np.array([3, 2, 4], np.int32), np.array([0, 2, 3]))
    megatron.write_index(file, index)
    (tmp_path / "s.idx").write_bytes(file.getvalue())
    (tmp_path / "s.bin").write_bytes(np.arange(9, dtype=np.uint16).tobytes())
    cfg = data_config(2, split=(1, 1))
    assert lists(build_samples([Store(tmp_path / "s")], "held_out", cfg, 0).at(0, 1)) == [[5, 6, 7]]


def test_text_smaller_than_one_window(small_store: Path) -> None:
    store = Store(small_store)
    tokens = len(store.tokens)
    assert len(build_source(store, "train", data_config(tokens - 1))) == 1
    with pytest.raises(DataError) as caught:
        build_source(store, "train", data_config(tokens))
    assert str(caught.value) == (
        f"{small_store}.bin: the train split has 160 of 160 documents and {tokens:,} tokens; "
        f"one sample needs {tokens + 1}. Use more text, a smaller data.seq_len, or another data.split (now 1)."
    )


def test_part_without_documents(small_store: Path) -> None:
    with pytest.raises(DataError, match=r"the test split has 0 of 160 documents and 0 tokens.*\(now 90,10\)"):
        build_source(Store(small_store), "test", data_config(8, split=(90, 10)))


# Prompt and completion


@pytest.fixture
def examples(small_tokenizer, tmp_path: Path):
    """examples({"q": ..., "a": ...}, ...) -> a store of prompts and completions."""

    def make(*records: dict[str, str]) -> Store:
        source = tmp_path / "examples.jsonl"
        source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        rules = corpus.TextRules(keys=("q", "a"))
        prepare.prepare(
            prepare.PrepareJob([str(source)], tmp_path / "examples", small_tokenizer, rules=rules, append_eod=True)
        )
        return Store(tmp_path / "examples")

    return make


RECORDS = [
    {"q": "What did Anna find?", "a": " a silver key"},
    {"q": "", "a": "no prompt at all"},
    {"q": "x", "a": "y"},
    {"q": "Where did the captain go on Sunday morning?", "a": " to the harbour"},
]


def test_only_the_completion_and_its_end_are_scored(examples, small_tokenizer) -> None:
    source = build_source(examples(*RECORDS), "train", data_config(64))
    assert len(source) == len(RECORDS)
    for number, record in enumerate(RECORDS):
        sample = source.sample(number)
        prompt, completion = small_tokenizer.encode(record["q"]), [*small_tokenizer.encode(record["a"]), 511]
        text = prompt + completion
        assert sample.tokens.tolist() == text + [511] * (65 - len(text))
        # Target i is token i + 1; the very first token of the text has nothing that could predict it.
        expected = [len(prompt) <= i + 1 < len(text) for i in range(64)]
        assert sample.scored.tolist() == expected
        scored_targets = sample.tokens[1:][sample.scored].tolist()
        assert scored_targets == (completion if prompt else completion[1:])


def test_examples_longer_than_a_sample(examples, small_tokenizer) -> None:
    store = examples(*RECORDS)
    lengths = [len(small_tokenizer.encode(r["q"]) + small_tokenizer.encode(r["a"])) + 1 for r in RECORDS]
    longest = max(lengths)
    assert longest == lengths[3] and sorted(lengths)[-2] < longest
    assert len(build_source(store, "train", data_config(longest - 1))) == 4
    with pytest.raises(DataError) as caught:
        build_source(store, "train", data_config(longest - 2))
    assert str(caught.value) == (
        f"{store.file}: 1 of 4 examples do not fit data.seq_len + 1 = {longest - 1} tokens (longest {longest}, "
        f"first is document 3). Set data.seq_len={longest - 1}, or data.too_long: truncate or skip."
    )
    skipping = build_source(store, "train", data_config(longest - 2, too_long="skip"))
    assert len(skipping) == 3
    assert skipping.note.endswith(f"1 of 4 examples are longer than {longest - 1} tokens and are left out")
    assert build_source(store, "train", data_config(longest - 1)).note == ""
    cut = build_source(store, "train", data_config(longest - 2, too_long="truncate")).sample(3)
    whole = build_source(store, "train", data_config(longest - 1)).sample(3)
    assert cut.tokens.tolist() == whole.tokens[:-1].tolist()
    assert cut.scored.tolist() == whole.scored[:-1].tolist()


def test_a_prompt_that_fills_the_whole_sample_scores_nothing(examples) -> None:
    source = build_source(
        examples({"q": "a very long prompt " * 5, "a": "b"}), "train", data_config(8, too_long="truncate")
    )
    assert source.sample(0).scored.sum() == 0


def test_all_examples_too_long_to_keep(examples) -> None:
    with pytest.raises(DataError, match=r"the train split has 1 of 1 document and .* tokens; one sample needs 3"):
        build_source(examples({"q": "a long prompt", "a": "b"}), "train", data_config(2, too_long="skip"))


def test_examples_are_split_by_documents(examples, small_tokenizer) -> None:
    store = examples(*RECORDS)
    held_out = build_source(store, "held_out", data_config(64, split=(3, 1)))
    assert len(held_out) == 1
    assert small_tokenizer.decode(held_out.sample(0).tokens).startswith("Where did the captain")


def test_sidecar_that_takes_text_for_examples(examples, small_store: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        beside(tmp_path / "t", suffix).write_bytes(beside(small_store, suffix).read_bytes())
    text = json.loads(beside(small_store, ".json").read_text())
    Sidecar(**{**text, "kind": "examples"}).write(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"t\.json: says prompts and completions, but document 0 of"):
        build_source(Store(tmp_path / "t"), "train", data_config(64))
    store = examples(*RECORDS)
    sidecar = store.located.sidecar
    sidecar.write_text(json.dumps({**json.loads(sidecar.read_text()), "eod_id": None}))
    with pytest.raises(DataError, match="the end-of-document token is missing"):
        build_source(Store(store.file), "train", data_config(64))


# Order, epochs, several stores


def sample_numbers(samples: Samples, first: int, count: int) -> list[int]:
    """Windows of seq_len 1 over 0, 1, 2, ...: a sample's first token is its own number."""
    return [int(sample.tokens[0]) for sample in samples.at(first, count)]


def counting(*sizes: int, weights: tuple[float, ...] = (), seed: int = 0, shuffled: bool = True) -> Samples:
    sources, start = [], 0
    for size in sizes:
        sources.append(Windows(np.arange(start, start + size + 1, dtype=np.int64), 1))
        start += size
    return Samples(sources, [Stage(0, weights)] if weights else [], seed=seed, shuffled=shuffled)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=4), st.integers(0, 99))
def test_every_epoch_has_every_sample_once_in_another_order(sizes: list[int], seed: int) -> None:
    samples = counting(*sizes, seed=seed)
    total = samples.per_epoch
    assert total == sum(sizes)
    epochs = [sample_numbers(samples, epoch * total, total) for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(total))
    if total > 20:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@given(st.integers(0, 500), st.integers(0, 40), st.data())
def test_samples_depend_on_their_index_alone(first: int, count: int, data: st.DataObject) -> None:
    weights = data.draw(st.sampled_from([(), (1.0, 3.0, 2.0)]))
    samples = counting(30, 11, 50, weights=weights, seed=5)
    cut = data.draw(st.integers(0, count))
    together = sample_numbers(samples, first, count)
    assert together == sample_numbers(samples, first, cut) + sample_numbers(samples, first + cut, count - cut)
    # another object, asked for something else before
    other = counting(30, 11, 50, weights=weights, seed=5)
    other.at(77, 13)
    assert together == [number for i in range(first, first + count) for number in sample_numbers(other, i, 1)]


def test_another_seed_is_another_order() -> None:
    assert sample_numbers(counting(100, seed=1), 0, 100) != sample_numbers(counting(100, seed=2), 0, 100)


def test_sequential_order(tmp_path: Path) -> None:
    assert sample_numbers(counting(4, 3, shuffled=False), 0, 16) == [*range(7), *range(7), 0, 1]
    store = write_store(tmp_path / "s", [list(range(41))])
    samples = build_samples([store], "train", data_config(4, order="sequential"), seed=3)
    assert [sample[0] for sample in lists(samples.at(0, 10))] == list(range(0, 40, 4))


def test_without_weights_stores_are_mixed_in_proportion(tmp_path: Path) -> None:
    numbers = sample_numbers(counting(300, 100, seed=4), 0, 400)
    from_second = [number >= 300 for number in numbers]
    assert sum(from_second) == 100
    assert 5 < sum(from_second[:80]) < 40  # spread over the epoch, not appended


def test_weights_decide_the_shares_whatever_the_sizes() -> None:
    samples = counting(10, 1000, weights=(3.0, 1.0))
    numbers = sample_numbers(samples, 0, 4096)
    first = [number for number in numbers if number < 10]
    second = [number for number in numbers if number >= 10]
    assert (len(first), len(second)) == (3072, 1024)
    # The small store is gone through again and again, the large one once and a bit.
    assert max(Counter(first).values()) - min(Counter(first).values()) <= 1
    assert set(Counter(second).values()) == {1, 2} and len(set(second)) == 1000


def test_weights_of_the_config_reach_the_samples(small_store: Path, tmp_path: Path) -> None:
    other = write_store(tmp_path / "other", [[600] * 9] * 50)
    cfg = data_config(8, path=("a", "b"), weights=(1.0, 7.0))
    train = build_samples([Store(small_store), other], "train", cfg, seed=0)
    share = sum(sample.tokens[0] == 600 for sample in train.at(0, 1024))
    assert share == 896


@pytest.mark.parametrize("weights", [(), (1.0, 9.0)])
def test_evaluation_reads_each_sample_of_every_store_once_and_in_order(weights, tmp_path: Path) -> None:
    """However the stores are weighted in training, and whatever the seed."""
    one = write_store(tmp_path / "one", [list(range(41)), list(range(100, 141))])
    two = write_store(tmp_path / "two", [list(range(200, 241)), list(range(300, 381))])
    cfg = data_config(8, split=(1, 1), path=("a", "b"), weights=weights)
    samples = build_samples([one, two], "held_out", cfg, seed=9)
    assert samples.per_epoch == 5 + 10
    assert [sample[0] for sample in lists(samples.at(0, 15))] == [*range(100, 140, 8), *range(300, 380, 8)]


def test_order_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    documents = [list(range(i, i + 30)) for i in range(0, 300, 30)]
    found = []
    for name in ("a", "b"):
        with tempfile.TemporaryDirectory(dir=tmp_path) as folder:
            store = write_store(Path(folder) / name, documents)
            found.append(lists(build_samples([store], "train", data_config(5), seed=1).at(0, 50)))
    assert found[0] == found[1]
