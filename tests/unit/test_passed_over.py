"""Samples that are passed over, and where samples come from."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import DataConfig
from gptworks.data import provenance
from gptworks.data.dataset import Dataset
from gptworks.data.loader import Batches
from gptworks.data.passed_over import PassedOver

rollbacks = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=6)


@given(rollbacks)
def test_it_is_a_list_from_which_the_samples_were_deleted(made: list[tuple[int, int]]) -> None:
    left, passed = list(range(200)), PassedOver()
    for number, count in made:
        del left[number : number + count]
        passed = passed.adding(number, number + count)
        assert [passed.place(n) for n in range(100)] == left[:100]
        assert len(passed) == 200 - len(left)
        assert PassedOver.from_json(passed.as_json()) == passed
        for first in (0, 7, 33):
            stretches = passed.stretches(first, 20)
            places = [place + k for place, length in stretches for k in range(length)]
            assert places == left[first : first + 20]


@pytest.mark.parametrize(
    "ranges", [[[3, 3]], [[5, 2]], [[0, 4], [3, 9]], [[-1, 2]], [[0, 1.5]], [[1, 2, 3]], [["a", 2]]]
)
def test_ranges_that_cannot_be_are_refused(ranges: list[list[int]]) -> None:
    with pytest.raises((ValueError, TypeError)):
        PassedOver.from_json(ranges)


def dataset(store: Path, **more: object) -> Dataset:
    cfg = DataConfig(path=(str(store),), split=(90.0, 10.0), seq_len=16, **more)  # type: ignore[arg-type]
    return Dataset(cfg, vocab_size=512, seed=7)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_batches_go_on_behind_what_is_passed_over(small_store: Path, ranks: int) -> None:
    """Whatever the number of ranks: three steps, back by two of them, and the next two."""
    data = dataset(small_store)
    plan = BatchPlan(global_size=4, micro_size=4 // ranks, accumulation=1, data_parallel=ranks)
    ids: list[list[int]] = [[], []]
    for rank in range(ranks):
        batches = Batches(data.samples("train"), plan, data.eod_policy, vocab_size=512, data_rank=rank)
        for _ in range(3):
            batches.next_step()
        batches.pass_over_since(4)
        assert batches.consumed == 4
        for step in range(2):
            (batch,) = batches.next_step()
            ids[step] += batch.sample_ids.tolist()
            wanted = [data.samples("train").at(place, 1)[0].tokens for place in batch.sample_ids.tolist()]
            assert np.array_equal(batch.tokens.numpy(), np.stack(wanted)[:, :-1])
    assert ids == [[12, 13, 14, 15], [16, 17, 18, 19]]


@pytest.mark.parametrize("order", ["shuffled", "sequential", "megatron"])
def test_the_text_of_an_origin_is_the_text_of_the_sample_and_of_the_corpus(
    small_store: Path, corpus_file: Path, order: str
) -> None:
    data = dataset(small_store, order=order)
    samples, tokenizer = data.samples("train"), data.tokenizer
    assert tokenizer is not None
    texts = [text.strip("\n") for text in corpus_file.read_text(encoding="utf-8").split("\n\n") if text.strip()]
    for place in (0, 5, 77):
        (origin,) = provenance.origins(data.stores, samples, [place], tokenizer)
        assert origin.store == str(data.stores[0].file)
        tokens = samples.at(place, 1)[0].tokens
        assert "".join(piece.text or "" for piece in origin.pieces) == tokenizer.decode(tokens)
        for piece in origin.pieces:
            assert piece.document is not None and piece.characters is not None and piece.text is not None
            first, end = piece.characters
            assert end - first == len(piece.text)
            eod = "<|endoftext|>"
            assert (texts[piece.document] + eod)[first:end] == piece.text


def test_without_a_tokenizer_there_are_numbers_only(small_store: Path) -> None:
    data = dataset(small_store)
    (origin,) = provenance.origins(data.stores, data.samples("train"), [3], None)
    assert all(piece.text is None and piece.characters is None for piece in origin.pieces)
    assert sum(end - first for piece in origin.pieces for first, end in [piece.tokens]) == 17
