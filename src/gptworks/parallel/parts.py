"""What a rank holds of a model, by the names of the whole model: one GPT, or the stages of a pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn

from gptworks.architecture import canonical_name
from gptworks.launch.world import World
from gptworks.model import GPT, KVCache
from gptworks.parallel import kv_copies
from gptworks.parallel.shard import NOT_SHARDED, ShardPolicy, finish_gradients, local, num_copies, reshard_all
from gptworks.parallel.slices import Pieces

SeedDropout = Callable[..., None]  # of the number of a micro-batch, and of the stage that reads it where there are some


class MicroBatch(Protocol):
    @property
    def tokens(self) -> Tensor: ...

    def keywords(self) -> dict[str, Tensor | None]:
        """What GPT.forward takes besides the tokens."""

    def to(self, device: torch.device) -> "MicroBatch": ...


class Part(ABC):
    """A rank's part of a model. Every rank makes the same calls, with its own data."""

    def __init__(self, parts: Sequence[GPT], world: World, sharding: ShardPolicy) -> None:
        self.parts, self.world, self.sharding = list(parts), world, sharding
        self.cfg, self.device = self.parts[0].cfg, world.device
        self.sample_losses: list[Tensor] = []  # of the last step, where `keep_sample_losses` has asked for them

    @abstractmethod
    def step(
        self, micro_batches: Sequence[MicroBatch], scale: float | Tensor, *, seed_dropout: SeedDropout | None = None
    ) -> list[Tensor]:
        """Forward and backward of all micro-batches: adds the gradient of scale x (sum of the token losses).

        Returns the sum of the token losses of each micro-batch where the head is, nothing elsewhere. What is missing
        from the gradients comes with `sum_gradients`.
        """

    @abstractmethod
    def __call__(self, tokens: Tensor, *args: Any, **keywords: Any) -> Tensor:
        """As GPT.forward, on every rank."""

    @abstractmethod
    def new_cache(self, rows: int, length: int, dtype: torch.dtype | None = None) -> Any:
        """An empty cache for the layers and heads that are here."""

    def keep_sample_losses(self) -> None:
        """From now on a step leaves the mean loss of each sample of each micro-batch in `sample_losses`, on the ranks
        that have the head."""
        for part in self.parts:
            part.loss_sum.of_samples.wanted = True

    @property
    def keeps_sample_losses(self) -> bool:
        return self.parts[0].loss_sum.of_samples.wanted

    def sum_gradients(self) -> None:
        """After the backward passes of a step: all that is still missing from the gradients of this rank."""
        if self.world.mesh is None:
            return
        tp = self.world.axis("tp")
        for part in self.parts:
            finish_gradients(part, self.world, self.sharding)
            if tp is not None:
                # Imported where a layout needs it: one process never pays for it.
                from gptworks.parallel import tensor

                tensor.finish_gradients(part, tp)

    def reshard_all(self) -> None:
        """Give back what a forward pass without a backward pass left gathered: parameters are shards again."""
        for part in self.parts:
            reshard_all(part, self.sharding)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All that is updated here; the copy of a tied embedding is head.weight."""
        for part in self.parts:
            yield from part.named_parameters()

    def as_stored(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor | Pieces]]:
        """Tensors of this rank, of its parameters or of what belongs to them, as checkpoints and comparisons know
        them."""
        return kv_copies.as_stored(named, kv_copies.copies_in(self.parts[0]))

    def gradient_shares(self) -> list[tuple[Tensor, int]]:
        """Gradients on this rank, and how many ranks of its stage have the same; each of one pipeline stage only."""
        shares, copies = [], kv_copies.copies_in(self.parts[0])
        for name, parameter in self.named_parameters():
            if parameter.grad is None or canonical_name(name, tied=self.cfg.tied) != name:
                continue
            ranks, gradient = num_copies(parameter, self.world), local(parameter.grad)
            if copies is None or not kv_copies.is_copied(name):
                shares.append((gradient, ranks))
                continue
            shared = copies.shared_rows(parameter.grad)[0]
            shares += [(gradient[: len(gradient) - len(shared)], ranks), (shared, ranks * copies.copies)]
        return shares

    def counted_parameters(self) -> list[nn.Parameter]:
        """Each parameter of the model on one pipeline stage only: without the copy of a tied embedding."""
        named = self.named_parameters()
        return [parameter for name, parameter in named if canonical_name(name, tied=self.cfg.tied) == name]

    @property
    def training(self) -> bool:
        return self.parts[0].training

    def train(self, mode: bool = True) -> Self:
        for part in self.parts:
            part.train(mode)
        return self

    def eval(self) -> Self:
        return self.train(False)


class SingleStage(Part):
    """All layers are on this rank, whole or cut."""

    def __init__(self, gpt: GPT, world: World | None = None, sharding: ShardPolicy = NOT_SHARDED) -> None:
        super().__init__([gpt], world or World(gpt.device), sharding)
        self.gpt = gpt

    def step(
        self, micro_batches: Sequence[MicroBatch], scale: float | Tensor, *, seed_dropout: SeedDropout | None = None
    ) -> list[Tensor]:
        loss_sums, self.sample_losses = [], []
        for number, batch in enumerate(micro_batches):
            if seed_dropout is not None:
                seed_dropout(number)
            self.sharding.before_micro_batch(self.gpt, is_last=number + 1 == len(micro_batches))
            on_device = batch.to(self.world.device)
            loss_sum = self.gpt(on_device.tokens, **on_device.keywords())
            (loss_sum * scale).backward()
            loss_sums.append(loss_sum.detach())
            if (of_samples := self.gpt.loss_sum.of_samples).means_B is not None:
                self.sample_losses.append(of_samples.means_B)
        return loss_sums

    def __call__(self, tokens: Tensor, *args: Any, **keywords: Any) -> Tensor:
        output: Tensor = self.gpt(tokens, *args, **keywords)
        return output

    def new_cache(self, rows: int, length: int, dtype: torch.dtype | None = None) -> KVCache:
        return self.gpt.new_cache(rows, length, dtype)


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
