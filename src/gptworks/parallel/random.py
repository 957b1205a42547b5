"""Random numbers of tensor-parallel ranks.

All ranks of a group seed the default generator alike, so what is computed alike on each (dropout of a residual stream
that is whole) drops the same. What is cut (heads, tokens of a cut stream) must drop differently on each rank, without
moving the default generators apart. Nothing is kept between calls but the default generator, its seed included:
whoever restores that, as recomputation does, repeats the draw.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gptworks.model.init import seed_of


@contextmanager
def own_draws(rank: int) -> Iterator[None]:
    """Inside, random numbers depend on the rank. After it the default generator has a new seed, alike on all ranks."""
    seed = torch.initial_seed()
    torch.manual_seed(seed_of(seed, "rank", rank))
    try:
        yield
    finally:
        torch.manual_seed(seed_of(seed, "after"))


def with_own_draws(forward: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    def drawn(*args: Any) -> Tensor:
        with own_draws(rank):
            return forward(*args)

    # A compiled graph cannot change generators half-way: it ends before this and goes on behind it.
    return torch.compiler.disable(drawn)
