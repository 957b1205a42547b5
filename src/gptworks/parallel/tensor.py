"""Tensor parallelism: matrices cut among the ranks of a group, by a table from module names to styles.

Parameters become DTensors on the group's mesh, so that sharding, norms and checkpoints know what they are parts of.
Modules compute on the local tensors with explicit collectives (collectives.py), which takes less than half the time of
DTensor's dispatch on a CPU and leaves attention and dropout to torch's own kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from gptworks.config.contradictions import matrices_divide
from gptworks.config.schema import ParallelConfig
from gptworks.model import GPT
from gptworks.model.gpt import normalize
from gptworks.parallel import collectives, vocabulary
from gptworks.parallel.collectives import TensorRanks
from gptworks.parallel.random import with_own_draws

Forward = Callable[..., Tensor]


@dataclass(frozen=True)
class Style:
    """How a module is cut, and what it computes from then on."""

    forward: Callable[[Any, TensorRanks], Forward]
    cuts: Mapping[str, Placement] = field(default_factory=dict)  # by parameter; what is not named is whole on each rank


def apply(part: GPT, tp: DeviceMesh, *, sequence: bool) -> None:
    """Cut the part in place. Of a pipeline stage, what is there."""
    problems = matrices_divide(part.cfg, ParallelConfig(tp=tp.size()))
    assert not problems, problems
    ranks = TensorRanks.of(tp, sequence=sequence)
    done: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one
    for name, module in part.named_modules():
        style = next((style for pattern, style in TABLE.items() if fnmatchcase(name, pattern)), None)
        if style is None:
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in done:
                placement = style.cuts.get(key, Replicate())
                # Every rank has the whole tensor (or its shape, on the meta device): nothing is sent.
                cut = distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None)
                done[parameter] = nn.Parameter(cut, requires_grad=parameter.requires_grad)
            setattr(module, key, done[parameter])
        module.forward = style.forward(module, ranks)
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


def stream_len(num_tokens: int, tp: int, *, sequence: bool) -> int:
    """Tokens of the residual stream on one rank, as it goes from stage to stage under the present gradient mode."""
    return num_tokens // tp if sequence and torch.is_grad_enabled() else num_tokens


def local(parameter: Tensor) -> Tensor:
    """This rank's part. Its gradient is taken for that part's own: finish_gradients adds what is missing."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


# Styles: each gives the module's new forward


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


ROWS = {"weight": Shard(0)}
COLUMN = Style(column_linear, {"weight": Shard(0), "bias": Shard(0)})
ROW = Style(row_linear, {"weight": Shard(1)})
NORM = Style(layer_norm)
DROPOUT = Style(stream_dropout)

TABLE = {
    "wte": Style(word_embedding, ROWS),
    "wpe": Style(positions),
    "dropout": DROPOUT,
    "blocks.*.ln[12]": NORM,
    "blocks.*.attn.qkv": COLUMN,
    "blocks.*.attn.core": Style(heads),
    "blocks.*.attn.out": ROW,
    "blocks.*.attn.dropout": DROPOUT,
    "blocks.*.mlp.up": COLUMN,
    "blocks.*.mlp.down": ROW,
    "blocks.*.mlp.dropout": DROPOUT,
    "ln_f": NORM,
    "head": Style(head, ROWS),
    "loss_sum": Style(loss),
}
