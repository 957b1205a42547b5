"""A model that only predicts, its matrices kept in fewer bits.

Activations, embedding of positions, LayerNorms and biases stay in fp32. The C++ function (`generate/kernels`) rounds
what it multiplies by a matrix of int8 or int4 to 16 bits, two hundred times finer than the matrix.
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
WEIGHTS = ("fp32", "bf16", "int8", "int4")
GROUP = 32  # numbers of an int4 row that share a scale


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
    """[outputs, inputs] in fp32, bf16, int8 with a scale for each output, or int4 with a scale for each group of 32.

    int4: values are [outputs, groups x 16] bytes, the first sixteen numbers of a group in their lower bits; a number is
    (bits - 8) times the scale, which is bf16. The last group of a row may be padded.
    """

    values: Tensor
    scale: Tensor | None

    def __init__(self, weight: Tensor, kind: str) -> None:
        super().__init__()
        scale, values = None, weight.detach()
        self.depth = values.shape[1]
        if kind == "bf16":
            values = values.bfloat16()
        elif kind == "int8":
            scale = values.abs().amax(1).clamp_min(torch.finfo(torch.float32).tiny) / 127
            values = (values / scale[:, None]).round_().to(torch.int8)
        elif kind == "int4":
            # Some rows at a time, for the memory in between.
            size = max(1, _WIDENED * 4 // self.depth)
            values, scale = (torch.cat(parts) for parts in zip(*map(_in_groups, values.split(size)), strict=True))
        self.register_buffer("values", values)
        self.register_buffer("scale", scale)

    def rows(self, at: Tensor | slice) -> Tensor:
        """Some of the rows in fp32."""
        if self.scale is not None and self.values.dtype == torch.uint8:
            return _widen_groups(self.values[at], self.scale[at])[..., : self.depth]
        wide = self.values[at].float()
        return wide if self.scale is None else wide * self.scale[at].unsqueeze(-1)


def _in_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int4 values and scales: from the scale that makes the number furthest from zero -8, to the one that fits best."""
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scale = furthest / -8
    numbers = _nearest(groups, scale)
    squares = numbers.square().sum(-1, keepdim=True)
    scale = ((groups * numbers).sum(-1, keepdim=True) / squares.clamp_min(1)).bfloat16()  # least squares
    low, high = (_nearest(groups, scale.float()) + 8).to(torch.uint8).chunk(2, dim=-1)
    return (low | (high << 4)).flatten(1), scale.squeeze(-1)


def _nearest(groups: Tensor, scale: Tensor) -> Tensor:
    return (groups / scale).nan_to_num_(0, 0, 0).round_().clamp_(-8, 7)


def _widen_groups(values: Tensor, scale: Tensor) -> Tensor:
    groups = values.unflatten(-1, (-1, GROUP // 2))
    numbers = torch.cat((groups & 15, groups >> 4), dim=-1).float() - 8
    return (numbers * scale.float().unsqueeze(-1)).flatten(-2)


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
        size, count = max(1, _WIDENED // matrix.depth), len(matrix.values)
        parts = (matrix.rows(slice(first, first + size)) for first in range(0, count, size))
        y = torch.cat([F.linear(x, part.to(x.dtype)) for part in parts], dim=-1)
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
    """Keep the matrices in bf16, int8 or int4 from now on. The model can then predict, but not be trained or saved.

    Beside int4, words and the head are int8, as in GGUF files of q4_0: 4 bits cost more there than elsewhere.
    """
    require_kind(kind)
    if kind == "fp32":
        return
    kind_of_words = "int8" if kind == "int4" else kind
    embedding = StoredMatrix(model.wte.weight, kind_of_words)
    head = embedding if model.cfg.tied else StoredMatrix(model.head.weight, kind_of_words)
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
