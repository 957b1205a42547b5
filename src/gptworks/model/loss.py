"""Head and cross-entropy in one, some rows at a time, so that [tokens, vocabulary] never exists whole.

Shapes: R rows (tokens), C rows of a chunk, D hidden, V vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

IGNORED = -100  # the label of a token that is not scored

# Logits held at a time. Large enough for the matrix products to run at full speed, small enough for the cache:
# between 4M and 64M the time of a step changes by less than the noise.
CHUNK_ELEMENTS = 16 * 1024 * 1024


class LinearCrossEntropy(nn.Module):
    """The fp32 sum of -log softmax(x W^T)[label] over the rows whose label is not -100."""

    def forward(self, x: Tensor, weight_VD: Tensor, labels: Tensor) -> Tensor:
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
        grad_weight = torch.zeros_like(weight_VD) if wants_weight else None
        loss = torch.zeros((), dtype=wide, device=x_RD.device)
        # Equal chunks: a small remainder would multiply at a fraction of the speed.
        num_chunks = max(1, math.ceil(num_rows * vocab_size / CHUNK_ELEMENTS))
        chunk = math.ceil(num_rows / num_chunks)
        for start in range(0, num_rows, chunk):
            part = slice(start, start + chunk)
            x_CD, labels_C = x_RD[part], labels_R[part]
            scored_C = labels_C != IGNORED
            target_C1 = labels_C.masked_fill(~scored_C, 0)[:, None]
            logits_CV = (x_CD @ weight.T).to(wide)
            lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
            losses_C = (lse_C1 - logits_CV.gather(1, target_C1))[:, 0]
            loss += losses_C.masked_fill(~scored_C, 0.0).sum()
            if not (wants_x or wants_weight):
                continue
            grad_CV = logits_CV.sub_(lse_C1).exp_()  # softmax, in the memory of the logits
            grad_CV.scatter_add_(1, target_C1, grad_CV.new_full((1, 1), -1.0).expand_as(target_C1))
            grad_CV = grad_CV.mul_(scored_C[:, None]).to(x_RD.dtype)
            if grad_x is not None:
                torch.mm(grad_CV, weight, out=grad_x[part])
            if grad_weight is not None:
                if grad_CV.dtype == grad_weight.dtype:
                    grad_weight.addmm_(grad_CV.T, x_CD)
                else:
                    grad_weight += grad_CV.T @ x_CD
        ctx.gradients = (grad_x, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_x, grad_weight = ctx.gradients
        ctx.gradients = None
        scale = grad_outputs[0]
        if grad_x is not None:
            grad_x = grad_x.mul_(scale)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale)
        return grad_x, grad_weight, None
