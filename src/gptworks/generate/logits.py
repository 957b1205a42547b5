"""Logits to the next token: pure functions on [V] rows, in the order temperature, top-k, top-p, draw."""

import torch
from torch import Tensor

from gptworks.config.schema import GenerateConfig


def next_token(logits_V: Tensor, cfg: GenerateConfig, generator: torch.Generator) -> int:
    if cfg.strategy == "greedy":
        return int(logits_V.argmax())
    probabilities_V = distribution(logits_V, cfg)
    return int(torch.multinomial(probabilities_V, 1, generator=generator))


def distribution(logits_V: Tensor, cfg: GenerateConfig) -> Tensor:
    """What sampling draws from."""
    return keep_top_p(keep_top_k(logits_V.float() / cfg.temperature, cfg.top_k), cfg.top_p).softmax(-1)


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """Everything below the k-th largest becomes -inf; 0 keeps all."""
    if not 0 < k < logits_V.shape[-1]:
        return logits_V
    return logits_V.masked_fill(logits_V < logits_V.topk(k).values[..., -1:], -torch.inf)


def keep_top_p(logits_V: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens until their mass reaches p; the one that crosses the threshold stays."""
    if p >= 1.0:
        return logits_V
    ordered_V, order_V = logits_V.sort(descending=True)
    probabilities_V = ordered_V.softmax(-1)
    mass_before_V = probabilities_V.cumsum(-1) - probabilities_V
    return logits_V.masked_fill((mass_before_V >= p).scatter(-1, order_V, mass_before_V >= p), -torch.inf)
