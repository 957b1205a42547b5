"""Attention that stays within documents, one after the other: on a CPU a mask of all pairs of tokens costs as much as
attention over all of them. Shapes: B rows, T tokens, N heads, H head size, L tokens of a document."""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.model.masks import seen_from


def attend_by_document(q_BNTH: Tensor, k_BNTH: Tensor, v_BNTH: Tensor, first_BT: Tensor, dropout: float) -> Tensor:
    """`first_BT`: of each token the first that it may look at; a document begins where that is the token itself."""
    B, N, T, H = q_BNTH.shape
    starts = (first_BT == torch.arange(T)).flatten().nonzero().flatten().tolist()
    lengths = [end - start for start, end in zip(starts, [*starts[1:], B * T], strict=True)]
    # Split along all tokens of the batch: the gradient of that is one copy, that of many slices many.
    by_document = zip(
        *(each.transpose(1, 2).reshape(B * T, N, H).split(lengths) for each in (q_BNTH, k_BNTH, v_BNTH)), strict=True
    )
    firsts = (first_BT + T * torch.arange(B)[:, None]).flatten()
    mixed = [
        _attend(q_LNH, k_LNH, v_LNH, firsts[start : start + len(q_LNH)] - start, dropout)
        for start, (q_LNH, k_LNH, v_LNH) in zip(starts, by_document, strict=True)
    ]
    return torch.cat(mixed).view(B, T, N, H).transpose(1, 2)


def _attend(q_LNH: Tensor, k_LNH: Tensor, v_LNH: Tensor, first_L: Tensor, dropout: float) -> Tensor:
    q, k, v = (each.transpose(0, 1)[None] for each in (q_LNH, k_LNH, v_LNH))
    # Longer than the sliding window: a mask, but only of this document.
    mask = seen_from(first_L[None]) if first_L[-1] > 0 else None
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
    return mixed[0].transpose(0, 1)
