"""Counts what this process hands to other processes: the other side of plan/communication.py, whose terms it uses."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks.launch.world import World

# c10d's operators, whoever calls them: kind, and which argument is the whole tensor.
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
}
_RECEIVING = {"recv_", "recv_any_source_", "barrier", "monitored_barrier_"}  # the sender counts it, or nothing is sent


class CommCounter(TorchDispatchMode):
    """`with CommCounter(world) as traffic: ...`, then `traffic.bytes[axis, kind]` and `traffic.calls[axis, kind]`.

    It sees the operators beneath torch.distributed, so FSDP's and the pipeline's messages too. Costs a Python call for
    each operator of the model: for looking, not for training.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self._axis_of = {
            axis.get_group().group_name: name for name in vars(world.layout) if (axis := world.axis(name)) is not None
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # first let it become messages between local tensors
        if getattr(func, "namespace", "") == "c10d":
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        if operator in _RECEIVING:
            return
        kind, whole = _OPERATORS[operator]
        boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject) and _is_group(argument))
        name = ProcessGroup.unbox(boxed).group_name
        key = self._axis_of.get(name, name), kind
        self.bytes[key] += _num_bytes(args[whole])
        self.calls[key] += 1


@contextmanager
def around_shape_finding(context: AbstractContextManager[Any]) -> Iterator[None]:
    """When DTensor meets an operator for the first time, it tries it on fake tensors of whole shapes. They exist on no
    rank: whoever counts tensors enters `context` around that."""
    before = ShardingPropagator._fake_mode_lock
    ShardingPropagator._fake_mode_lock = context  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = before


def _is_group(argument: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(argument._type())


def _num_bytes(argument: Any) -> int:
    if isinstance(argument, Tensor):
        return argument.numel() * argument.element_size()
    return sum(_num_bytes(one) for one in argument)
