"""One of the live processes of a run, and its neighbours."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gptworks.config.derive import Layout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """This process among all: its device, its place in the layout, and the groups it talks to."""

    device: torch.device
    layout: Layout = field(default_factory=Layout)
    rank: int = 0
    mesh: "DeviceMesh | None" = None  # axes pp, dp, fsdp, tp; None where there is one process
    memory: AbstractContextManager[Any] = field(default_factory=nullcontext)  # in which tensors are made on the device

    @property
    def coords(self) -> Layout:
        """The coordinate in each direction, from 0."""
        rest, coords = self.rank, {}
        for axis, size in reversed(vars(self.layout).items()):
            rest, coords[axis] = divmod(rest, size)
        return Layout(**coords)

    @property
    def data_rank(self) -> int:
        return self.coords.dp * self.layout.fsdp + self.coords.fsdp

    @property
    def data_parallel(self) -> int:
        return self.layout.data_parallel

    @property
    def is_main(self) -> bool:
        """The one process that writes what is written once."""
        return self.rank == 0

    @property
    def computes_on_cpu(self) -> bool:
        """An imagined world computes nothing."""
        return self.device.type == "cpu" and isinstance(self.memory, nullcontext)

    def axis(self, name: str) -> "DeviceMesh | None":
        """The one-dimensional mesh of this process's neighbours in that direction; None where it has none."""
        return self.mesh[name] if self.mesh is not None and getattr(self.layout, name) > 1 else None
