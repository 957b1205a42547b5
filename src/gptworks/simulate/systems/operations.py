"""Operations as they allocate: what each keeps for the backward pass, what it makes in the backward pass."""

from collections.abc import Callable
from typing import Any

import torch

from gptworks.simulate.systems.case import Case
from gptworks.simulate.systems.trace import Recorder


def new(*shape: Any, dtype: torch.dtype = torch.half) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def parameter(*shape: int, dtype: torch.dtype = torch.half) -> torch.nn.Parameter:
    return torch.nn.Parameter(new(*shape, dtype=dtype))


class Elementwise(torch.autograd.Function):
    """One output; keeps the tensors in `keep` ("in", "out", "mask") and makes one gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: str, copies: int) -> torch.Tensor:
        temporary = [new(x.shape) for _ in range(copies)]
        mask = new(x.shape, dtype=torch.uint8) if "mask" in keep else None
        out = new(x.shape)
        ctx.kept = mask
        ctx.save_for_backward(*([x] if "in" in keep else []), *([out] if "out" in keep else []))
        del temporary
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        kept = ctx.saved_tensors
        out = new(gradient.shape)
        ctx.kept = None
        del kept
        return out, None, None


def dropout(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "mask", 0)


def softmax(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "out", 0)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return Elementwise.apply(x, "in", 0)


class Norm(torch.autograd.Function):
    """Layer norm: keeps its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return new(x.shape), new(weight.shape), new(weight.shape)


class Added(torch.autograd.Function):
    """Sum with a tensor of the same shape, or with a bias."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        ctx.same, ctx.shape = x.shape == other.shape, other.shape
        return new(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, gradient if ctx.same else new(ctx.shape)


class Reduced(torch.autograd.Function):
    """An all-reduce of tensor parallelism: in the forward pass, in the backward pass, in place or not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ways: int, where: str, inplace: bool) -> torch.Tensor:
        ctx.here = ways > 1 and where == "backward"
        ctx.inplace = inplace
        return reduce(x, inplace) if ways > 1 and where == "forward" else x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (reduce(gradient, ctx.inplace) if ctx.here else gradient), None, None, None


def reduce(x: torch.Tensor, inplace: bool) -> torch.Tensor:
    if inplace and RECORDER:
        RECORDER[-1].mark(x)
    return x if inplace else new(x.shape)


RECORDER: list[Recorder] = []


class Recomputed(torch.autograd.Function):
    """Keeps the input, runs the function again in the backward pass (mpu.checkpoint, fleet.utils.recompute)."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        with torch.no_grad():
            out = function(*inputs)
        ctx.save_for_backward(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        torch.autograd.backward(out, gradient)
        return None, *(x.grad for x in inputs)


class TensorParallelLayer:
    """The parameters of a layer on one tensor-parallel rank, in the order in which Megatron and FleetX make them."""

    def __init__(self, case: Case) -> None:
        h, t = case.hidden, case.tp
        self.case = case
        self.norm1, self.norm2 = (parameter(h), parameter(h)), (parameter(h), parameter(h))
        self.qkv, self.out = (parameter(3 * h // t, h), parameter(3 * h // t)), (parameter(h, h // t), parameter(h))
        self.up, self.down = (parameter(4 * h // t, h), parameter(4 * h // t)), (parameter(h, 4 * h // t), parameter(h))
        self.parameters = [*self.norm1, *self.qkv, *self.out, *self.norm2, *self.up, *self.down]
