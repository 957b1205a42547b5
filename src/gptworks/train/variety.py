"""Does a sample repeat itself? Its tokens tell, whatever the model makes of them."""

import torch
from torch import Tensor

from gptworks.model import IGNORED, NOT_SCORED

_FEWEST = 32  # scored tokens of a sample that is judged: a short answer may well be one word twice


def varieties(labels_BT: Tensor) -> Tensor:
    """For each sample the entropy of its scored tokens, as a share of what so many tokens can have: 0 where all are the
    same, 1 where none comes twice, NOT_SCORED where there are too few. All of it stays on the device."""
    sorted_BT = labels_BT.sort(dim=1).values
    is_next_BT = torch.zeros_like(sorted_BT)
    is_next_BT[:, 1:] = sorted_BT[:, 1:] != sorted_BT[:, :-1]
    scored_BT = (sorted_BT != IGNORED).double()
    counts_BT = torch.zeros_like(scored_BT).scatter_add_(1, is_next_BT.cumsum(dim=1), scored_BT)  # of each kind
    total_B = scored_BT.sum(dim=1)
    shares_BT = counts_BT / total_B.clamp(min=1).unsqueeze(1)
    entropy_B = -torch.xlogy(shares_BT, shares_BT).sum(dim=1)
    return (entropy_B / total_B.clamp(min=2).log()).masked_fill(total_B < _FEWEST, NOT_SCORED)
