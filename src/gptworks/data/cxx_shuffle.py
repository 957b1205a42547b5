"""std::shuffle of a std::mt19937 as libstdc++ has it from GCC 7 to 10, element for element.

The C++ standard fixes the generator and its seeding, and leaves the shuffle to the library. GCC 11 draws a number below
a bound in another way.
"""

from collections.abc import Iterator

import numpy as np

_HIGHEST = 2**32 - 1  # that the generator draws
_AT_ONCE = 4096


class CxxShuffle:
    """Lists shuffled one after the other by one generator."""

    def __init__(self, seed: int) -> None:
        self.draws = _draws(seed)

    def __call__(self, items: np.ndarray) -> None:
        """In place."""
        count, swapped = len(items), items.data
        if not count or _HIGHEST // count < count:
            for place in range(1, count):
                other = self._below(place + 1)
                swapped[place], swapped[other] = swapped[other], swapped[place]
            return
        first = 1
        if count % 2 == 0:  # an odd number of places to swap: one alone, the others in pairs
            other, first = self._below(2), 2
            swapped[1], swapped[other] = swapped[other], swapped[1]
        for place in range(first, count, 2):
            here, next_ = divmod(self._below((place + 1) * (place + 2)), place + 2)  # one draw for two places
            swapped[place], swapped[here] = swapped[here], swapped[place]
            swapped[place + 1], swapped[next_] = swapped[next_], swapped[place + 1]

    def _below(self, bound: int) -> int:
        """All draws in `bound` parts of one size; one in the rest is drawn again."""
        size = _HIGHEST // bound
        while True:
            drawn = next(self.draws) // size
            if drawn < bound:
                return drawn


def _draws(seed: int) -> Iterator[int]:
    generator = np.random.RandomState(seed)  # the same generator, seeded in the same way
    while True:
        yield from generator.randint(0, _HIGHEST + 1, _AT_ONCE, dtype=np.uint32).tolist()
