"""Word embedding, head and loss with the vocabulary cut among ranks. For a loss, logits are never gathered.

The cut is torch.chunk's: all ranks have ceil(V / ranks) rows but the last ones, which may have fewer. Nothing is padded
but what gathering logits for generation sends.
Shapes: B rows, T tokens, R = B x T, C rows of a chunk, D hidden, V vocabulary, W words of it on this rank.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.distributed import ProcessGroup

from gptworks.errors import UsageError
from gptworks.model import IGNORED
from gptworks.model.loss import CHUNK_ELEMENTS, add_product
from gptworks.parallel import collectives
from gptworks.parallel.collectives import TensorRanks


def embed(tokens_BT: Tensor, weight_WD: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Each rank looks up the words it has; the others count as zero in the sum."""
    if ranks.split_tokens and tokens_BT.shape[1] % ranks.size:
        raise UsageError(
            f"{tokens_BT.shape[1]} tokens in a row cannot be cut among the {ranks.size} ranks of parallel.tp. Needed: "
            f"a multiple of {ranks.size}. Change data.seq_len, or set parallel.sequence: false."
        )
    ids = tokens_BT - first_word(vocab_size, ranks)
    elsewhere = _is_elsewhere(ids, weight_WD.shape[0], ranks.rank, ranks.size)
    found_BTD = F.embedding(ids.masked_fill(elsewhere, 0), weight_WD).masked_fill(elsewhere[..., None], 0.0)
    if ranks.split_tokens:
        return collectives.sum_to_split_tokens(found_BTD, ranks)
    return collectives.sum_over_ranks(found_BTD, ranks)


def logits(x: Tensor, weight_WD: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """Of the whole vocabulary and of all tokens, on every rank."""
    if not ranks.split_tokens:
        x = collectives.copy_to_ranks(x, ranks)
    elif x.ndim == 3:
        x = collectives.gather_tokens(x, ranks)
    else:
        raise UsageError(
            "last_only: the last token of a sequence that is cut among ranks is on one of them only. "
            "Call the model under torch.no_grad(), or set parallel.sequence: false."
        )
    return collectives.gather_features(F.linear(x, weight_WD.to(x.dtype)), vocab_size, ranks)


def loss_sum(x: Tensor, weight_WD: Tensor, labels: Tensor, vocab_size: int, ranks: TensorRanks) -> Tensor:
    """The same sum of token losses on every rank, as model.loss.LinearCrossEntropy has it."""
    split = ranks.split_tokens
    if not torch.is_grad_enabled():  # a Function is not told
        x, weight_WD = x.detach(), weight_WD.detach()
    return _CutCrossEntropy.apply(x, weight_WD, labels, vocab_size, split, ranks.group)


def first_word(vocab_size: int, ranks: TensorRanks) -> int:
    return ranks.rank * math.ceil(vocab_size / ranks.size)


def _is_elsewhere(ids: Tensor, num_words: int, rank: int, num_ranks: int) -> Tensor:
    """Words of another rank. What is outside the vocabulary is nobody's: the first and the last rank keep it, and the
    lookup there refuses it, as on one process."""
    below = ids < 0 if rank else torch.zeros_like(ids, dtype=torch.bool)
    return below if rank == num_ranks - 1 else below | (ids >= num_words)


class _CutCrossEntropy(torch.autograd.Function):
    """As in model.loss the gradient of a chunk is computed right after its loss. Two small sums over ranks a chunk."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_WD: Tensor, labels: Tensor, vocab_size: int, split: bool, group: ProcessGroup
    ) -> Tensor:
        whole = collectives.all_gather_tokens(x, group) if split else x
        x_RD, labels_R = whole.reshape(-1, x.shape[-1]), labels.reshape(-1)
        num_rows, num_words = x_RD.shape[0], weight_WD.shape[0]
        widest = math.ceil(vocab_size / group.size())  # all ranks must agree on the chunks
        first = group.rank() * widest
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = weight_WD.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x_RD = torch.empty_like(x_RD) if wants_x else None
        grad_weight = torch.zeros_like(weight_WD, dtype=wide) if wants_weight else None
        loss = torch.zeros((), dtype=wide, device=x.device)
        num_chunks = max(1, math.ceil(num_rows * widest / CHUNK_ELEMENTS))
        chunk = math.ceil(num_rows / num_chunks)
        buffer = x_RD.new_empty(min(chunk, num_rows), num_words)
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            x_CD, labels_C1 = x_RD[part], labels_R[part, None]
            scored_C1 = labels_C1 != IGNORED
            here_C1 = scored_C1 & ~_is_elsewhere(labels_C1 - first, num_words, group.rank(), group.size())
            target_C1 = (labels_C1 - first).masked_fill(~here_C1, 0)
            logits_CW = torch.mm(x_CD, weight.T, out=buffer[: len(x_CD)]).to(wide)
            highest_C1 = logits_CW.amax(-1, keepdim=True)
            distributed.all_reduce(highest_C1, distributed.ReduceOp.MAX, group=group)
            logits_CW.sub_(highest_C1)
            target_logit_C1 = logits_CW.gather(1, target_C1).masked_fill(~here_C1, 0.0)
            exp_CW = logits_CW.exp_()
            sums_C2 = torch.cat([exp_CW.sum(-1, keepdim=True), target_logit_C1], 1)
            distributed.all_reduce(sums_C2, group=group)
            sum_C1, target_logit_C1 = sums_C2.split(1, 1)
            loss += (sum_C1.log() - target_logit_C1).masked_fill(~scored_C1, 0.0).sum()
            if not (wants_x or wants_weight):
                continue
            # softmax - one-hot in the memory of the logits; the one is on the rank that has the word
            grad_CW = exp_CW.mul_(scored_C1 / sum_C1).scatter_add_(1, target_C1, -here_C1.to(wide)).to(x.dtype)
            if grad_x_RD is not None:
                torch.mm(grad_CW, weight, out=grad_x_RD[part])
            if grad_weight is not None:
                add_product(grad_weight, grad_CW.T, x_CD)
        grad_x = None
        if grad_x_RD is not None:
            add_up = collectives.reduce_scatter_tokens if split else collectives.all_reduce
            grad_x = add_up(grad_x_RD.view(whole.shape), group)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_WD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_x, grad_weight = ctx.saved_tensors
        for gradient in (grad_x, grad_weight):
            if gradient is not None:
                gradient.mul_(grad_outputs[0])  # in place: backward runs once
        return grad_x, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), None, None, None, None
