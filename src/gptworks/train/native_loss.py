"""Head and cross-entropy by a C++ function, for training in one process on a CPU: a second implementation of
`model/loss.py`, whose numbers it gives within rounding."""

import ctypes
import math
from typing import Any

import torch
from torch import Tensor

from gptworks.model.loss import CHUNK_ELEMENTS, IGNORED, LinearCrossEntropy, scaled_gradients
from gptworks.train.block_library import Functions

_SIZES = ("tokens", "hidden", "words", "chunk", "unscored", "is_narrow")
_TENSORS = ("sgemm", "x", "weight", "labels", "losses", "grad_x", "grad_weight", "logits", "scaled", "inverses")


class _HeadLoss(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int64) for name in _SIZES), *((name, ctypes.c_void_p) for name in _TENSORS))


class NativeLoss:
    """In place of the forward of a LinearCrossEntropy. Another type goes to the module itself."""

    def __init__(self, module: LinearCrossEntropy, functions: Functions, *, is_narrow: bool) -> None:
        self.original, self.of_samples = module.forward, module.of_samples
        self.functions, self.is_narrow = functions, is_narrow

    def __call__(self, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        is_known = is_plain(x) and is_plain(weight) and labels.shape == x.shape[:-1] and labels.device.type == "cpu"
        if not is_known or not labels.numel():
            return self.original(x, weight, labels)
        if not torch.is_grad_enabled():  # a Function is not told
            x, weight = x.detach(), weight.detach()
        loss: Tensor = _LossFunction.apply(self, x, weight, labels)
        return loss

    def compute(
        self, x_RD: Tensor, weight_WD: Tensor, labels_R: Tensor, grad_RD: Tensor | None, grad_WD: Tensor | None
    ) -> Tensor:
        """The losses of all tokens. Gradients are written where memory for them is given."""
        (tokens, hidden), words = x_RD.shape, weight_WD.shape[0]
        _require_words(labels_R, words)
        chunk = math.ceil(tokens / max(1, math.ceil(tokens * words / CHUNK_ELEMENTS)))
        losses = x_RD.new_empty(tokens)
        logits, scaled, inverses = (x_RD.new_empty(chunk, size) for size in (words, hidden, 1))
        tensors = {"x": x_RD, "weight": weight_WD, "labels": labels_R, "losses": losses, "logits": logits}
        tensors |= {"scaled": scaled, "inverses": inverses}
        tensors |= {name: each for name, each in (("grad_x", grad_RD), ("grad_weight", grad_WD)) if each is not None}
        head = _HeadLoss(tokens=tokens, hidden=hidden, words=words, chunk=chunk, unscored=IGNORED)
        head.is_narrow, head.sgemm = self.is_narrow, self.functions.sgemm
        for name, tensor in tensors.items():
            assert tensor.is_contiguous()
            setattr(head, name, tensor.data_ptr())
        self.functions.head_loss(ctypes.byref(head))
        return losses


class _LossFunction(torch.autograd.Function):
    """Gradients are computed with the loss, while the logits are there, and wait for what they are multiplied with."""

    @staticmethod
    def forward(ctx: Any, native: NativeLoss, x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        x_RD, weight_WD = x.reshape(-1, x.shape[-1]).contiguous(), weight.contiguous()
        _, wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_RD = torch.empty_like(x_RD) if wants_x else None
        grad_WD = torch.empty_like(weight_WD) if wants_weight else None
        losses = native.compute(x_RD, weight_WD, labels.reshape(-1).long().contiguous(), grad_RD, grad_WD)
        if native.of_samples.wanted:
            native.of_samples.keep(losses, labels)
        ctx.gradients = None if grad_RD is None else grad_RD.view(x.shape), grad_WD
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        gradients = scaled_gradients(ctx, grad_outputs[0])
        return None, *gradients, None


def is_plain(tensor: Tensor) -> bool:
    """What the functions may be given the address of, if need be of a copy whose rows lie one after the other."""
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _require_words(labels: Tensor, words: int) -> None:
    """The function trusts what it is given; torch's operators look."""
    if labels.numel():
        low, high = labels.masked_fill(labels == IGNORED, 0).aminmax()
        if low < 0 or high >= words:
            raise IndexError(f"a label is {low if low < 0 else high}; needed: 0 to {words - 1}, or {IGNORED}")
