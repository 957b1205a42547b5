"""The order of building a model, written once."""

import os
import shutil
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor, nn

from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.model import GPT, tie
from gptworks.model.init import draw
from gptworks.parallel import recompute
from gptworks.parallel.launch import World


class WeightSource(Protocol):
    """Gives each parameter by name, whole."""

    def tensor(self, name: str, shape: torch.Size) -> Tensor: ...


class FreshWeights:
    def __init__(self, cfg: InitConfig, num_layers: int, seed: int) -> None:
        self.cfg, self.num_layers, self.seed = cfg, num_layers, seed

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        return draw(name, shape, self.num_layers, self.cfg, self.seed)


def build(
    cfg: ModelConfig,
    world: World,
    compute_dtype: torch.dtype,
    weights: WeightSource,
    *,
    recompute_mode: str = "none",
    compile_blocks: bool = False,
    model_type: type[GPT] = GPT,
) -> GPT:
    with torch.device("meta"):
        part = model_type(cfg, compute_dtype)
    recompute.apply_inside(part, recompute_mode)
    if compile_blocks:
        for block in part.blocks.values():
            # The method, not the module: parameter names never gain a prefix.
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    recompute.apply_around(part, recompute_mode)
    part.to_empty(device=world.device)  # memory exists only from here on
    tie(part)  # to_empty gives head and embedding a tensor each
    assert not cfg.tied or part.head.weight is part.wte.weight
    fill(part, weights)
    return part


@torch.no_grad()
def fill(part: nn.Module, weights: WeightSource) -> None:
    for name, parameter in part.named_parameters():
        parameter.copy_(weights.tensor(name, parameter.shape))


def can_compile(device: torch.device) -> bool:
    """torch.compile builds C++ for the CPU; for CUDA it uses Triton, which builds its launchers in C."""
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    if device.type == "cuda":
        compilers = [os.environ.get("CC", ""), "gcc", "clang", "cc"]
        if find_spec("triton") is None:
            return False
    return any(shutil.which(name) for name in compilers if name)
