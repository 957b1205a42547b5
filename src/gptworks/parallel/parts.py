"""What a rank holds of a model, whether it is one GPT or the stages of a pipeline, by the names of the whole model."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gptworks.config.schema import ModelConfig
from gptworks.launch.world import World
from gptworks.model import GPT


class Pipelined(Protocol):
    """The stages of this rank; micro-batches run through those of all ranks."""

    cfg: ModelConfig
    parts: list[GPT]

    @property
    def training(self) -> bool: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def __call__(self, tokens: Tensor, **keywords: Any) -> Tensor: ...

    def step(
        self,
        micro_batches: Sequence[Any],
        scale: float | Tensor,
        *,
        seed_dropout: Callable[[int, int], None] | None = None,
    ) -> list[Tensor]: ...

    def sum_tied_gradients(self) -> None: ...


Part = GPT | Pipelined


def parts_of(part: Part | nn.Module) -> list[Any]:
    return [part] if isinstance(part, nn.Module) else part.parts


def canonical_name(name: str, *, tied: bool) -> str:
    """What a tensor is called in the whole model: on the last stage of a pipeline the head is a copy of the embedding
    that it is tied to. `name` may have a beginning of its own, as moments have."""
    is_copy = tied and (name == "head.weight" or name.endswith(".head.weight"))
    return f"{name.removesuffix('head.weight')}wte.weight" if is_copy else name


def named_parameters(part: Part | nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """All that is updated here; the copy of a tied embedding is head.weight."""
    for piece in parts_of(part):
        yield from piece.named_parameters()


def counted_parameters(part: Part | nn.Module) -> list[nn.Parameter]:
    """Each parameter of the model on one pipeline stage only: without the copy of a tied embedding."""
    return [
        parameter
        for piece in parts_of(part)
        for name, parameter in piece.named_parameters()
        if canonical_name(name, tied=piece.cfg.tied) == name
    ]


def device_number(world: World, value: float) -> Tensor:
    """A number where the device has it at hand. Filled in there: a copy would wait for all that the device has to do.
    Integers stay exact up to 2^53 (2^24 on mps, which has no float64 and one process only)."""
    dtype = torch.float32 if world.device.type == "mps" else torch.float64
    return torch.full((), value, dtype=dtype, device=world.device)


def sum_over(world: World, numbers: Tensor, *axes: str) -> Tensor:
    """Their sums over the ranks in those directions, in place. They stay on the device: nothing waits for them here."""
    from torch import distributed

    for name in axes:
        axis = world.axis(name)
        if axis is not None:
            distributed.all_reduce(numbers, group=axis.get_group())
    return numbers
