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

# Where ranks received different ones, the first of these is what all of them go by.
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")


@dataclass(frozen=True)
class StepReport:
    """Numbers of the global batch, the same on every rank but for the samples."""

    loss: float  # mean over the scored tokens
    grad_norm: float  # before clipping
    updated: bool  # False: not finite, the weights are as before
    loss_scale: float
    sample_ids: list[int]  # those of this rank
    signal: str | None = None  # that a rank had received before it was done: all of them are to stop


def train_step(
    part: Part,
    optimizer: torch.optim.AdamW,
    micro_batches: list[Batch],
    world: World,
    scaler: LossScaler,
    *,
    clip: float,
    seed: int,
    step: int,
    interrupts: Interrupts | None = None,
) -> StepReport:
    """The gradient of (sum of token losses / number of scored tokens) over all micro-batches, then one update.

    A GPU works behind this process, which waits for it once: in `_read`, between the backward passes and the update.
    """
    num_scored = sum_over(world, device_number(world, sum(batch.num_scored for batch in micro_batches)), "dp", "fsdp")

    def seed_dropout(number: int, *stage: int) -> None:
        # Dropout depends on what it is for, not on what was drawn before: resuming needs no generator state.
        torch.manual_seed(seed_of(seed, "dropout", step, number, world.data_rank, *stage))

    scale = device_number(world, scaler.scale) / num_scored
    loss_sums = part.step(micro_batches, scale, seed_dropout=seed_dropout)
    part.sum_gradients()

    parameters = [parameter for _, parameter in part.named_parameters() if parameter.grad is not None]
    read = _read(part, loss_sums, parameters, num_scored, interrupts.received if interrupts else None, world)
    sample_ids = torch.cat([batch.sample_ids for batch in micro_batches]).tolist()
    if read.num_scored == 0:
        optimizer.zero_grad(set_to_none=True)
        raise _nothing_scored(step, sample_ids)
    loss, grad_norm = read.loss_sum / read.num_scored, read.grad_norm / scaler.scale
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        clipped = clip / grad_norm if clip and grad_norm > clip else 1.0
        optim.scale_gradients(parameters, clipped / scaler.scale)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report = StepReport(loss, grad_norm, finite, scaler.scale, sample_ids, read.signal)
    scaler.update(finite)
    return report


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


def _read(
    part: Part,
    loss_sums: list[Tensor],
    parameters: list[nn.Parameter],
    num_scored: Tensor,
    signal: str | None,
    world: World,
) -> _Read:
    """The sum of the losses, the norm of all gradients as if they lay in one place, and the signal that any rank
    received. Equal on every rank, so that all of them update or none does, and all of them stop or none."""
    if world.mesh is None:
        *losses, norm, scored = torch.stack([*loss_sums, optim.global_norm(parameters), num_scored]).tolist()
        return _Read(sum(losses), norm, scored, signal)
    # What several ranks hold is counted by each of them as a part of one: a single sum over all ranks is the total.
    loss_share = torch.stack(loss_sums).double().sum() / world.layout.tp if loss_sums else device_number(world, 0.0)
    squares = optim.share_of_squares(part.counted_parameters(), world).to(world.device)  # elsewhere if offloaded
    received = [device_number(world, signal == name) for name in SIGNALS]
    totals = sum_over(world, torch.stack([loss_share, squares, *received]), "pp", "dp", "fsdp", "tp")
    loss_sum, norm_squared, scored, *counts = torch.cat([totals[:2], num_scored.view(1), totals[2:]]).tolist()
    heard = [name for name, count in zip(SIGNALS, counts, strict=True) if count]
    return _Read(loss_sum, math.sqrt(norm_squared), scored, heard[0] if heard else None)
