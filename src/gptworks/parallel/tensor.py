"""Tensor parallelism: matrices cut among the ranks of a group.

Which dimension of a tensor is cut stands in `architecture.py`; what a module computes from then on is a table here.

Parameters become DTensors on the group's mesh, so that sharding, norms and checkpoints know what they are parts of.
Modules compute on the local tensors with explicit collectives (collectives.py), which takes less than half the time of
DTensor's dispatch on a CPU and leaves attention and dropout to torch's own kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from gptworks.architecture import role_of
from gptworks.config.contradictions import matrices_divide
from gptworks.config.schema import ParallelConfig
from gptworks.model import GPT
from gptworks.model.gpt import CoreAttention, LayerNorm, Linear, normalize
from gptworks.model.loss import LinearCrossEntropy
from gptworks.parallel import collectives, vocabulary
from gptworks.parallel.collectives import TensorRanks
from gptworks.parallel.random import with_own_draws

Forward = Callable[..., Tensor]
Style = Callable[[Any, TensorRanks], Forward]  # gives the new forward of a module whose parameters are cut already


def apply(part: GPT, tp: DeviceMesh, *, sequence: bool) -> None:
    """Cut the part in place. Of a pipeline stage, what is there."""
    problems = matrices_divide(part.cfg, ParallelConfig(tp=tp.size()))
    assert not problems, problems
    ranks = TensorRanks.of(tp, sequence=sequence)
    done: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for name, module in part.named_modules():
        style = NAMED.get(name) or TYPED.get(type(module))
        if style is None:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in done:
                dim = role_of(f"{name}.{key}").tp_dim
                # Every rank has the whole tensor (or its shape, on the meta device): nothing is sent.
                placement = Replicate() if dim is None else Shard(dim)
                cut = distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None)
                done[parameter] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            setattr(module, key, done[parameter])
        module.forward = style(module, ranks)
    left = [name for name, parameter in part.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"no style for {left}"
    partial = [name for name, p in part.named_parameters() if sequence and p.placements == (Replicate(),)]  # type: ignore[attr-defined]
    setattr(part, _PARTIAL, tuple(partial))


_PARTIAL = "parameters_with_partial_gradients"


@torch.no_grad()
def finish_gradients(part: GPT, tp: DeviceMesh) -> None:
    """Sum the gradients of parameters that are whole on each rank but saw only the rank's own tokens.

    Once, after the last backward pass and before anything reads the gradients. In one message, whatever their number,
    and on local tensors: what sharding has left of them here is the same piece on all ranks of the group.
    """
    named = dict(part.named_parameters(remove_duplicate=False))
    gradients = [named[name].grad for name in getattr(part, _PARTIAL)]
    local = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    if not local:
        return
    # Gradients kept on the CPU (offload) travel over the device that the group speaks through.
    flat = torch.cat([gradient.reshape(-1).float() for gradient in local]).to(tp.device_type)
    torch.distributed.all_reduce(flat, group=tp.get_group())
    for gradient, total in zip(local, flat.split([gradient.numel() for gradient in local]), strict=True):
        gradient.copy_(total.view_as(gradient))


def local(parameter: Tensor) -> Tensor:
    """This rank's part. Its gradient is taken for that part's own: finish_gradients adds what is missing."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Styles


def linear(module: nn.Linear, ranks: TensorRanks) -> Forward:
    is_column = module.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    return (column_linear if is_column else row_linear)(module, ranks)


def column_linear(module: nn.Linear, ranks: TensorRanks) -> Forward:
    """Output features cut."""
    module.out_features //= ranks.size  # those that are here: a cache asks how many heads there are

    def forward(x: Tensor) -> Tensor:
        weight, bias = local(module.weight).to(x.dtype), local(module.bias).to(x.dtype)
        if ranks.split_tokens:
            return collectives.linear_of_gathered_tokens(x, weight, bias, ranks)
        return F.linear(collectives.copy_to_ranks(x, ranks), weight, bias)

    return forward


def row_linear(module: nn.Linear, ranks: TensorRanks) -> Forward:
    """Input features cut: what ranks compute is summed, and the bias added to the sum."""
    module.in_features //= ranks.size

    def forward(x: Tensor) -> Tensor:
        share = F.linear(x, local(module.weight).to(x.dtype))
        add_up = collectives.sum_to_split_tokens if ranks.split_tokens else collectives.sum_over_ranks
        return add_up(share, ranks) + local(module.bias).to(x.dtype)

    return forward


def layer_norm(module: nn.LayerNorm, ranks: TensorRanks) -> Forward:
    return lambda x: normalize(x, local(module.weight), local(module.bias), module.eps)


def positions(module: nn.Embedding, ranks: TensorRanks) -> Forward:
    def forward(positions: Tensor) -> Tensor:
        if ranks.split_tokens:
            positions = positions.chunk(ranks.size, -1)[ranks.rank]
        return F.embedding(positions, local(module.weight))

    return forward


def stream_dropout(module: nn.Dropout, ranks: TensorRanks) -> Forward:
    """Every rank drops of its own tokens; of a stream that is whole, all drop the same."""
    same, own = module.forward, with_own_draws(module.forward, ranks.rank)
    return lambda x: own(x) if module.training and module.p and ranks.split_tokens else same(x)


def heads(module: nn.Module, ranks: TensorRanks) -> Forward:
    """Every rank drops attention of its own heads."""
    same, own = module.forward, with_own_draws(module.forward, ranks.rank)
    return lambda *args: own(*args) if module.training and module.dropout else same(*args)


def word_embedding(module: nn.Embedding, ranks: TensorRanks) -> Forward:
    return lambda tokens: vocabulary.embed(tokens, local(module.weight), module.num_embeddings, ranks)


def head(module: nn.Linear, ranks: TensorRanks) -> Forward:
    return lambda x: vocabulary.logits(x, local(module.weight), module.out_features, ranks)


def loss(module: nn.Module, ranks: TensorRanks) -> Forward:
    def forward(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return vocabulary.loss_sum(x, local(weight), labels, weight.shape[0], ranks)

    return forward


NAMED: dict[str, Style] = {"wte": word_embedding, "wpe": positions, "head": head}
TYPED: dict[type[nn.Module], Style] = {
    Linear: linear,
    LayerNorm: layer_norm,
    nn.Dropout: stream_dropout,
    CoreAttention: heads,
    LinearCrossEntropy: loss,
}
