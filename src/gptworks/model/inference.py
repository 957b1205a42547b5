"""A model that only predicts, its matrices kept in fewer bits.

Activations, embedding of positions, LayerNorms and biases stay in fp32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks.errors import UsageError
from gptworks.model.gpt import GPT, Linear

_WIDENED = 2**20  # numbers that are widened at a time
WEIGHTS = ("fp32", "bf16", "int8")


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """In here nothing is dropped; after it the model, or part of one, is in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class StoredMatrix(nn.Module):
    """[outputs, inputs] in fp32, bf16, or int8 with one scale for each output."""

    values: Tensor
    scale: Tensor | None

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        scale, values = None, weight.detach()
        if kind == "bf16":
            values = values.bfloat16()
        elif kind == "int8":
            scale = values.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
            values = (values / scale[:, None]).round_().to(torch.int8)
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    def rows(self, at: Tensor | slice) -> Tensor:
        """Some of the rows in fp32."""
        wide = self.values[at].float()
        return wide if self.scale is None else wide * self.scale[at].unsqueeze(-1)


class StoredLinear(nn.Module):
    bias: Tensor | None

    def __init__(self, matrix: StoredMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self.matrix = matrix
        self.out_features = len(matrix.values)
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def weight(self) -> Tensor:
        """The whole matrix in fp32; for many rows at a time, as a loss has them."""
        return self.matrix.rows(slice(None))

    def forward(self, x: Tensor) -> Tensor:
        matrix, bias = self.matrix, None if self.bias is None else self.bias.to(x.dtype)
        # Some outputs at a time: what is widened stays in the processor's cache and uses the same memory again.
        size = max(1, _WIDENED // matrix.values.shape[1])
        y = torch.cat([F.linear(x, values.to(x.dtype)) for values in matrix.values.split(size)], dim=-1)
        if matrix.scale is not None:
            y *= matrix.scale.to(x.dtype)
        return y if bias is None else y.add_(bias)


class StoredEmbedding(nn.Module):
    def __init__(self, matrix: StoredMatrix) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, ids: Tensor) -> Tensor:
        return self.matrix.rows(ids)


def require_kind(kind: str) -> None:
    if kind not in WEIGHTS:
        raise UsageError(f"weights: got {kind!r}; needs one of {', '.join(WEIGHTS)}.")


def store_weights(model: GPT, kind: str) -> None:
    """Keep the matrices in bf16 or int8 from now on. The model can then predict, but not be trained or saved."""
    require_kind(kind)
    if kind == "fp32":
        return
    embedding = StoredMatrix(model.wte.weight, kind)
    head = embedding if model.cfg.tied else StoredMatrix(model.head.weight, kind)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear)]
    for name, linear in linears:
        matrix = head if linear is model.head else StoredMatrix(linear.weight, kind)
        _replace(model, name, StoredLinear(matrix, linear.bias))
    model.wte = StoredEmbedding(embedding)  # type: ignore[assignment]
    model.requires_grad_(False)
    model.eval()


def _replace(model: GPT, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
