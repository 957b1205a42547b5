"""One optimizer step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptworks.data.loader import Batch
from gptworks.errors import DataError
from gptworks.launch.world import World
from gptworks.model.init import seed_of
from gptworks.parallel.parts import Part, device_number, sum_over
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.run_folder import Interrupts
from gptworks.train.variety import varieties

# Where ranks received different ones, the first of these is what all of them go by.
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


@dataclass(frozen=True)
class Gradients:
    """What the backward passes of a step have told, before the update; the gradients lie in the parameters. Numbers of
    the global batch, the same on every rank but for the micro-batches."""

    loss: float  # mean over the scored tokens
    grad_norm: float  # before clipping
    loss_scale: float
    parameters: list[nn.Parameter]
    micro_batches: list[Batch]
    signal: str | None = None  # that a rank had received before it was done: all of them are to stop
    # Of all samples, as the order has them, where the part was asked for their losses.
    sample_losses: tuple[float, ...] = ()
    sample_varieties: tuple[float, ...] = ()

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def sample_ids(self) -> list[int]:
        """The samples of this rank."""
        return [number for batch in self.micro_batches for number in batch.sample_ids.tolist()]


@dataclass(frozen=True)
class StepReport:
    """Numbers of the global batch, the same on every rank but for the samples."""

    loss: float  # mean over the scored tokens
    grad_norm: float  # before clipping
    updated: bool  # False: the weights are as before
    loss_scale: float
    sample_ids: list[int]  # those of this rank
    signal: str | None = None  # that a rank had received before it was done: all of them are to stop


def train_step(
    part: Part,
    optimizer: optim.AdamW,
    micro_batches: list[Batch],
    world: World,
    scaler: LossScaler,
    *,
    clip: float,
    seed: int,
    step: int,
) -> StepReport:
    """The two halves of a step, with nobody in between who asks whether the update should be made."""
    return update(optimizer, backward(part, micro_batches, world, scaler, seed=seed, step=step), scaler, clip=clip)


def backward(
    part: Part,
    micro_batches: list[Batch],
    world: World,
    scaler: LossScaler,
    *,
    seed: int,
    step: int,
    interrupts: Interrupts | None = None,
) -> Gradients:
    """The gradient of (sum of token losses / number of scored tokens) over all micro-batches.

    A GPU works behind this process, which waits for it once a step: at the end of this, in `_read`.
    """
    num_scored = sum_over(world, device_number(world, sum(batch.num_scored for batch in micro_batches)), "dp", "fsdp")

    # torch.manual_seed also tells all GPUs and notes where it was called from, which takes as long as the norm of all
    # gradients of a small model.
    set_seed = torch.default_generator.manual_seed if world.device.type == "cpu" else torch.manual_seed

    def seed_dropout(number: int, *stage: int) -> None:
        # Dropout depends on what it is for, not on what was drawn before: resuming needs no generator state.
        set_seed(seed_of(seed, "dropout", step, number, world.data_rank, *stage))

    scale = device_number(world, scaler.scale) / num_scored
    loss_sums = part.step(micro_batches, scale, seed_dropout=seed_dropout)
    part.sum_gradients()

    parameters = [parameter for _, parameter in part.named_parameters() if parameter.grad is not None]
    of_samples = _of_own_samples(part, micro_batches, world)
    received = interrupts.received if interrupts else None
    read = _read(part, loss_sums, of_samples, parameters, num_scored, received, world)
    if read.num_scored == 0:
        forget(parameters)
        raise _nothing_scored(step, torch.cat([batch.sample_ids for batch in micro_batches]).tolist())
    loss, grad_norm = read.loss_sum / read.num_scored, read.grad_norm / scaler.scale
    return Gradients(loss, grad_norm, scaler.scale, parameters, micro_batches, read.signal, *_halves(read.of_samples))


def update(
    optimizer: optim.AdamW, gradients: Gradients, scaler: LossScaler, *, clip: float, wanted: bool = True
) -> StepReport:
    """One update, unless it is not wanted or a number is not finite; the gradients are gone then, too."""
    made = wanted and gradients.finite
    if made:
        clip_factor = clip / gradients.grad_norm if clip and gradients.grad_norm > clip else 1.0
        optimizer.update(gradients.parameters, clip_factor / gradients.loss_scale)
    forget(gradients.parameters)
    scaler.update(gradients.finite)
    return StepReport(
        gradients.loss, gradients.grad_norm, made, gradients.loss_scale, gradients.sample_ids, gradients.signal
    )


def forget(parameters: list[nn.Parameter]) -> None:
    """Their gradients, which the next step begins anew."""
    for parameter in parameters:
        parameter.grad = None


def _nothing_scored(step: int, sample_ids: list[int]) -> DataError:
    return DataError(
        f"step {step}: no token of samples {sample_ids[:8]} is scored, so there is nothing to learn from. Prompts "
        "that fill data.seq_len leave no room for their completions: enlarge it, or set data.too_long: skip."
    )


@dataclass(frozen=True)
class _Read:
    """What a device tells of a step, before the update."""

    loss_sum: float
    grad_norm: float
    num_scored: float
    signal: str | None
    of_samples: tuple[float, ...]


def _read(
    part: Part,
    loss_sums: list[Tensor],
    of_samples: Tensor,
    parameters: list[nn.Parameter],
    num_scored: Tensor,
    signal: str | None,
    world: World,
) -> _Read:
    """The sum of the losses, the norm of all gradients as if they lay in one place, the signal that any rank received,
    and the numbers of samples. Equal on every rank, so that all of them update or none does, and all of them stop or
    none."""
    if world.mesh is None:
        of_step = torch.stack([*loss_sums, optim.global_norm(parameters), num_scored])
        (*losses, norm, scored), numbers = _apart(torch.cat([of_step, of_samples]), len(of_step))
        return _Read(sum(losses), norm, scored, signal, numbers)
    # What several ranks hold is counted by each of them as a part of one: a single sum over all ranks is the total.
    loss_share = torch.stack(loss_sums).double().sum() / world.layout.tp if loss_sums else device_number(world, 0.0)
    squares = optim.share_of_squares(part).to(world.device)  # elsewhere if offloaded
    received = [device_number(world, signal == name) for name in SIGNALS]
    shares = torch.cat([torch.stack([loss_share, squares, *received]), of_samples])
    totals = sum_over(world, shares, "pp", "dp", "fsdp", "tp")
    read, numbers = _apart(torch.cat([num_scored.view(1), totals]), 3 + len(SIGNALS))
    scored, loss_sum, norm_squared, *counts = read
    heard = [name for name, count in zip(SIGNALS, counts, strict=True) if count]
    return _Read(loss_sum, math.sqrt(norm_squared), scored, heard[0] if heard else None, numbers)


def _apart(read: Tensor, count: int) -> tuple[list[float], tuple[float, ...]]:
    """The first numbers and those after them, by the one wait of a step."""
    numbers = read.tolist()
    return numbers[:count], tuple(numbers[count:])


def _of_own_samples(part: Part, micro_batches: list[Batch], world: World) -> Tensor:
    """The losses of the samples of the global batch that this rank tells, in the order of samples, and 0 for those that
    others tell; then how varied their tokens are. Empty where the part does not keep the losses."""
    count = len(micro_batches) if part.keeps_sample_losses else 0
    numbers = device_number(world, 0.0).new_zeros(2, count, world.data_parallel, len(micro_batches[0].tokens))
    if world.coords.tp == 0:  # all tensor-parallel ranks have the same
        for number, losses_B in enumerate(part.sample_losses):
            numbers[0, number, world.data_rank] = losses_B
            numbers[1, number, world.data_rank] = varieties(micro_batches[number].labels)
    return numbers.view(-1)


def _halves(numbers: tuple[float, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    middle = len(numbers) // 2
    return numbers[:middle], numbers[middle:]
