"""data.order: oneflow beside C++'s own shuffle (tests/fixtures/orders) and beside its rules, written as loops."""

import hashlib
import itertools
import json
import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptworks.config import DataConfig
from gptworks.data import split
from gptworks.data.cxx_shuffle import CxxShuffle
from gptworks.data.foreign_order import build_samples

FOLDER = Path(__file__).parents[1] / "fixtures" / "orders"
SHUFFLES = json.loads((FOLDER / "oneflow_shuffles.json").read_text())
write_store = runpy.run_path(str(FOLDER / "check.py"))["write_store"]


def test_a_shuffle_by_hand() -> None:
    """A generator of this seed draws 3499211612 and 581869302. Two places share a draw: the first is 4 of 6, which is
    (1, 1) of 2 x 3, the second 2 of 20, (0, 2) of 4 x 5."""
    items = np.arange(5, dtype=np.int32)
    CxxShuffle(5489)(items)
    assert items.tolist() == [3, 2, 4, 0, 1]


@pytest.mark.parametrize("case", SHUFFLES, ids=lambda case: f"seed-{case['seed']}")
def test_shuffles_are_those_of_the_library(case: dict) -> None:
    shuffle = CxxShuffle(case["seed"])
    for count, expected in zip(case["lists"], case["answers"], strict=True):
        items = np.arange(count, dtype=np.int32)
        shuffle(items)
        found = items.tolist() if count <= 100 else hashlib.sha256(items.tobytes()).hexdigest()
        assert found == expected, count


# Each share of the documents rounded to the nearest, halves to the even one, and no more: by hand.
BORDERS = {
    ("949,50,1", 10): [0, 9, 9, 9],  # 9.49, 0.5, 0.01: the last document is in no part
    ("949,50,1", 50): [0, 47, 49, 49],  # 47.45, 2.5, 0.05
    ("949,50,1", 69): [0, 65, 68, 68],  # 65.48, 3.45, 0.07
    ("949,50,1", 1990): [0, 1889, 1989, 1990],  # 1888.51, 99.5, 1.99: two, of which there is one
    ("969,30,1", 50): [0, 48, 50, 50],  # 48.45, 1.5, 0.05
    ("80,10,10", 10): [0, 8, 9, 10],
    ("1,1", 7): [0, 4, 7, 7],  # 3.5, 3.5: four and four
}


@pytest.mark.parametrize(("shares", "number"), BORDERS)
def test_the_split_is_rounded_and_left_so(shares: str, number: int) -> None:
    weights = [float(share) for share in shares.split(",")]
    assert split.oneflow_boundaries(weights, number) == BORDERS[shares, number]


def test_32_bits_round_where_64_do_not() -> None:
    shares = [949.0, 50.0, 1.0]
    found = [n for n in range(40_000_000, 40_000_100) if split.oneflow_boundaries(shares, n)[1] != round(0.949 * n)]
    assert found


def samples_by_loops(documents: list[list[int]], seq_len: int, seed: int, asked: int) -> list[list[int]]:
    """One token after another: all documents of all epochs shuffled, cut, and the windows shuffled; those of a last
    epoch of which little is needed apart."""
    tokens = sum(map(len, documents))
    epochs = 1
    while epochs * tokens < asked * seq_len + 1:
        epochs += 1
    all_but_last = ((epochs - 1) * tokens - 1) // seq_len
    little = asked - all_but_last < int(np.float32(0.8) * np.float32((tokens - 1) // seq_len))
    groups = [epochs - 1, 1] if epochs > 1 and little else [epochs]
    shuffle, order = CxxShuffle(seed), []
    for times in groups:
        numbers = np.tile(np.arange(len(documents)), times)
        shuffle(numbers)
        order += numbers.tolist()
    row = [token for number in order for token in documents[number]]
    windows = [row[begin : begin + seq_len + 1] for begin in range(0, len(row) - seq_len, seq_len)]
    together = all_but_last if len(groups) == 2 else len(windows)
    given_out = []
    for begin, end in ((0, together), (together, len(windows))):
        numbers = np.arange(begin, end)
        shuffle(numbers)
        given_out += numbers.tolist()
    return [windows[number] for number in given_out[:asked]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_the_samples_follow_the_rules(tmp_path: Path, data: st.DataObject) -> None:
    lengths: list[int] = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=12))
    seq_len, seed = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 2**32 - 1))
    asked = data.draw(st.integers(1, 120))
    if sum(lengths) <= seq_len:
        return
    store = write_store(tmp_path / "store", 0, lengths)
    starts = np.cumsum([0, *lengths])
    tokens = store.tokens[: starts[-1]].tolist()
    documents = [tokens[begin:end] for begin, end in itertools.pairwise(starts)]
    samples = build_samples([store], "train", DataConfig(order="oneflow", seq_len=seq_len, split="1,0,0"), seed, asked)
    assert [sample.tokens.tolist() for sample in samples.at(0, asked)] == samples_by_loops(
        documents, seq_len, seed, asked
    )
