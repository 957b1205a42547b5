"""Each rank finds its slice of a whole tensor by itself, however the tensor is cut."""

from typing import Any

import pytest
import torch
from torch import nn

from gptworks.config.derive import Layout
from gptworks.launch.world import World
from gptworks.parallel import build, shard, slices

# Rows and columns that the ranks do and do not divide, and fewer rows than ranks.
SHAPES = {"even": (8, 8), "odd": (9, 6), "uneven": (13, 7), "thin": (1, 4), "line": (5,)}


class Numbers:
    """Every element of a tensor is another number."""

    def tensor(self, name: str, shape: torch.Size, region: slices.Region | None = None) -> torch.Tensor:
        whole = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
        return whole if region is None else whole[region]


def cut_like(whole: torch.Tensor, parameter: Any) -> torch.Tensor:
    """This rank's numbers, by torch's own way to cut: chunk after chunk, the last axis of the mesh first."""
    place = parameter.device_mesh.get_coordinate()
    for axis, size in slices.splits(parameter):
        dim = parameter.placements[axis].dim
        chunks = whole.chunk(size, dim)
        whole = chunks[place[axis]] if place[axis] < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


def cut_for_tensor_parallel(module: nn.Module, tp: Any) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    for name, parameter in list(module.named_parameters()):
        kind = name.rpartition("_")[2]
        placement = {"rows": Shard(0), "columns": Shard(1), "whole": Replicate()}[kind]
        cut = distribute_tensor(parameter.detach(), tp, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(cut))


# fsdp3.tp2: torch 2.13 itself is wrong about where 13 rows cut twice lie.
@pytest.mark.parametrize(
    "layout", [Layout(fsdp=2, tp=2), Layout(fsdp=3, tp=2), Layout(dp=2, fsdp=2), Layout(tp=4), Layout(fsdp=4)], ids=str
)
def test_slices_of_every_cut_put_together_are_the_whole(run_layout, layout: Layout) -> None:
    def found(world: World) -> Any:
        from torch.distributed.fsdp import fully_shard

        with torch.device("meta"):
            module = nn.Module()
            for name, size in SHAPES.items():
                for kind in ("rows", "columns", "whole") if len(size) == 2 else ("rows", "whole"):
                    module.register_parameter(f"{name}_{kind}", nn.Parameter(torch.empty(size)))
        if world.layout.tp > 1:
            cut_for_tensor_parallel(module, world.axis("tp"))
        if world.layout.fsdp > 1:
            assert world.mesh is not None
            fully_shard(module, mesh=world.mesh["dp", "fsdp"] if world.layout.dp > 1 else world.mesh["fsdp"])
        module.to_empty(device=world.device)
        build.fill(module, Numbers())
        held = {}
        for name, parameter in module.named_parameters():
            whole = parameter.detach().full_tensor()
            assert torch.equal(whole, Numbers().tensor(name, whole.shape)), name
            mine = shard.local(parameter.detach())
            assert torch.equal(mine, cut_like(whole, parameter)), name
            part = slices.slice_of(parameter)
            place = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.here.shape, strict=True))
            assert torch.equal(whole[place], mine), name
            held[name] = (sorted(mine.flatten().tolist()), shard.num_copies(parameter, world))
        return held

    ranks = run_layout(layout, found)
    for name, size in ((name, SHAPES[name.rpartition("_")[0]]) for name in ranks[0]):
        everything = sorted(number for held in ranks for number in held[name][0])
        copies = {held[name][1] for held in ranks}
        assert len(copies) == 1
        assert everything == sorted([float(i) for i in range(torch.Size(size).numel())] * copies.pop()), name
