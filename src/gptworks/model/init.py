"""Fresh weights, drawn from (seed, parameter name): no layout, order or restart can change them."""

import hashlib
import math

import torch
from torch import Tensor

from gptworks.architecture import role_of
from gptworks.config.schema import InitConfig


def draw(name: str, shape: torch.Size, num_layers: int, cfg: InitConfig, seed: int) -> Tensor:
    """The whole fp32 tensor of a parameter, on the CPU whatever the device of the model."""
    kind = role_of(name).init
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "ones":
        return torch.ones(shape)
    std = cfg.std
    if kind == "residual" and cfg.residual_scale == "gpt2":
        std /= math.sqrt(2 * num_layers)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    return torch.empty(shape).normal_(0.0, std, generator=generator)


def seed_of(seed: int, *names: object) -> int:
    """A seed that depends on nothing but its arguments, the same in every process and Python version."""
    text = "|".join(str(part) for part in (seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
