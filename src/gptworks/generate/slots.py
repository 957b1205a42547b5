"""Places of a cache that rows come to and leave. A place keeps what it has read, for a later row that begins so."""

from collections.abc import Sequence

from gptworks.model.cache import KVCache

LEAST_SHARED = 8  # fewer tokens are read again as fast as they are found and copied


class Slots:
    """Who has which place of the cache, and what lies there."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.number = cache.keys_LBNSH.shape[1]
        self.tokens: list[list[int]] = [[] for _ in range(self.number)]  # whose keys and values are there
        self._is_taken = [False] * self.number
        self._last_use = [0] * self.number
        self._clock = 0

    @property
    def num_free(self) -> int:
        return self._is_taken.count(False)

    @property
    def num_bytes(self) -> int:
        return self.cache.keys_LBNSH.nbytes + self.cache.values_LBNSH.nbytes

    def shared(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The place that holds the longest beginning of these tokens, and how long it is."""
        slot = max(range(self.number), key=lambda slot: common_length(self.tokens[slot], tokens))
        return slot, common_length(self.tokens[slot], tokens)

    def take(self, tokens: Sequence[int], *, may_share: bool) -> tuple[int, int]:
        """A free place for a row that will read these tokens, and how many of them are there already.

        The last one is never among them: what follows it is asked for.
        """
        free = sorted((slot for slot in range(self.number) if not self._is_taken[slot]), key=self._last_use.__getitem__)
        source, num_shared = self.shared(tokens[:-1]) if may_share else (0, 0)
        if num_shared < LEAST_SHARED:
            slot, num_shared = free[0], 0
        elif source in free and (num_shared == len(self.tokens[source]) or free == [source]):
            slot = source
        else:
            slot = next(each for each in free if each != source)
            for stored in (self.cache.keys_LBNSH, self.cache.values_LBNSH):
                stored[:, slot, :, :num_shared] = stored[:, source, :, :num_shared]
        self.tokens[slot] = list(tokens[:num_shared])
        self._is_taken[slot] = True
        return slot, num_shared

    def free(self, slot: int) -> None:
        self._clock += 1
        self._is_taken[slot], self._last_use[slot] = False, self._clock

    def forget(self) -> None:
        """Nothing that lies there is to be trusted any more."""
        self.tokens = [[] for _ in range(self.number)]


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two rows begin with in common; by halves, since slices are compared at the speed of C."""
    if not a or not b or a[0] != b[0]:
        return 0
    low, high = 1, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
