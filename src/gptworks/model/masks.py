"""Which tokens a token may look at, and the checks of what comes in with the tokens.

Shapes: B rows, T tokens, S tokens that can be seen.
"""

import torch
from torch import Tensor

from gptworks.errors import UsageError
from gptworks.model.cache import KVCache


def attention_mask(num_tokens: int, segments: Tensor | None, cache: KVCache | None) -> Tensor | None:
    """[B, 1, T, S]: True where a token may look. None is plain causal attention, which has the fastest kernel."""
    if cache is not None:
        if segments is not None:
            raise UsageError("segments and cache cannot be used together: a cache holds one document per row.")
        return None if cache.used == 0 else cache.mask(num_tokens)
    if segments is None:
        return None
    causal_TT = causal_mask(segments.shape[1], segments.device)
    return (causal_TT & (segments[:, :, None] == segments[:, None, :]))[:, None]


def causal_mask(num_tokens: int, device: torch.device) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def require_positions(num_tokens: int, max_positions: int) -> None:
    if num_tokens > max_positions:
        raise UsageError(f"{num_tokens} tokens in a row, but the model has {max_positions} positions. Give it fewer.")


def real_tokens(attention_mask: Tensor, tokens_BT: Tensor) -> Tensor:
    """The mask as booleans. Padding before or between tokens would give them other positions than they have alone."""
    if attention_mask.shape != tokens_BT.shape:
        raise UsageError(
            f"attention_mask: got shape {list(attention_mask.shape)}; needs {list(tokens_BT.shape)}, as the tokens."
        )
    real_BT = attention_mask != 0
    for row in (real_BT[:, 1:] & ~real_BT[:, :-1]).any(1).nonzero().flatten().tolist():
        raise UsageError(
            f"attention_mask: row {row} is {attention_mask[row].tolist()[:16]}; needs padding on the right only, "
            "as Tokenizer(..., padding=True) makes it."
        )
    return real_BT
