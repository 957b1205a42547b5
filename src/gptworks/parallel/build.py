"""The order of building a model, written once."""

from importlib.util import find_spec
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from gptworks import cpu
from gptworks.architecture import canonical_name
from gptworks.compilers import c_compilers, cxx_compilers
from gptworks.config.schema import InitConfig, ModelConfig, ParallelConfig
from gptworks.launch.world import World
from gptworks.model import GPT, tie
from gptworks.model.init import draw
from gptworks.parallel import kv_copies, recompute, shard
from gptworks.parallel.parts import Part, SingleStage
from gptworks.parallel.shard import ShardPolicy
from gptworks.parallel.slices import Region, region_of

AnyGPT = TypeVar("AnyGPT", bound=GPT)


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
) -> Part:
    """This rank's part of the model. `parallel`: what the layout leaves open; None = the usual for it. `weights`: None
    = whatever is in the memory, for a caller who fills every parameter afterwards, or who needs no numbers."""
    if world.computes_on_cpu:
        cpu.require(compute_dtype)
    parallel = parallel or ParallelConfig(**vars(world.layout))
    sharding = ShardPolicy.of(world, parallel, reduce_dtype)

    def finished(part: GPT) -> GPT:
        if (tp := world.axis("tp")) is not None:
            # Imported where a layout needs it, as pipeline is: one process never pays for it.
            from gptworks.parallel import tensor

            tensor.apply(part, tp, sequence=parallel.sequence)
            _tie_what_is_here(part)
        _wrap_blocks(part, recompute_mode, compile_blocks)
        shard.apply(part, world, sharding, compute_dtype, offload_to_cpu=parallel.offload)
        with world.memory:
            # Memory exists only from here on. What is offloaded begins and stays in that of the CPU.
            _allocate(part, torch.device("cpu") if parallel.offload else world.device, weights)
        return part

    num_stages = world.layout.pp * parallel.virtual_stages
    if num_stages == 1:
        return SingleStage(finished(_on_meta(GPT, cfg, compute_dtype)), world, sharding)
    from gptworks.parallel import pipeline

    parts = []
    for stage in pipeline.stages_of(world.coords.pp, world.layout.pp, parallel.virtual_stages, parallel.schedule):
        part = _on_meta(GPT, cfg, compute_dtype)
        pipeline.keep_stage(part, stage, num_stages)
        parts.append(finished(part))
    return pipeline.Pipeline(parts, world, sharding, schedule=parallel.schedule)


def build_gpt(
    cfg: ModelConfig,
    world: World,
    compute_dtype: torch.dtype,
    weights: WeightSource | None,
    *,
    recompute_mode: str = "none",
    compile_blocks: bool = False,
    model_type: type[AnyGPT] = GPT,  # type: ignore[assignment]
) -> AnyGPT:
    """The whole model in this process, for whoever does not train it with others."""
    if world.computes_on_cpu:
        cpu.require(compute_dtype)
    model = _on_meta(model_type, cfg, compute_dtype)
    _wrap_blocks(model, recompute_mode, compile_blocks)
    _allocate(model, world.device, weights)
    return model


def _on_meta(model_type: type[AnyGPT], cfg: ModelConfig, compute_dtype: torch.dtype) -> AnyGPT:
    with torch.device("meta"):
        return model_type(cfg, compute_dtype)


def _wrap_blocks(part: GPT, recompute_mode: str, compile_blocks: bool) -> None:
    recompute.apply_inside(part, recompute_mode)
    if compile_blocks:
        for block in part.blocks.values():
            # The method, not the module: parameter names never gain a prefix.
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
    recompute.apply_around(part, recompute_mode)


def _allocate(part: GPT, device: torch.device, weights: WeightSource | None) -> None:
    part.to_empty(device=device)
    _tie_what_is_here(part)  # to_empty gives head and embedding a tensor each
    if weights is not None:
        fill(part, weights, tied=part.cfg.tied)


@torch.no_grad()
def fill(part: nn.Module, weights: WeightSource, *, tied: bool = False) -> None:
    """Each parameter by its name; of one that is cut, no more is asked for than this rank's slice."""
    copies = kv_copies.copies_in(part)
    for name, parameter in part.named_parameters():
        if copies is not None and kv_copies.is_copied(name):
            pieces = copies.pieces(parameter.detach())
            for each in pieces.slices:
                each.here.copy_(weights.tensor(name, pieces.shape, each.region))
            continue
        region = region_of(parameter) if hasattr(parameter, "placements") else None
        here = weights.tensor(canonical_name(name, tied=tied), parameter.shape, region)
        shard.local(parameter.detach()).copy_(here)


def _tie_what_is_here(part: GPT) -> None:
    has_both = getattr(part, "wte", None) is not None and getattr(part, "head", None) is not None
    if has_both:
        tie(part)
        assert not part.cfg.tied or part.head.weight is part.wte.weight


def can_compile(device: torch.device) -> bool:
    """torch.compile builds C++ for the CPU; for CUDA it uses Triton, which builds its launchers in C."""
    if device.type == "cuda":
        return find_spec("triton") is not None and bool(c_compilers())
    return bool(cxx_compilers())
