"""Sample order: pure functions of (seed, index)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.data import order

PERMUTED = [3, 0, 4, 5, 10, 6, 11, 9, 2, 7, 1, 8]
BLENDED = ([0, 0, 2, 1, 2, 1, 2, 0, 2, 1, 2, 2], [21, 1, 148, 71, 119, 154, 43, 74, 192, 4, 519, 231])

weights_lists = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 5))
def test_permutation_is_a_bijection(size: int, seed: int, epoch: int) -> None:
    assert sorted(order.permute(np.arange(size), size, seed, 0, epoch).tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 15, 16, 17, 1023, 1024, 1025, 4096, 4097])
def test_permutation_at_and_around_powers_of_two(size: int) -> None:
    assert set(order.permute(np.arange(size), size, 7).tolist()) == set(range(size))


@given(st.integers(2, 500), st.data())
def test_one_index_at_a_time_gives_the_same(size: int, data: st.DataObject) -> None:
    whole = order.permute(np.arange(size), size, 3)
    index = data.draw(st.integers(0, size - 1))
    assert order.permute(np.array([index]), size, 3)[0] == whole[index]


def test_permutation_of_something_huge_needs_no_table() -> None:
    size = 10**15 + 37
    places = order.permute(np.arange(size - 1000, size), size, "seed")
    assert len(set(places.tolist())) == 1000
    assert places.min() >= 0 and places.max() < size
    assert places.max() > size // 2 and places.min() < size // 2


def test_seeds_sources_and_epochs_give_unrelated_orders() -> None:
    size = 2000
    orders = {key: order.permute(np.arange(size), size, *key) for key in [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1)]}
    for one, first in orders.items():
        # A random permutation has one fixed point on average, and so have two of them compared.
        assert (first == np.arange(size)).sum() < 10
        for other, second in orders.items():
            if one != other:
                assert (first == second).sum() < 10
        # ... and no trend: neighbours are as far apart as in a shuffle (a third of the size).
        assert abs(np.abs(np.diff(first)).mean() / size - 1 / 3) < 0.03


def test_every_place_is_equally_likely() -> None:
    size, seeds = 10, 1000
    hits = np.zeros((size, size))
    for seed in range(seeds):
        hits[np.arange(size), order.permute(np.arange(size), size, seed)] += 1
    expected = seeds / size
    chi_square = ((hits - expected) ** 2 / expected).sum()
    assert chi_square < 81 + 5 * np.sqrt(2 * 81)  # 81 degrees of freedom, five standard deviations


def test_order_is_part_of_the_format() -> None:
    """A run resumed by a later version must go on with the same samples: these numbers may never change."""
    assert order.permute(np.arange(12), 12, 1234, 0, 0).tolist() == PERMUTED
    sources, numbers = order.blend(np.arange(12), [1.0, 2.0, 5.0], 1234)
    assert (sources.tolist(), numbers.tolist()) == BLENDED


@given(weights_lists, st.integers(0, 50), st.integers(1, 4))
def test_blend_gives_every_sample_of_a_source_once(weights: list[float], seed: int, num_blocks: int) -> None:
    block = 1024
    sources, numbers = order.blend(np.arange(num_blocks * block), weights, seed)
    total = sum(weights)
    for source, weight in enumerate(weights):
        mine = np.sort(numbers[sources == source])
        assert mine.tolist() == list(range(len(mine)))
        assert abs(len(mine) - weight / total * num_blocks * block) < len(weights)


@given(weights_lists, st.integers(1, 5))
def test_blend_shares_are_exact(weights: list[float], num_blocks: int) -> None:
    """Whole shares are met to the sample; of broken ones, only the heaviest source gets more than its floor."""
    block = 1024
    sources, _ = order.blend(np.arange(num_blocks * block), weights, 0)
    found = np.bincount(sources, minlength=len(weights))
    exact = np.array(weights) / np.sum(weights) * block * num_blocks
    heaviest = int(np.argmax(weights))
    for source in range(len(weights)):
        if source != heaviest:
            assert found[source] == np.floor(exact[source])
    assert found.sum() == block * num_blocks


def test_blend_is_mixed_within_a_block() -> None:
    sources, _ = order.blend(np.arange(1024), [1.0, 1.0], 5)
    assert sources.sum() == 512
    assert 200 < (np.diff(sources) != 0).sum() < 820  # neither sorted nor alternating


@given(weights_lists, st.integers(0, 3000), st.integers(1, 300), st.data())
def test_blend_does_not_depend_on_how_it_is_asked(weights, first: int, count: int, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, count))
    whole = order.blend(np.arange(first, first + count), weights, 9)
    head = order.blend(np.arange(first, first + cut), weights, 9)
    tail = order.blend(np.arange(first + cut, first + count), weights, 9)
    for all_of_it, one, two in zip(whole, head, tail, strict=True):
        assert all_of_it.tolist() == [*one.tolist(), *two.tolist()]


def test_blend_of_more_sources_than_a_block_has_room_for() -> None:
    """A hundred equal shares all round up in the same block: it must be large enough for that."""
    num_sources, count = 100, 50_000
    sources, numbers = order.blend(np.arange(count), [1.0] * num_sources, 0)
    for source in range(num_sources):
        assert np.sort(numbers[sources == source]).tolist() == list(range(count // num_sources))


@given(st.integers(1, 20_000), st.lists(st.integers(0, 2**31), min_size=1, max_size=20), st.integers(0, 3))
def test_nearby_is_the_same_permutation(size: int, places: list[int], epoch: int) -> None:
    index = np.array([place % size for place in places])
    expected = order.permute(index, size, 5, epoch)
    assert order.permute_nearby(index, size, 5, epoch).tolist() == expected.tolist()
