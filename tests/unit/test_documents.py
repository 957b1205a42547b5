"""Attention that stays within documents, one document after the other: what a mask of all pairs of tokens gives."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.model import masks
from gptworks.model.masks import attention_mask, causal_mask, first_seen, seen_from
from gptworks.parallel.build import FreshWeights, build_gpt

T = 30
SEGMENTS = torch.tensor([[0] * 30, [0] * 7 + [1] + [2] * 12 + [3] * 10, [5] * 29 + [9]])
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "math": {"attention": "math"},
    "llama": LLAMA,
    "qwen3": {**LLAMA, "qk_norm": True},
    "window": {**LLAMA, "sliding_window": 4},
    "window-of-one": {"sliding_window": 1},
    "window-over-all": {"sliding_window": 29},
}


def loss_and_gradients(kind: dict[str, Any], **keywords: Tensor) -> tuple[float, dict[str, Tensor]]:
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 40, "max_positions": T, **kind}
    cfg = ModelConfig.model_validate(shape)
    weights = FreshWeights(InitConfig(std=0.2), cfg.num_layers, seed=1)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).train()
    tokens = torch.randint(0, 40, (3, T + 1), generator=torch.Generator().manual_seed(2))
    loss = model(tokens[:, :-1], labels=tokens[:, 1:], segments=SEGMENTS, **keywords)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("resets", [False, True])
def test_equal_to_the_dense_mask(kind: str, resets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begins = first_seen(SEGMENTS, 0)
    keywords = {"positions": torch.arange(T) - begins} if resets else {}
    loss, found = loss_and_gradients(KINDS[kind], **keywords)
    monkeypatch.setattr(masks, "_is_by_documents", lambda segments: False)
    wanted_loss, wanted = loss_and_gradients(KINDS[kind], **keywords)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


@pytest.mark.parametrize("window", [0, 1, 5, 100])
def test_the_first_token_seen_says_what_the_mask_says(window: int) -> None:
    seen = causal_mask(T, torch.device("cpu")) & (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])
    if window:
        places = torch.arange(T)
        seen &= places[:, None] - places < window
    assert torch.equal(seen_from(first_seen(SEGMENTS, window))[:, 0], seen)


def test_documents_that_return_have_a_dense_mask() -> None:
    returning = torch.tensor([[0, 1, 0, 1]])
    mask = attention_mask(4, returning, None, 0, torch.device("cpu"))
    assert mask is not None and mask.dtype == torch.bool
    assert mask[0, 0, 2].tolist() == [True, False, True, False]
