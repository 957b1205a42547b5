"""The order of building a model, written once."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gptworks import cpu
from gptworks.compilers import c_compilers, cxx_compilers
from gptworks.config.schema import InitConfig, ModelConfig, ParallelConfig
from gptworks.launch.world import World
from gptworks.model import GPT, tie
from gptworks.model.init import draw
from gptworks.parallel import recompute, shard
from gptworks.parallel.parts import Part, canonical_name, parts_of
from gptworks.parallel.slices import Region, region_of


class WeightSource(Protocol):
    """Gives each parameter by its name and whole shape: what lies in a region of it, or all where None is asked for."""

    def tensor(self, name: str, shape: torch.Size, region: Region | None = None) -> Tensor: ...


class FreshWeights:
    """Drawn whole and then cut: so no layout can change a weight."""

    def __init__(self, cfg: InitConfig, num_layers: int, seed: int) -> None:
        self.cfg, self.num_layers, self.seed = cfg, num_layers, seed

    def tensor(self, name: str, shape: torch.Size, region: Region | None = None) -> Tensor:
        whole = draw(name, shape, self.num_layers, self.cfg, self.seed)
        return whole if region is None else whole[region]


def build(
    cfg: ModelConfig,
    world: World,
    compute_dtype: torch.dtype,
    weights: WeightSource | None,
    *,
    parallel: ParallelConfig | None = None,
    reduce_dtype: torch.dtype = torch.float32,
    recompute_mode: str = "none",
    compile_blocks: bool = False,
    model_type: type[GPT] = GPT,
) -> GPT:
    """This rank's part of the model. `parallel`: what the layout leaves open; None = the usual for it. `weights`: None
    = whatever is in the memory, for a caller who fills every parameter afterwards, or who needs no numbers."""
    if world.computes_on_cpu:
        cpu.require(compute_dtype)
    parallel = parallel or ParallelConfig(**vars(world.layout))
    num_stages = world.layout.pp * parallel.virtual_stages
    stages = [0]
    if num_stages > 1:
        pipeline = _module("pipeline")
        stages = pipeline.stages_of(world.place.pp, world.layout.pp, parallel.virtual_stages, parallel.schedule)
    parts = []
    for stage in stages:
        with torch.device("meta"):
            part = model_type(cfg, compute_dtype)
        if num_stages > 1:
            pipeline.keep_stage(part, stage, num_stages)
        if world.layout.tp > 1:
            _module("tensor").apply(part, world.axis("tp"), sequence=parallel.sequence)
            _tie_what_is_here(part)
        recompute.apply_inside(part, recompute_mode)
        if compile_blocks:
            for block in part.blocks.values():
                # The method, not the module: parameter names never gain a prefix.
                block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        recompute.apply_around(part, recompute_mode)
        shard.apply(part, world, parallel, compute_dtype, reduce_dtype)
        with world.memory:
            # Memory exists only from here on. What is offloaded begins and stays in that of the CPU.
            part.to_empty(device="cpu" if parallel.offload else world.device)
            _tie_what_is_here(part)  # to_empty gives head and embedding a tensor each
            if weights is not None:
                fill(part, weights, tied=cfg.tied)
        parts.append(part)
    if num_stages > 1:
        pipelined: GPT = pipeline.Pipeline(parts, world, schedule=parallel.schedule)
        return pipelined
    return parts[0]


def sum_gradients(part: Part, world: World) -> None:
    """After the backward passes of a step: all that is still missing from the gradients of this rank."""
    if world.mesh is None:
        return
    tp = world.axis("tp")
    for piece in parts_of(part):
        shard.finish_gradients(piece, world)
        if tp is not None:
            _module("tensor").finish_gradients(piece, tp)
    if not isinstance(part, GPT):
        part.sum_tied_gradients()


@torch.no_grad()
def fill(part: nn.Module, weights: WeightSource, *, tied: bool = False) -> None:
    """Each parameter by its name; of one that is cut, no more is asked for than this rank's slice."""
    for name, parameter in part.named_parameters():
        region = region_of(parameter) if hasattr(parameter, "placements") else None
        here = weights.tensor(canonical_name(name, tied=tied), parameter.shape, region)
        shard.local(parameter.detach()).copy_(here)


def _tie_what_is_here(part: GPT) -> None:
    has_both = getattr(part, "wte", None) is not None and getattr(part, "head", None) is not None
    if has_both:
        tie(part)
        assert not part.cfg.tied or part.head.weight is part.wte.weight


def _module(name: str) -> Any:
    """Of this package; imported where a layout needs it, so that one process never pays for it."""
    return import_module(f"gptworks.parallel.{name}")


def can_compile(device: torch.device) -> bool:
    """torch.compile builds C++ for the CPU; for CUDA it uses Triton, which builds its launchers in C."""
    if device.type == "cuda":
        return find_spec("triton") is not None and bool(c_compilers())
    return bool(cxx_compilers())
