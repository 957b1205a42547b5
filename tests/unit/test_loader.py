"""Samples to batches: labels, masks, positions and segments; and a global batch that no layout can change."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config import BatchConfig, BatchPlan, DataConfig, solve_batch
from gptworks.data import corpus, prepare
from gptworks.data.dataset import Dataset
from gptworks.data.loader import IGNORED, Batch, Batches, EodPolicy, collate
from gptworks.data.windows import Sample, Samples, Windows
from gptworks.errors import DataError

EOD = 3

windows_with_ends = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.integers(0, 4), min_size=length + 1, max_size=length + 1), min_size=1, max_size=4
    )
)


def collate_windows(windows: list[list[int]], borders: EodPolicy, scored: list[list[bool]] | None = None) -> Batch:
    masks = [np.array(row) for row in scored] if scored else [None] * len(windows)
    samples = [Sample(np.array(w, np.int64), mask) for w, mask in zip(windows, masks, strict=True)]
    return collate(samples, 70, borders)


def naive(window: list[int], scored: list[bool], mask: bool) -> tuple[list[int], list[int], list[int]]:
    """Labels, positions and segments of one row, a token at a time."""
    labels, positions, segments = [], [], []
    position = segment = 0
    for i in range(len(window) - 1):
        token, target = window[i], window[i + 1]
        labels.append(target if scored[i] and not (mask and token == EOD) else -100)
        positions.append(position)
        segments.append(segment)
        position += 1
        if token == EOD:  # it still belongs to the document it ends
            position = 0
            segment += 1
    return labels, positions, segments


@given(windows_with_ends, st.booleans(), st.data())
def test_batch_equals_a_naive_loop(windows: list[list[int]], mask: bool, data: st.DataObject) -> None:
    flags = st.lists(st.booleans(), min_size=len(windows[0]) - 1, max_size=len(windows[0]) - 1)
    scored = [data.draw(flags) for _ in windows]
    batch = collate_windows(windows, EodPolicy(EOD, mask, True, True), scored)
    assert batch.tokens.tolist() == [window[:-1] for window in windows]
    for row, window in enumerate(windows):
        labels, positions, segments = naive(window, scored[row], mask)
        assert batch.labels[row].tolist() == labels
        assert batch.positions[row].tolist() == positions
        assert batch.segments[row].tolist() == segments
    assert batch.num_scored == sum(label >= 0 for row in batch.labels.tolist() for label in row)
    assert batch.sample_ids.tolist() == [70 + row for row in range(len(windows))]


def test_a_window_written_out() -> None:
    batch = collate_windows([[5, EOD, 6, 7, EOD, EOD, 8]], EodPolicy(EOD, True, True, True))
    assert batch.tokens.tolist() == [[5, EOD, 6, 7, EOD, EOD]]
    assert batch.labels.tolist() == [[EOD, IGNORED, 7, EOD, IGNORED, IGNORED]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2, 0]]
    assert batch.segments.tolist() == [[0, 0, 1, 1, 1, 2]]


def test_nothing_is_made_that_nobody_asked_for() -> None:
    window = [5, EOD, 6, 7]
    batch = collate_windows([window], EodPolicy(EOD, False, False, False))
    assert batch.labels.tolist() == [[EOD, 6, 7]]
    assert batch.positions is None and batch.segments is None
    assert collate_windows([window], EodPolicy(EOD, False, True, False)).segments is None
    assert collate_windows([window], EodPolicy(EOD, False, False, True)).positions is None
    unknown = collate_windows([window], EodPolicy(None, False, False, False))
    assert unknown.labels.tolist() == [[EOD, 6, 7]]


def test_batch_does_not_write_into_its_samples() -> None:
    tokens = np.array([5, EOD, 6])
    batch = collate([Sample(tokens, None)], 0, EodPolicy(EOD, True, False, False))
    batch.tokens.fill_(0)
    batch.labels.fill_(0)
    assert tokens.tolist() == [5, EOD, 6]


def test_types_and_moving() -> None:
    batch = collate_windows([[1, 2, 3]], EodPolicy(EOD, True, True, True))
    moved = batch.to(torch.device("meta"))
    for name in ("tokens", "labels", "positions", "segments"):
        assert getattr(batch, name).dtype == torch.int64
        assert getattr(moved, name).device.type == "meta"
    assert moved.sample_ids.device.type == "cpu" and moved.sample_ids.dtype == torch.int64
    bare = collate_windows([[1, 2, 3]], EodPolicy(None, False, False, False)).to(torch.device("cpu"))
    assert bare.positions is None
    assert bare.keywords() == {"labels": bare.labels, "positions": None, "segments": None}


@pytest.mark.parametrize("option", ["mask_eod", "reset_positions", "reset_attention"])
def test_options_at_document_ends_need_to_know_the_end(option: str) -> None:
    cfg = DataConfig(**{option: True})
    borders = EodPolicy.from_config(cfg, 7)
    assert borders == EodPolicy(7, option == "mask_eod", option == "reset_positions", option == "reset_attention")
    assert EodPolicy.from_config(DataConfig(), None) == EodPolicy(None, False, False, False)
    with pytest.raises(DataError, match=f"data.{option}: the end-of-document token is not known"):
        EodPolicy.from_config(cfg, None)


def test_prompts_are_unscored_in_the_batch(small_tokenizer, tmp_path: Path) -> None:
    source = tmp_path / "e.jsonl"
    source.write_text(json.dumps({"q": "Who went home?", "a": " Anna"}) + "\n")
    rules = corpus.TextRules(keys=("q", "a"))
    prepare.prepare(prepare.PrepareJob([str(source)], tmp_path / "e", small_tokenizer, rules=rules, append_eod=True))
    cfg = DataConfig(path=(str(tmp_path / "e"),), seq_len=32, split=(1,), mask_eod=True, reset_positions=True)
    dataset = Dataset(cfg, vocab_size=512)
    batches = Batches(dataset.samples("train"), BatchPlan(1, 1, 1, 1), dataset.eod_policy, vocab_size=512)
    (batch,) = batches.next_step()
    scored = batch.labels[batch.labels != IGNORED].tolist()
    assert scored == [*small_tokenizer.encode(" Anna"), 511]
    length = len(small_tokenizer.encode("Who went home?")) + len(scored)
    assert batch.positions[0, :length].tolist() == list(range(length))


# The global batch


def samples_of_numbers(count: int = 37, seed: int = 3) -> Samples:
    return Samples([Windows(np.arange(count + 1), 1)], (), seed=seed, shuffled=True)


def read(dp: int, micro: int, global_size: int, steps: int, *, consumed: int = 0) -> list[list[tuple[int, int]]]:
    """(sample id, first token) of every row, step by step, as the ranks of a layout read them together."""
    plan = solve_batch(BatchConfig(global_size=global_size, micro_size=micro), dp)
    borders = EodPolicy(None, False, False, False)
    ranks = [
        Batches(samples_of_numbers(), plan, borders, vocab_size=1000, data_rank=rank, consumed=consumed)
        for rank in range(dp)
    ]
    read_steps = []
    for _ in range(steps):
        by_rank = [rank.next_step() for rank in ranks]
        assert all(len(micro_batches) == plan.accumulation for micro_batches in by_rank)
        rows = []
        for micro_batches in zip(*by_rank, strict=True):  # the ranks work on a micro-batch at the same time
            for batch in micro_batches:
                assert batch.tokens.shape[0] == micro
                rows += zip(batch.sample_ids.tolist(), batch.tokens[:, 0].tolist(), strict=True)
        read_steps.append(rows)
    assert all(rank.consumed == consumed + steps * global_size for rank in ranks)
    return read_steps


ONE_PROCESS = read(1, 8, 8, 12)


@pytest.mark.parametrize(("dp", "micro"), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)])
def test_layout_changes_neither_which_samples_nor_their_order(dp: int, micro: int) -> None:
    assert read(dp, micro, 8, 12) == ONE_PROCESS


@pytest.mark.parametrize(("dp", "micro", "global_size"), [(1, 3, 3), (2, 2, 4), (4, 4, 16), (1, 24, 24)])
def test_batch_size_changes_neither(dp: int, micro: int, global_size: int) -> None:
    flat = [row for step in ONE_PROCESS for row in step]
    steps = len(flat) // global_size
    assert [row for step in read(dp, micro, global_size, steps) for row in step] == flat


def test_sample_ids_count_on_and_repeat_the_data_in_another_order() -> None:
    flat = [row for step in ONE_PROCESS for row in step]
    assert [sample_id for sample_id, _ in flat] == list(range(96))
    assert sorted(token for _, token in flat[:37]) == list(range(37)) == sorted(token for _, token in flat[37:74])
    assert [token for _, token in flat[:37]] != [token for _, token in flat[37:74]]


@pytest.mark.parametrize(("dp", "micro"), [(1, 8), (2, 2), (4, 1)])
@pytest.mark.parametrize("done", [1, 5, 11])
def test_restart_goes_on_where_it_stopped(done: int, dp: int, micro: int) -> None:
    assert read(dp, micro, 8, 12 - done, consumed=8 * done) == ONE_PROCESS[done:]


def test_same_batches_from_a_real_store(small_store: Path) -> None:
    """With document ends masked, so that rows differ in what they score."""
    cfg = DataConfig(path=(str(small_store),), seq_len=32, mask_eod=True, reset_positions=True, reset_attention=True)

    def rows(dp: int, micro: int) -> list[torch.Tensor]:
        dataset = Dataset(cfg, vocab_size=512, seed=5)
        plan = BatchPlan(8, micro, 8 // (micro * dp), dp)
        ranks = [
            Batches(dataset.samples("train"), plan, dataset.eod_policy, vocab_size=512, data_rank=r).next_step()
            for r in range(dp)
        ]
        in_order = [batch for together in zip(*ranks, strict=True) for batch in together]
        return [
            torch.cat([getattr(batch, name) for batch in in_order])
            for name in ("tokens", "labels", "positions", "segments", "sample_ids")
        ]

    alone = rows(1, 8)
    assert (alone[1] == IGNORED).any() and (alone[3] > 0).any()
    for layout in [(2, 2), (4, 1), (1, 2)]:
        assert all(torch.equal(a, b) for a, b in zip(alone, rows(*layout), strict=True))


# Ids that no vocabulary has


def batches_over(tokens: list[int], vocab_size: int) -> Batches:
    samples = Samples([Windows(np.array(tokens, np.int32), 2)], (), seed=0, shuffled=False)
    return Batches(samples, BatchPlan(2, 2, 1, 1), EodPolicy(None, False, False, False), vocab_size=vocab_size)


def test_ids_outside_the_vocabulary() -> None:
    tokens = [1, 2, 3, 4, 9]  # the highest is a target only
    batches_over(tokens, 10).next_step()
    with pytest.raises(DataError) as caught:
        batches_over(tokens, 9).next_step()
    assert str(caught.value) == (
        "token id 9 in samples 0 to 1 is outside the model's vocabulary of 9. "
        "Set model.vocab_size to at least 10, or prepare the data with the model's tokenizer."
    )


@pytest.mark.parametrize("tokens", [[1, -7, 3, 4, 5], [1, 2, 3, 4, -7], [1, 2, -100, 4, -7]])
def test_negative_ids_are_damage(tokens: list[int]) -> None:
    """Not a target to leave out: -100 in the data would else pass for 'not scored'."""
    with pytest.raises(DataError, match=f"token id {min(tokens)} in samples 0 to 1: ids are never negative"):
        batches_over(tokens, 10).next_step()


def test_a_flipped_high_bit_of_a_token_is_found_when_it_is_read(small_store: Path, tmp_path: Path) -> None:
    tokens = np.fromfile(small_store.with_suffix(".bin"), np.uint16)
    tokens[1000] ^= 1 << 14
    tokens.tofile(tmp_path / "s.bin")
    (tmp_path / "s.idx").write_bytes(small_store.with_suffix(".idx").read_bytes())
    cfg = DataConfig(path=(str(tmp_path / "s"),), seq_len=32, split=(1,))
    dataset = Dataset(cfg, vocab_size=512)
    samples = dataset.samples("train")
    batches = Batches(
        samples, BatchPlan(samples.per_epoch, samples.per_epoch, 1, 1), dataset.eod_policy, vocab_size=512
    )
    with pytest.raises(DataError, match=f"token id {tokens[1000]} in samples 0 to {samples.per_epoch - 1}"):
        batches.next_step()
