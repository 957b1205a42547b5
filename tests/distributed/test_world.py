"""Who sits where, and who talks to whom."""

import torch
from torch import distributed

from gptworks.config.derive import Layout


def test_every_rank_knows_its_place(run_layout) -> None:
    places = run_layout(Layout(pp=2, fsdp=2), lambda world: (world.rank, str(world.coords.pp), world.data_rank))
    assert places == [(0, "0", 0), (1, "0", 1), (2, "1", 0), (3, "1", 1)]


def test_neighbours_of_an_axis_sum_among_themselves(run_layout) -> None:
    def sums(world):
        found = {}
        for axis in ("pp", "tp"):
            mesh = world.axis(axis)
            number = torch.tensor([float(world.rank)])
            distributed.all_reduce(number, group=mesh.get_group())
            found[axis] = number.item()
        assert world.axis("dp") is None
        return found

    assert run_layout(Layout(pp=2, tp=2), sums) == [
        {"pp": 2.0, "tp": 1.0},
        {"pp": 4.0, "tp": 1.0},
        {"pp": 2.0, "tp": 5.0},
        {"pp": 4.0, "tp": 5.0},
    ]
