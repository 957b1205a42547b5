"""Computing activations again in the backward pass instead of keeping them. Random states are restored, so that
dropout repeats itself and gradients are the same to the bit."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gptworks.model import GPT


def apply_inside(part: GPT, mode: str) -> None:
    """full_attn: the attention sublayer; core_attn: only softmax(QK)V. Before blocks are compiled."""
    if mode in {"full_attn", "core_attn"}:
        # torch cannot compile recomputation and DTensors in one graph (2.13): under tensor parallelism a graph ends
        # before what is recomputed. That is matrix products and attention, where compiling gains nothing.
        is_cut = any(hasattr(parameter, "device_mesh") for parameter in part.parameters())
        for block in part.blocks.values():
            module: nn.Module = block.get_submodule("attn" if mode == "full_attn" else "attn.core")
            _recompute(module)
            if is_cut:
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]


def apply_around(part: GPT, mode: str) -> None:
    """full: each block as a whole. After blocks are compiled."""
    if mode == "full":
        for block in part.blocks.values():
            _recompute(block)


def note(mode: str, attention: str, dropout_attention: float, device: str) -> str | None:
    """What the user should know about the mode and the kernel that is in use."""
    if mode == "core_attn" and attention == "auto" and not (device == "cpu" and dropout_attention):
        return (
            "train.recompute: core_attn saves nothing here: the fused attention kernel keeps no attention matrix "
            "to begin with. Use full_attn or full to save memory, or model.attention: math to see its effect."
        )
    return None


def _recompute(module: nn.Module) -> None:
    forward: Callable[..., Any] = module.forward

    @wraps(forward)
    def recomputed(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False)

    module.forward = recomputed  # type: ignore[method-assign]
