"""Weights of stores that change on the way."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import DataConfig
from gptworks.data import mixture, order
from gptworks.data.dataset import Dataset
from gptworks.data.loader import Batches
from gptworks.data.mixture import Mixture, Stage
from gptworks.errors import ConfigError

weights = st.lists(st.floats(0.01, 10.0), min_size=3, max_size=3).map(tuple)
lengths = st.lists(st.integers(1, 1500), min_size=0, max_size=3)


@given(st.lists(weights, min_size=4, max_size=4), lengths)
def test_shares_are_exact_in_each_stage_and_each_source_goes_on_where_it_was(given_weights, stage_lengths) -> None:
    firsts = [0, *np.cumsum(stage_lengths).tolist()]
    stages = [Stage(first, each) for first, each in zip(firsts, given_weights, strict=False)]
    end = firsts[-1] + 2048
    sources, numbers = Mixture(stages, seed=5).where(np.arange(end))
    for source in range(3):
        given = numbers[sources == source]
        assert len(set(given.tolist())) == len(given), "none twice"
        assert given.max(initial=-1) < len(given) + 1024, "what a block has not given yet comes before what is after it"
    for stage, after in zip(stages, [*firsts[1:], end], strict=True):
        # Shares are exact at the end of each block; inside one they are those of a shuffled block.
        whole = (after - stage.first) // 1024 * 1024
        counts = np.bincount(sources[stage.first : stage.first + whole], minlength=3)
        wanted = whole * np.array(stage.weights) / sum(stage.weights)
        assert np.abs(counts - wanted).max() <= 3


@given(weights, st.integers(0, 5000))
def test_what_is_left_is_what_did_not_come(each: tuple[float, ...], length: int) -> None:
    sources, numbers = order.blend(np.arange(length), each, 9)
    for source, (left, after) in enumerate(order.not_blended(length, each, 9)):
        came = numbers[sources == source]
        assert sorted([*came.tolist(), *left.tolist()]) == list(range(after))


@given(st.integers(0, 4000), st.integers(1, 50))
def test_any_piece_can_be_found_without_those_before(first: int, count: int) -> None:
    mixed = Mixture([Stage(0, (1.0, 3.0)), Stage(1500, (2.0, 1.0)), Stage(1600, (1.0, 1.0))], seed=1)
    whole = mixed.where(np.arange(4100))
    piece = mixed.where(np.arange(first, first + count))
    for found, wanted in zip(piece, whole, strict=True):
        assert found.tolist() == wanted[first : first + count].tolist()


def test_one_stage_is_the_order_of_weights_alone() -> None:
    index = np.arange(3000)
    for found, wanted in zip(
        Mixture([Stage(0, (1.0, 2.5))], 7).where(index), order.blend(index, (1.0, 2.5), 7), strict=True
    ):
        assert found.tolist() == wanted.tolist()


A, B, C = (1.0, 1.0), (3.0, 1.0), (1.0, 9.0)


@pytest.mark.parametrize(
    ("before", "now", "planned", "wanted"),
    [
        ([(0, A)], [(0, A)], False, [(0, A)]),
        ([(0, A)], [(0, B)], False, [(0, A), (100, B)]),
        ([(0, A), (40, B)], [(0, B)], False, [(0, A), (40, B)]),
        ([(0, A), (40, B)], [(0, A)], False, [(0, A), (40, B), (100, A)]),
        ([(0, A), (100, B)], [(0, C)], False, [(0, A), (100, C)]),  # of that stage nothing was read yet
        ([(0, A)], [(0, A), (100, B)], True, [(0, A), (100, B)]),
        ([(0, A), (40, B)], [(0, A), (40, B), (500, C)], True, [(0, A), (40, B), (500, C)]),
        ([(0, A), (40, B)], [(0, A), (50, B)], True, None),
        ([(0, A)], [(0, B), (100, A)], True, None),
        ([(0, A)], [(0, (1.0, 2.0, 3.0))], False, None),
    ],
)  # fmt: skip
def test_what_was_read_stays_as_it_was(before, now, planned, wanted) -> None:
    def stages(listed):
        return None if listed is None else tuple(Stage(first, each) for first, each in listed)

    assert mixture.going_on(stages(before), stages(now), 100, planned=planned) == stages(wanted)
    if wanted:
        assert mixture.from_json(mixture.as_json(stages(wanted))) == stages(wanted)


def stage(first: int, end: int, *each: float) -> dict[str, object]:
    return {"from_tokens": first, "to_tokens": end, "weights": each or (1.0, 2.0)}


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([stage(0, 100), stage(200, 0)], "number 2 (from_tokens 200) leaves a gap: what comes before ends at 100"),
        (
            [stage(0, 100), stage(50, 0)],
            "number 2 (from_tokens 50) overlaps the one before it: what comes before",
        ),
        ([stage(10, 100)], "number 1 (from_tokens 10) leaves a gap"),
        ([stage(0, 0), stage(100, 0)], "number 1 (from_tokens 0) has no to_tokens, but another stage follows"),
        ([stage(0, 100), stage(100, 60)], "number 2 (from_tokens 100) ends at 60, before it begins"),
        ([stage(0, 0, 1.0)], "has 1 weights for 2 paths"),
    ],
)
def test_stages_that_do_not_follow_each_other_are_refused(stages, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        DataConfig(path=("a", "b"), stages=stages)
    assert said in str(error.value)


def test_stages_and_weights_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="Keep one of them"):
        DataConfig(path=("a", "b"), stages=[stage(0, 0)], weights=(1.0, 2.0))


@pytest.mark.parametrize("ranks", [2, 4])
def test_any_number_of_ranks_reads_the_same_samples(small_store: Path, ranks: int) -> None:
    """Steps of 8 samples of 16 tokens; the second stage begins with sample 20, in the middle of the third step."""
    stages = [{"to_tokens": 320, "weights": (3, 1)}, {"from_tokens": 320, "weights": (1, 3)}]
    cfg = DataConfig.model_validate(
        {"path": (str(small_store), str(small_store)), "split": (90, 10), "seq_len": 16, "stages": stages}
    )
    data = Dataset(cfg, vocab_size=512, seed=7)

    def steps(of: int) -> list[list[list[int]]]:
        plan = BatchPlan(global_size=8, micro_size=2, accumulation=4 // of, data_parallel=of)
        made = [
            Batches(data.samples("train"), plan, data.eod_policy, vocab_size=512, data_rank=rank) for rank in range(of)
        ]
        found = []
        for _ in range(5):
            read = [batch for each in made for batch in each.next_step()]
            rows = [pair for one in read for pair in zip(one.sample_ids.tolist(), one.tokens.tolist(), strict=True)]
            found.append([row for _, row in sorted(rows)])
        return found

    assert steps(ranks) == steps(1)
    sources = [source for source, _ in data.samples("train").where(0, 40)]
    assert sum(sources[:20]) < 10 < sum(sources[20:]), "another store has the most from there on"
