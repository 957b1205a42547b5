"""RMSNorm: x / sqrt(mean(x^2) + eps) x weight, in fp32 or better."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def normalize_by_rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if torch.compiler.is_compiling():
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(x.dtype)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    """Few passes over memory, and keeps x and one number per row: on the CPU torch's own is composed of small steps and
    takes six times as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        squares = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        normal = x * scale  # in the type of the scale
        grad = grad_outputs[0].to(normal.dtype)
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        grad = grad * weight
        along = torch.linalg.vecdot(grad, normal).unsqueeze(-1).div_(x.shape[-1])
        return grad.sub_(normal.mul_(along)).mul_(scale).to(x.dtype), grad_weight, None
