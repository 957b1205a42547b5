"""What the ranks of one tensor-parallel group say to each other, as functions that have a gradient.

They take and give plain local tensors. Shapes: B rows, T tokens, t = T / ranks of them, D features, F features here.
Sums of bf16 and fp16 are taken in fp32: in their own type every hop between ranks would round.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

# Their names since torch 2.13, and before.
_all_gather: Any = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
_reduce_scatter: Any = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel group of this process."""

    mesh: DeviceMesh
    group: ProcessGroup
    rank: int
    size: int
    sequence: bool  # the residual stream is cut along the tokens while gradients are recorded

    @classmethod
    def of(cls, mesh: DeviceMesh, *, sequence: bool) -> "TensorRanks":
        return cls(mesh, mesh.get_group(), mesh.get_local_rank(), mesh.size(), sequence)

    @property
    def split_tokens(self) -> bool:
        """Whether the residual stream is cut now.

        Cutting it saves activations that are kept for the backward pass, so without gradients there is nothing to
        gain, and sequences of any length, a single token too, can be read. All ranks and stages know the answer
        without asking, and a gradient is always one of a cut stream.
        """
        return self.sequence and torch.is_grad_enabled()


def copy_to_ranks(x: Tensor, ranks: TensorRanks) -> Tensor:
    """x itself; each rank computes another part of what follows, so its gradients are summed."""
    return _CopyToRanks.apply(x, ranks.group)


def sum_over_ranks(x: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of all ranks' x, on all of them; what follows is computed alike on each."""
    return _SumOverRanks.apply(x, ranks.group)


def sum_to_split_tokens(x_BTD: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum of all ranks' x, each rank getting its own tokens."""
    return _SumToSplitTokens.apply(x_BTD, ranks.group)


def gather_tokens(x_BtD: Tensor, ranks: TensorRanks) -> Tensor:
    """The tokens of all ranks; each rank computes another part of what follows."""
    return _GatherTokens.apply(x_BtD, ranks.group)


def linear_of_gathered_tokens(x_BtD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, ranks: TensorRanks) -> Tensor:
    """linear(gather_tokens(x)) that keeps only this rank's tokens and gathers again in the backward pass."""
    return _LinearOfGatheredTokens.apply(x_BtD, weight_FD, bias_F, ranks.group)


def gather_features(x: Tensor, num_features: int, ranks: TensorRanks) -> Tensor:
    """The last dim of all ranks, which torch.chunk had cut, whole on each."""
    return _GatherFeatures.apply(x, num_features, ranks.group)


class _CopyToRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad_outputs[0], ctx.group), None


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return grad_outputs[0], None


class _SumToSplitTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter_tokens(x_BTD, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return all_gather_tokens(grad_outputs[0], ctx.group), None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather_tokens(x_BtD, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_tokens(grad_outputs[0], ctx.group), None


class _LinearOfGatheredTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(x_BtD, weight_FD)
        return F.linear(all_gather_tokens(x_BtD, group), weight_FD, bias_F)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x_BtD, weight_FD = ctx.saved_tensors
        grad_BTF = grad_outputs[0]
        grad_x = reduce_scatter_tokens(grad_BTF @ weight_FD, ctx.group)
        grad_RF = grad_BTF.reshape(-1, weight_FD.shape[0])
        x_RD = all_gather_tokens(x_BtD, ctx.group).view(-1, weight_FD.shape[1])
        grad_bias = grad_RF.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x, grad_RF.T @ x_RD, grad_bias, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, num_features: int, group: ProcessGroup) -> Tensor:
        size, here = group.size(), x.shape[-1]
        width = -(-num_features // size)
        ctx.start, ctx.here = group.rank() * width, here
        padded = F.pad(x, (0, width - here)).contiguous()
        parts = padded.new_empty(size * x.shape[0], *padded.shape[1:])
        _all_gather(parts, padded, group=group)
        parts = parts.view(size, *padded.shape).movedim(0, -2)
        return parts.reshape(*x.shape[:-1], size * width)[..., :num_features]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        return grad_outputs[0].narrow(-1, ctx.start, ctx.here), None, None


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True, memory_format=torch.contiguous_format)
    distributed.all_reduce(total, group=group)
    return total.to(x.dtype)


def all_gather_tokens(x_BtD: Tensor, group: ProcessGroup) -> Tensor:
    B, t, D = x_BtD.shape
    parts = x_BtD.new_empty(group.size() * B, t, D)
    _all_gather(parts, x_BtD.contiguous(), group=group)
    return parts.view(-1, B, t, D).transpose(0, 1).reshape(B, -1, D)


def reduce_scatter_tokens(x_BTD: Tensor, group: ProcessGroup) -> Tensor:
    B, _, D = x_BTD.shape
    size = group.size()
    parts = x_BTD.reshape(B, size, -1, D).transpose(0, 1).reshape(size * B, -1, D)
    if x_BTD.dtype.itemsize >= 4:
        mine = parts.new_empty(B, *parts.shape[1:])
        _reduce_scatter(mine, parts, group=group)
        return mine
    # As many bytes as a reduce-scatter in the narrow type, but summed in fp32 and rounded once.
    received = torch.empty_like(parts)
    distributed.all_to_all_single(received, parts, group=group)
    return received.view(size, B, -1, D).sum(0, dtype=torch.float32).to(x_BTD.dtype)
