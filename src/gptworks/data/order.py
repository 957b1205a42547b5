"""Which sample comes at which index: pure functions of (seed, index), with no table and no state.

So the order cannot depend on ranks, batch sizes or restarts, and a checkpoint stores one number.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

_ROUNDS = 6
_BLOCK = 1024
_CHUNK = 4096


def permute(index: np.ndarray, size: int, *key: object) -> np.ndarray:
    """A pseudo-random permutation of range(size), evaluated at `index`.

    A Feistel network over the smallest even number of bits that holds `size`; results outside are sent through it
    again until they fall inside ("cycle walking", fewer than four rounds on average).
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    keys = _round_keys(*key)
    result = index.astype(np.uint64)
    outside = np.ones(len(result), dtype=bool)
    while outside.any():
        values = result[outside]
        left, right = values >> half, values & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        result[outside] = (left << half) | right
        outside = result >= size
    return result.astype(np.int64)


def permute_nearby(index: np.ndarray, size: int, *key: object) -> np.ndarray:
    """`permute`, but quicker for few indices at a time that are near to those of the last call."""
    result = np.empty(len(index), np.int64)
    chunks, places = np.divmod(index, _CHUNK)
    for chunk in np.unique(chunks).tolist():
        here = chunks == chunk
        result[here] = _permuted_chunk(chunk, size, *key)[places[here]]
    return result


@lru_cache(maxsize=64)
def _permuted_chunk(chunk: int, size: int, *key: object) -> np.ndarray:
    return permute(np.arange(chunk * _CHUNK, min(size, (chunk + 1) * _CHUNK)), size, *key)


def blend(index: np.ndarray, weights: Sequence[float], *key: object) -> tuple[np.ndarray, np.ndarray]:
    """For each global index: which source, and the how-manieth sample of that source.

    Work in blocks: over the first b blocks a source has given floor(weight x block x b) samples, the heaviest source
    taking what is left, so shares are exact to one sample per source; inside a block the places are shuffled.
    """
    block_size = _block_size(weights)
    sources = np.empty(len(index), dtype=np.int64)
    numbers = np.empty(len(index), dtype=np.int64)
    blocks = index // block_size
    for block in np.unique(blocks):
        here = blocks == block
        before, after = _num_before(int(block), weights), _num_before(int(block) + 1, weights)
        starts = np.concatenate([[0], np.cumsum(after - before)])
        places = permute(index[here] % block_size, block_size, *key, "blend", int(block))
        chosen = np.searchsorted(starts, places, side="right") - 1
        sources[here] = chosen
        numbers[here] = before[chosen] + places - starts[chosen]
    return sources, numbers


def not_blended(length: int, weights: Sequence[float], *key: object) -> list[tuple[np.ndarray, int]]:
    """What of each source does not come among the first `length`: the numbers that the block in which they end still
    has of it, and the first number of which all after it are left."""
    size = _block_size(weights)
    block, rest = divmod(length, size)
    before, after = _num_before(block, weights), _num_before(block + (rest > 0), weights)
    sources, numbers = blend(np.arange(length - rest, length), weights, *key)
    return [
        (np.setdiff1d(np.arange(before[source], after[source]), numbers[sources == source]), int(after[source]))
        for source in range(len(weights))
    ]


def _block_size(weights: Sequence[float]) -> int:
    return max(_BLOCK, len(weights) * len(weights))


def _num_before(block: int, weights: Sequence[float]) -> np.ndarray:
    shares = np.asarray(weights, dtype=np.float64) / np.sum(weights)
    size = _block_size(weights)
    counts = np.floor(shares * size * block).astype(np.int64)
    counts[int(np.argmax(shares))] += block * size - counts.sum()
    return counts


def _round_keys(*key: object) -> list[np.uint64]:
    digest = hashlib.sha512("|".join(str(part) for part in key).encode()).digest()
    return [np.uint64(int.from_bytes(digest[8 * i : 8 * i + 8], "little")) for i in range(_ROUNDS)]


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit changes half of the output bits. Wraps around on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
