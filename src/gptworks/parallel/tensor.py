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
from gptworks.config.checks import matrices_divide
from gptworks.config.schema import ParallelConfig
from gptworks.model import GPT
from gptworks.model.gpt import Attention, CoreAttention, LayerNorm, Linear, RMSNorm, normalize
from gptworks.model.loss import LinearCrossEntropy, linear_cross_entropy
from gptworks.model.rms import normalize_by_rms
from gptworks.parallel import collectives, vocabulary
from gptworks.parallel.collectives import TensorRanks
from gptworks.parallel.kv_copies import KVCopies, copies_in, is_copied, remember
from gptworks.parallel.random import with_own_draws

Forward = Callable[..., Tensor]
Style = Callable[[Any, TensorRanks], Forward]  # gives the new forward of a module whose parameters are cut already


def apply(part: GPT, tp: DeviceMesh, *, sequence: bool) -> None:
    """Cut the part in place. Of a pipeline stage, what is there."""
    problems = matrices_divide(part.cfg, ParallelConfig(tp=tp.size()))
    assert not problems, problems
    ranks = TensorRanks.of(tp, sequence=sequence)
    copies = KVCopies.of(part.cfg, tp.size())
    if copies is not None:
        _copy_kv_heads(part, copies)
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
    remember(part, copies)
    left = [name for name, parameter in part.named_parameters() if not isinstance(parameter, DTensor)]
    assert not left, f"no style for {left}"
    partial = [
        name
        for name, parameter in part.named_parameters()
        if parameter.placements == (Replicate(),) and (sequence or role_of(name).sees_own_heads)  # type: ignore[attr-defined]
    ]
    setattr(part, _PARTIAL, tuple(partial))


_PARTIAL = "parameters_with_partial_gradients"


def _copy_kv_heads(part: GPT, copies: KVCopies) -> None:
    for module in part.modules():
        if isinstance(module, Attention):
            module.heads_per_kv = copies.heads_per_kv
            module.qkv.out_features = copies.rows_with_copies
            for key, parameter in module.qkv.named_parameters():
                setattr(module.qkv, key, nn.Parameter(copies.with_copies(parameter.detach())))


@torch.no_grad()
def finish_gradients(part: GPT, tp: DeviceMesh) -> None:
    """Sum the gradients of what several ranks hold, and of which each saw only its own tokens or heads.

    Once, after the last backward pass and before anything reads the gradients. In one message, whatever their number,
    and on local tensors: what sharding has left of them here is the same piece on all ranks of the group.
    """
    named = dict(part.named_parameters(remove_duplicate=False))
    gradients = [named[name].grad for name in getattr(part, _PARTIAL)]
    whole = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    copies = copies_in(part)
    shared = [] if copies is None else _rows_of_copies(part, copies)
    # Each head of keys and values has a place of its own: a rank adds to that of its head and reads the sum there.
    in_places = [] if copies is None else [_in_place(rows, head, copies.kv_heads) for rows, head in shared]
    everything = [gradient.float() for gradient in whole] + in_places
    if not everything:
        return
    # Gradients kept on the CPU (offload) travel over the device that the group speaks through.
    flat = torch.cat([gradient.reshape(-1) for gradient in everything]).to(tp.device_type)
    torch.distributed.all_reduce(flat, group=tp.get_group())
    totals = [
        total.view_as(gradient)
        for gradient, total in zip(everything, flat.split([each.numel() for each in everything]), strict=True)
    ]
    for gradient, total in zip(whole, totals, strict=False):
        gradient.copy_(total)
    for (rows, head), total in zip(shared, totals[len(whole) :], strict=True):
        rows.copy_(total[head])


def _rows_of_copies(part: GPT, copies: KVCopies) -> list[tuple[Tensor, int]]:
    """The gradients of keys and values that other ranks have copies of, and of which head they are."""
    named = ((name, parameter.grad) for name, parameter in part.named_parameters() if is_copied(name))
    return [copies.shared_rows(gradient) for _, gradient in named if gradient is not None]


def _in_place(rows: Tensor, head: int, num_heads: int) -> Tensor:
    room = rows.new_zeros((num_heads, *rows.shape), dtype=torch.float32)
    room[head] = rows
    return room


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
        weight, bias = local(module.weight).to(x.dtype), _bias_of(module, x.dtype)
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
        total, bias = add_up(share, ranks), _bias_of(module, x.dtype)
        return total if bias is None else total + bias

    return forward


def _bias_of(module: nn.Linear, dtype: torch.dtype) -> Tensor | None:
    bias: Tensor | None = module.bias
    return None if bias is None else local(bias).to(dtype)


def layer_norm(module: nn.LayerNorm, ranks: TensorRanks) -> Forward:
    def forward(x: Tensor) -> Tensor:
        bias: Tensor | None = module.bias
        return normalize(x, local(module.weight), None if bias is None else local(bias), module.eps)

    return forward


def rms_norm(module: RMSNorm, ranks: TensorRanks) -> Forward:
    return lambda x: normalize_by_rms(x, local(module.weight), module.eps)


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


def loss(module: LinearCrossEntropy, ranks: TensorRanks) -> Forward:
    def forward(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        words = vocabulary.CutWords(weight.shape[0], ranks, ranks.split_tokens)
        return linear_cross_entropy(x, local(weight), labels, words, module.of_samples)

    return forward


NAMED: dict[str, Style] = {"wte": word_embedding, "wpe": positions, "head": head}
TYPED: dict[type[nn.Module], Style] = {
    Linear: linear,
    LayerNorm: layer_norm,
    RMSNorm: rms_norm,
    nn.Dropout: stream_dropout,
    CoreAttention: heads,
    LinearCrossEntropy: loss,
}
