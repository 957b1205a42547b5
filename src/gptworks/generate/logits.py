"""What can be done to the logits of the next token: pure functions on [V] rows, each off at its neutral value."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

_LARGEST = 1e37  # of float32, and its inverse is still a normal number


def add_bias(logits_V: Tensor, biases: Mapping[int, float]) -> Tensor:
    if not biases:
        return logits_V
    at = torch.tensor(list(biases), device=logits_V.device)
    return logits_V.index_add(-1, at, torch.tensor(list(biases.values()), dtype=logits_V.dtype, device=logits_V.device))


def penalize_repetition(logits_V: Tensor, seen: Sequence[int], penalty: float) -> Tensor:
    """CTRL's penalty: positive logits of seen tokens are divided by it, negative ones multiplied."""
    if penalty == 1.0 or not seen:
        return logits_V
    at = _ids(seen, logits_V)
    seen_logits = logits_V[at]
    return logits_V.index_put((at,), torch.where(seen_logits < 0, seen_logits * penalty, seen_logits / penalty))


def penalize_counts(logits_V: Tensor, generated: Sequence[int], presence: float, frequency: float) -> Tensor:
    """`presence` off each generated token, and `frequency` times how often it was generated."""
    if not generated or (presence == 0.0 and frequency == 0.0):
        return logits_V
    counts_V = count(generated, logits_V)
    return logits_V - frequency * counts_V - presence * (counts_V > 0)


def forbid_repeated_ngrams(logits_V: Tensor, tokens: Sequence[int], size: int) -> Tensor:
    """No token that would complete a sequence of `size` tokens that is already there."""
    if size == 0 or len(tokens) < size:
        return logits_V
    prefix = list(tokens[len(tokens) - size + 1 :])
    last = [tokens[i + size - 1] for i in range(len(tokens) - size + 1) if list(tokens[i : i + size - 1]) == prefix]
    return logits_V.index_fill(-1, _ids(last, logits_V), -torch.inf) if last else logits_V


def forbid(logits_V: Tensor, token: int | None) -> Tensor:
    if token is None or token >= logits_V.shape[-1]:
        return logits_V
    return logits_V.index_fill(-1, torch.tensor([token], device=logits_V.device), -torch.inf)


def divide_by_temperature(logits_V: Tensor, temperature: float) -> Tensor:
    """The quotients always have a softmax: where the largest would overflow, it becomes 0."""
    if float(logits_V.max()) / temperature > _LARGEST:
        logits_V = logits_V - logits_V.max()
    return logits_V / min(temperature, _LARGEST)


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """Everything below the k-th largest becomes -inf; 0 keeps all."""
    if not 0 < k < logits_V.shape[-1]:
        return logits_V
    return torch.where(logits_V < logits_V.topk(k).values[..., -1:], -torch.inf, logits_V)


def keep_top_p(logits_V: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens until their mass reaches p; the one that crosses the threshold stays."""
    if p >= 1.0:
        return logits_V
    probabilities_V = logits_V.softmax(-1)
    # Their values are enough to know the least that is kept, and numpy sorts values forty times as fast as torch.
    ordered_V = np.sort(probabilities_V.cpu().numpy())[::-1]
    mass_before_V = np.cumsum(ordered_V, dtype=np.float64) - ordered_V
    num_kept = max(1, int((mass_before_V < p).sum()))  # one, however small p is
    least = float(ordered_V[num_kept - 1])
    is_kept_V = probabilities_V >= least
    if (too_many := int(is_kept_V.sum()) - num_kept) > 0:  # some are as likely as the least: the last of those go
        is_kept_V[(probabilities_V == least).nonzero().flatten()[-too_many:]] = False
    return torch.where(is_kept_V, logits_V, -torch.inf)


def keep_min_p(logits_V: Tensor, p: float) -> Tensor:
    """Keep the tokens that are at least p times as likely as the likeliest."""
    if p == 0.0:
        return logits_V
    probabilities_V = logits_V.softmax(-1)
    largest = probabilities_V.max(-1, keepdim=True).values
    return logits_V.masked_fill(probabilities_V < p * largest, -torch.inf)


def keep_typical(logits_V: Tensor, p: float) -> Tensor:
    """Keep the tokens whose surprise is nearest to the expected one until their mass reaches p."""
    if p >= 1.0:
        return logits_V
    log_V = logits_V.log_softmax(-1)
    expected = -(log_V * log_V.exp()).nansum(-1, keepdim=True)
    distance_V, order_V = (-log_V - expected).abs().sort()
    mass_V = logits_V.gather(-1, order_V).softmax(-1).cumsum(-1)
    last = (mass_V < p).sum(-1, keepdim=True).clamp(max=logits_V.shape[-1] - 1)
    is_far_V = distance_V > distance_V.gather(-1, last)
    return logits_V.masked_fill(is_far_V.scatter(-1, order_V, is_far_V), -torch.inf)


def count(tokens: Sequence[int], like_V: Tensor) -> Tensor:
    """How often each token of the vocabulary is among them."""
    return torch.bincount(_ids(tokens, like_V), minlength=like_V.shape[-1])


def _ids(tokens: Sequence[int], logits_V: Tensor) -> Tensor:
    """Without those beyond the vocabulary, which can stand in a prompt but not be drawn."""
    ids = torch.tensor(sorted(tokens), dtype=torch.long, device=logits_V.device)
    return ids[ids < logits_V.shape[-1]]
