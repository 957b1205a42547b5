"""GELU in its three forms, and the gate of SwiGLU."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# 0.5 x (1 + tanh(u)) = x sigmoid(2u), with 2u = A x + B x^3
_A = 2 * (2 / torch.pi) ** 0.5
_B = _A * 0.044715


def activate(x: Tensor, kind: str) -> Tensor:
    """tanh: GPT-2's approximation; erf: exact; sigmoid: x sigmoid(1.702 x)."""
    if kind == "sigmoid":
        return x * torch.sigmoid(1.702 * x)
    if kind == "erf":
        return F.gelu(x)
    # On the CPU torch's tanh takes three times as long as its sigmoid, which gives the same function.
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _TanhGELU.apply(x)
    return F.gelu(x, approximate="tanh")


class _TanhGELU(torch.autograd.Function):
    """Few passes over memory: written with in-place operations, keeps only x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _inner(x).sigmoid_().mul_(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        z = _inner(x)
        s = torch.sigmoid(z)
        # d/dx x s(z) = s + s (1 - s) x z' = s (1 + 3 y),  y = (1 - s) (z - 2/3 A x),  because x z' = 3 z - 2 A x
        y = z.sub_(x, alpha=2 / 3 * _A).addcmul_(z, s, value=-1)
        return s.addcmul_(s, y, value=3).mul_(grad_outputs[0])


def _inner(x: Tensor) -> Tensor:
    """2u = x (A + B x^2)"""
    return (x * x).mul_(_B).add_(_A).mul_(x)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) x up."""
    return F.silu(gate) * up if torch.compiler.is_compiling() else _Gated.apply(gate, up)


class _Gated(torch.autograd.Function):
    """Keeps what it was given, and computes silu again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        (grad,) = grad_outputs
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)
