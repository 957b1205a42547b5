"""Head and cross-entropy in one, some rows at a time, so that [tokens, vocabulary] never exists whole.

Shapes: R rows (tokens), C rows of a chunk, D hidden, V vocabulary.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of a token that is not scored

# Logits held at a time: 64 MB in fp32, a few hundred rows of a 50k vocabulary, enough for a product at full speed.
CHUNK_ELEMENTS = 16 * 1024 * 1024


class LinearCrossEntropy(nn.Module):
    """The fp32 sum of -log softmax(x W^T)[label] over the rows whose label is not -100."""

    def forward(self, x: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
        if not torch.is_grad_enabled():  # a Function is not told, and would compute the weight's gradient in vain
            x, weight_VD = x.detach(), weight_VD.detach()
        loss: Tensor = _LinearCrossEntropy.apply(x.reshape(-1, x.shape[-1]), weight_VD, labels.reshape(-1))
        return loss


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradient of a chunk is computed right after its loss, while its logits are still there."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_VD: Tensor, labels_R: Tensor) -> Tensor:
        num_rows, vocab_size = x_RD.shape[0], weight_VD.shape[0]
        wide = torch.promote_types(x_RD.dtype, torch.float32)
        weight = weight_VD.to(x_RD.dtype)
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_RD) if wants_x else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if wants_weight else None
        loss = torch.zeros((), dtype=wide, device=x_RD.device)
        # Equal chunks: a small remainder would multiply at a fraction of the speed.
        num_chunks = max(1, math.ceil(num_rows * vocab_size / CHUNK_ELEMENTS))
        chunk = math.ceil(num_rows / num_chunks)
        # One piece of memory for all chunks: fresh pages for each would cost a fifth of the product that fills them.
        buffer = x_RD.new_empty(min(chunk, num_rows), vocab_size)
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            x_CD, labels_C1 = x_RD[part], labels_R[part, None]
            scored_C1 = labels_C1 != IGNORED
            target_C1 = labels_C1.masked_fill(~scored_C1, 0)
            logits_CV = torch.mm(x_CD, weight.T, out=buffer[: len(x_CD)]).to(wide)
            logits_CV.sub_(logits_CV.amax(-1, keepdim=True))
            target_logit_C1 = logits_CV.gather(1, target_C1)
            exp_CV = logits_CV.exp_()
            sum_C1 = exp_CV.sum(-1, keepdim=True)
            loss += (sum_C1.log() - target_logit_C1).masked_fill(~scored_C1, 0.0).sum()
            if not (wants_x or wants_weight):
                continue
            # softmax - one-hot in the memory of the logits; nothing where the token is not scored
            grad_CV = exp_CV.mul_(scored_C1 / sum_C1).scatter_add_(1, target_C1, -scored_C1.to(wide)).to(x_RD.dtype)
            if grad_x is not None:
                torch.mm(grad_CV, weight, out=grad_x[part])
            if grad_weight is not None:
                add_product(grad_weight, grad_CV.T, x_CD)
        ctx.gradients, ctx.weight_dtype = (grad_x, grad_weight), weight_VD.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight = ctx.gradients
        ctx.gradients = None
        scale = grad_outputs[0]
        if grad_x is not None:
            grad_x = grad_x.mul_(scale)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.weight_dtype)
        return grad_x, grad_weight, None


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
