"""Documents to training, held-out and test, in file order: by Megatron's rule of 2021, megatron-core's or OneFlow's."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np

SPLITS = ("train", "held_out", "test")


def boundaries(shares: Sequence[float], num_documents: int) -> list[int]:
    """Four document numbers: split i holds documents [b[i], b[i+1]).

    Each split gets its share rounded to the nearest document; what that overshoots is taken off every border (but
    never below 0, where the original would go with a first share of 0).
    """
    padded = [*shares, 0.0, 0.0][:3]
    total = sum(padded)
    borders = [0]
    for share in padded:
        borders.append(borders[-1] + round(share / total * num_documents))
    overshoot = borders[-1] - num_documents
    return [0, *(max(0, border - overshoot) for border in borders[1:])]


def core_boundaries(shares: Sequence[float], num_documents: int) -> list[int]:
    """`boundaries` by megatron-core's rule: the borders are rounded, not the splits, and nothing is set right."""
    weights = np.array([*shares, 0.0, 0.0][:3], np.float64)
    up_to = accumulate((weights / weights.sum()).tolist(), initial=0.0)
    return [round(share * num_documents) for share in up_to]


def oneflow_boundaries(shares: Sequence[float], num_documents: int) -> list[int]:
    """`boundaries` by OneFlow's rule: each split is rounded, in 32 bits, and nothing is set right afterwards.

    The last split may end before the last document. Where the original would go beyond it, this does not.
    """
    weights = np.array([*shares, 0.0, 0.0][:3], np.float32)
    counts = np.rint(weights / weights.sum() * np.float32(num_documents))
    return [min(border, num_documents) for border in accumulate((int(count) for count in counts), initial=0)]
