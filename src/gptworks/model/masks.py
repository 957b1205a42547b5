"""Which tokens a token may look at, and the checks of what comes in with the tokens.

Shapes: B rows, T tokens, S tokens that can be seen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks.errors import UsageError
from gptworks.model.cache import KVCache


def attention_mask(
    num_tokens: int, segments: Tensor | None, cache: KVCache | None, window: int, device: torch.device
) -> Tensor | None:
    """None: plain causal attention, which has the fastest kernel. Booleans [B, 1, T, S] or [T, S]: True where a token
    may look. On a CPU integers [B, T]: the first token that each may look at (`documents.py`).

    segments: only at tokens of its own number. window: only at itself and the window - 1 tokens before it; 0 = at all.
    """
    if cache is not None:
        if segments is not None:
            raise UsageError("segments and cache cannot be used together: a cache holds one document per row.")
        if cache.used > 0:
            return cache.mask(num_tokens, window)
    if segments is None:
        return within_window(num_tokens, window, device) if 0 < window < num_tokens else None
    if _is_by_documents(segments):
        return first_seen(segments, window)
    seen_TT = within_window(segments.shape[1], window, segments.device)
    return (seen_TT & (segments[:, :, None] == segments[:, None, :]))[:, None]


def _is_by_documents(segments: Tensor) -> bool:
    """Whether tokens of one number stand side by side, in numbers that can be read here and now: those of a GPU would
    have to be waited for, and where steps are only traced there are none."""
    is_here = type(segments) is Tensor and segments.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_here and bool((segments[:, 1:] >= segments[:, :-1]).all())


def first_seen(segments: Tensor, window: int) -> Tensor:
    """[B, T]: the first token that each token may look at."""
    places_T = torch.arange(segments.shape[1], device=segments.device)
    begins_BT = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    first_BT = torch.where(begins_BT, places_T, 0).cummax(1).values
    return first_BT.maximum(places_T - (window - 1)) if window else first_BT


def seen_from(first_BT: Tensor) -> Tensor:
    """The mask [B, 1, T, T] of booleans that says the same."""
    T = first_BT.shape[1]
    places_T = torch.arange(T, device=first_BT.device)
    return (causal_mask(T, first_BT.device) & (places_T >= first_BT[:, :, None]))[:, None]


def causal_mask(num_tokens: int, device: torch.device) -> Tensor:
    return torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device).tril()


def within_window(num_tokens: int, window: int, device: torch.device) -> Tensor:
    """[T, T]: a causal mask of which only the last `window` tokens are seen, or all."""
    causal_TT = causal_mask(num_tokens, device)
    return causal_TT.triu(1 - window) if window else causal_TT


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
