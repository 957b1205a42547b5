"""Head and cross-entropy in one, some rows at a time, so that [tokens, vocabulary] never exists whole.

Shapes: R rows (tokens), C rows of a chunk, D hidden, V vocabulary, W words of it that are here.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of a token that is not scored
NOT_SCORED = -1.0  # in place of a mean loss, which is never below 0

# Logits held at a time: 64 MB in fp32, a few hundred rows of a 50k vocabulary, enough for a product at full speed.
CHUNK_ELEMENTS = 16 * 1024 * 1024


class Words:
    """The words of the vocabulary that are here: all of them. `parallel.vocabulary` cuts them among ranks, and says in
    these methods what ranks have to tell each other. Bits do not depend on which of the two a model of one process has.
    """

    def most(self, weight_VD: Tensor) -> int:
        """Words on the rank that has most of them: all ranks must agree on the chunks."""
        return weight_VD.shape[0]

    def rows(self, x: Tensor) -> Tensor:
        """All tokens, where this rank has only some of them."""
        return x

    def gradient(self, grad_x: Tensor) -> Tensor:
        """The gradient of what `rows` was given, from that of what it gave and of the words here."""
        return grad_x

    def places(self, labels_C1: Tensor, scored_C1: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
        """Where each label stands among the words here, and whether it does."""
        return labels_C1.masked_fill(~scored_C1, 0), scored_C1

    def highest(self, logit_C1: Tensor) -> Tensor:
        return logit_C1

    def totals(self, sum_C1: Tensor, target_logit_C1: Tensor, here_C1: Tensor) -> tuple[Tensor, Tensor]:
        """Sums of exponentials over all words, and the logits of the labels."""
        return sum_C1, target_logit_C1


class SampleLosses:
    """The mean loss of each sample of the last batch [B], where that is wanted: no part of the gradient, and still on
    the device. NOT_SCORED for a sample without a scored token."""

    wanted = False
    means_B: Tensor | None = None

    def keep(self, losses_R: Tensor, labels: Tensor) -> None:
        counts_B = (labels != IGNORED).sum(-1)
        means_B = losses_R.view(labels.shape).sum(-1) / counts_B.clamp(min=1)
        self.means_B = means_B.masked_fill(counts_B == 0, NOT_SCORED)


class LinearCrossEntropy(nn.Module):
    """The fp32 sum of -log softmax(x W^T)[label] over the rows whose label is not -100."""

    def __init__(self) -> None:
        super().__init__()
        self.of_samples = SampleLosses()

    def forward(self, x: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(x, weight_VD, labels, Words(), self.of_samples)


def linear_cross_entropy(
    x: Tensor, weight_WD: Tensor, labels: Tensor, words: Words, of_samples: SampleLosses
) -> Tensor:
    if not torch.is_grad_enabled():  # a Function is not told, and would compute the weight's gradient in vain
        x, weight_WD = x.detach(), weight_WD.detach()
    loss: Tensor = _LinearCrossEntropy.apply(x, weight_WD, labels, words, of_samples)
    return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient of a chunk is computed right after its loss, while its logits are still there."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_WD: Tensor, labels: Tensor, words: Words, of_samples: SampleLosses
    ) -> Tensor:
        whole = words.rows(x)
        x_RD, labels_R = whole.reshape(-1, x.shape[-1]), labels.reshape(-1)
        num_rows, num_words = x_RD.shape[0], weight_WD.shape[0]
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = weight_WD.to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_RD = torch.empty_like(x_RD) if wants_x else None
        grad_weight = torch.zeros_like(weight_WD, dtype=wide) if wants_weight else None
        loss = torch.zeros((), dtype=wide, device=x.device)
        losses: list[Tensor] = []
        # Equal chunks: a small remainder would multiply at a fraction of the speed.
        num_chunks = max(1, math.ceil(num_rows * words.most(weight_WD) / CHUNK_ELEMENTS))
        chunk = math.ceil(num_rows / num_chunks)
        # One piece of memory for all chunks: fresh pages for each would cost a fifth of the product that fills them.
        buffer = x_RD.new_empty(min(chunk, num_rows), num_words)
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            x_CD, labels_C1 = x_RD[part], labels_R[part, None]
            scored_C1 = labels_C1 != IGNORED
            target_C1, here_C1 = words.places(labels_C1, scored_C1, num_words)
            logits_CW = torch.mm(x_CD, weight.T, out=buffer[: len(x_CD)]).to(wide)
            logits_CW.sub_(words.highest(logits_CW.amax(-1, keepdim=True)))
            target_logit_C1 = logits_CW.gather(1, target_C1)
            exp_CW = logits_CW.exp_()
            sum_C1, target_logit_C1 = words.totals(exp_CW.sum(-1, keepdim=True), target_logit_C1, here_C1)
            losses_C1 = (sum_C1.log() - target_logit_C1).masked_fill(~scored_C1, 0.0)
            loss += losses_C1.sum()
            if of_samples.wanted:
                losses.append(losses_C1)
            if not (wants_x or wants_weight):
                continue
            # softmax - one-hot in the memory of the logits; nothing where the token is not scored
            grad_CW = exp_CW.mul_(scored_C1 / sum_C1).scatter_add_(1, target_C1, -here_C1.to(wide)).to(x.dtype)
            if grad_RD is not None:
                torch.mm(grad_CW, weight, out=grad_RD[part])
            if grad_weight is not None:
                add_product(grad_weight, grad_CW.T, x_CD)
        if of_samples.wanted:
            of_samples.keep(torch.cat(losses), labels)
        grad_x = words.gradient(grad_RD.view(whole.shape)) if grad_RD is not None else None
        ctx.gradients, ctx.weight_dtype = (grad_x, grad_weight), weight_WD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_x, grad_weight = scaled_gradients(ctx, grad_outputs[0])
        return grad_x, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), None, None, None


def scaled_gradients(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and of the weight that forward has kept, once."""
    if ctx.gradients is None:
        raise RuntimeError("backward was called twice: gradients of the loss are computed with it and given once")
    grad_x, grad_weight = ctx.gradients
    ctx.gradients = None
    for gradient in (grad_x, grad_weight):
        if gradient is not None:
            gradient.mul_(scale)
    return grad_x, grad_weight


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, summed in the type of `total`: over many tokens a sum in fp16 would overflow."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and _multiplies_into(total.dtype, a.dtype):
        total += torch.mm(a, b, out_dtype=total.dtype)  # type: ignore[call-overload]
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


@cache
def _multiplies_into(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether products of narrow matrices can come out wide on this GPU: torch before 2.8 does not know the keyword,
    and some builds for ROCm refuse the types. Tried once."""
    a = torch.zeros(16, 16, dtype=narrow, device="cuda")
    try:
        torch.mm(a, a, out_dtype=wide)  # type: ignore[call-overload]
    except (TypeError, RuntimeError):
        return False
    return True
