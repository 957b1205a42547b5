"""Documents to parts, by Megatron's rule of 2021."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.data.split import SPLITS, boundaries


def test_names_of_the_splits() -> None:
    assert SPLITS == ("train", "held_out", "test")


@pytest.mark.parametrize(
    ("shares", "num_documents", "expected"),
    [
        # 949,50,1: rounding 9.49, 0.5, 0.01 gives 9, 0, 0: the missing document goes to training.
        ((949, 50, 1), 10, [0, 10, 10, 10]),
        # 47.45, 2.5, 0.05 -> 47, 2 (half to even), 0
        ((949, 50, 1), 50, [0, 48, 50, 50]),
        # 65.481, 3.45, 0.069 -> 65, 3, 0
        ((949, 50, 1), 69, [0, 66, 69, 69]),
        # 1888.51, 99.5, 1.99 -> 1889, 100 (half to even), 2: one too many, taken off every border
        ((949, 50, 1), 1990, [0, 1888, 1988, 1990]),
        ((949, 50, 1), 1000, [0, 949, 999, 1000]),
        ((90, 10), 160, [0, 144, 160, 160]),
        ((1,), 7, [0, 7, 7, 7]),
        ((0, 1, 1), 3, [0, 0, 1, 3]),
        ((0, 0, 1), 5, [0, 0, 0, 5]),
        ((1, 1), 1, [0, 1, 1, 1]),
        ((949, 50, 1), 0, [0, 0, 0, 0]),
    ],
)
def test_borders(shares: tuple[float, ...], num_documents: int, expected: list[int]) -> None:
    assert boundaries(shares, num_documents) == expected


@given(
    st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(lambda shares: sum(shares) > 1e-6),
    st.integers(0, 10_000),
)
def test_every_document_is_in_exactly_one_part(shares: list[float], num_documents: int) -> None:
    borders = boundaries(shares, num_documents)
    assert borders[0] == 0 and borders[-1] == num_documents
    assert borders == sorted(borders)
    for share, begin, end in zip([*shares, 0, 0], borders, borders[1:], strict=False):
        assert abs((end - begin) - share / sum(shares) * num_documents) <= 2
