"""Rotary positions: pairs of numbers of each query and key are turned by angles that grow with the position.

Number i of a head is paired with number i + H/2, as Hugging Face and Megatron do. Angles are fp32, as in the systems
that such models were trained with. Shapes: B rows, T tokens, H head size.
"""

import math
from typing import Any

import torch
from torch import Tensor

from gptworks.config.schema import ModelConfig, RopeScalingConfig

# Of each number of a head the cosine, and the sine that its partner is multiplied by: [T, H] or [B, T, H].
Turns = tuple[Tensor, Tensor]


def turns_of(cfg: ModelConfig, positions: Tensor | int, device: torch.device) -> Turns | None:
    """By which tokens at these positions, [T] or [B, T], are turned, or the first so many; None: they are not."""
    if cfg.positions != "rope":
        return None
    if isinstance(positions, int):
        positions = torch.arange(positions, device=device)
    angles = positions[..., None].float() * frequencies(cfg).to(device)
    strength = attention_factor(cfg.rope_scaling)
    cos, sin = angles.cos() * strength, angles.sin() * strength
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def turn(x: Tensor, turns: Turns) -> Tensor:
    """x: [B, T, heads in any number of dims, H]."""
    return turned(x, *turns) if torch.compiler.is_compiling() else _Turn.apply(x, *turns)


class _Turn(torch.autograd.Function):
    """Keeps only the small tables: to turn back is to turn by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return turned(grad_outputs[0], cos, -sin), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All heads of a token side by side: loops over a single head are so short that they take ten times as long."""
    wide = x.reshape(*x.shape[:2], -1).to(torch.promote_types(x.dtype, torch.float32))
    size = x.shape[-1]
    partners = wide.view(*wide.shape[:2], -1, 2, size // 2).roll(1, 3).view(wide.shape)
    cos, sin = (each.repeat(*[1] * (each.ndim - 1), wide.shape[-1] // size) for each in (cos, sin))
    return (wide * cos).addcmul_(partners, sin.to(wide.dtype)).view(x.shape).to(x.dtype)


def frequencies(cfg: ModelConfig) -> Tensor:
    """[H/2] on the CPU: radians per token. Worked out anew each time: a model may be on any device, or on none."""
    scaling, size = cfg.rope_scaling, cfg.head_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    plain = 1.0 / cfg.rope_theta**exponents
    slow = plain / scaling.factor
    context = scaling.original_max_positions or cfg.max_positions
    if scaling.type == "none":
        return plain
    if scaling.type == "linear":
        return slow
    if scaling.type == "llama3":
        # Turns within the old context: few of them become fewer, many stay, in between one goes over into the other.
        turns = context * plain / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
    else:
        kept = 1 - _ramp(cfg, context)
    return slow * (1 - kept) + plain * kept


def _ramp(cfg: ModelConfig, context: int) -> Tensor:
    """YaRN: 0 up to the frequency that turns beta_fast times in the old context, 1 from that with beta_slow turns."""
    scaling, size = cfg.rope_scaling, cfg.head_size

    def place_of(num_turns: float) -> float:
        return size * math.log(context / (num_turns * 2 * math.pi)) / (2 * math.log(cfg.rope_theta))

    begin, end = place_of(scaling.beta_fast), place_of(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, size - 1)
    if begin == end:
        end += 0.001
    return ((torch.arange(size // 2, dtype=torch.float32, device="cpu") - begin) / (end - begin)).clamp(0, 1)


def attention_factor(scaling: RopeScalingConfig) -> float:
    """YaRN multiplies queries and keys, so that attention over a longer context stays as sharp."""
    if scaling.type != "yarn":
        return 1.0
    if scaling.attention_factor:
        return scaling.attention_factor

    def of(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return of(scaling.mscale) / of(scaling.mscale_all_dim)
    return of(1.0)
