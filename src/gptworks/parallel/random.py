"""Random numbers of tensor-parallel ranks.

All ranks of a group seed the default generator alike, so what is computed alike on each (dropout of a residual stream
that is whole) drops the same. What is cut (heads, tokens of a cut stream) must drop differently on each rank, without
moving the default generators apart. Nothing is kept between calls: the seed of such a draw comes from the default
generator, so whoever restores that, as recomputation does, repeats the draw.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def own_draws(rank: int) -> Iterator[None]:
    """Inside, random numbers depend on the rank; after it, the default generator is where it is on all ranks."""
    seed = int(torch.randint(2**62, (), device="cpu"))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed + rank)
        yield


def with_own_draws(forward: Callable[..., Tensor], rank: int) -> Callable[..., Tensor]:
    def drawn(*args: Any) -> Tensor:
        with own_draws(rank):
            return forward(*args)

    # A compiled graph cannot change generators half-way: it ends before this and goes on behind it.
    return torch.compiler.disable(drawn)
