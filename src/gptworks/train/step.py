"""One optimizer step."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gptworks.data.loader import Batch
from gptworks.errors import DataError
from gptworks.model import GPT
from gptworks.model.init import seed_of
from gptworks.parallel import apply, shard
from gptworks.parallel.launch import World
from gptworks.parallel.parts import Part, counted_parameters, named_parameters, sum_over
from gptworks.train import optim
from gptworks.train.precision import LossScaler


@dataclass(frozen=True)
class StepReport:
    """Numbers of the global batch, the same on every rank but for the samples."""

    loss: float  # mean over the scored tokens
    grad_norm: float  # before clipping
    updated: bool  # False: not finite, the weights are as before
    loss_scale: float
    sample_ids: list[int]  # those of this rank


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
) -> StepReport:
    """The gradient of (sum of token losses / number of scored tokens) over all micro-batches, then one update."""
    num_scored = sum(batch.num_scored for batch in micro_batches)
    if world.data_parallel > 1:
        num_scored = int(sum_over(world, [num_scored], "dp", "fsdp")[0])
    sample_ids = torch.cat([batch.sample_ids for batch in micro_batches]).tolist()
    if num_scored == 0:
        raise DataError(
            f"step {step}: no token of samples {sample_ids[:8]} is scored, so there is nothing to learn from. Prompts "
            "that fill data.seq_len leave no room for their completions: enlarge it, or set data.too_long: skip."
        )

    def seed_dropout(number: int, *stage: int) -> None:
        # Dropout depends on what it is for, not on what was drawn before: resuming needs no generator state.
        torch.manual_seed(seed_of(seed, "dropout", step, number, world.data_rank, *stage))

    scale = scaler.scale / num_scored
    if isinstance(part, GPT):
        loss_sums = []
        for number, batch in enumerate(micro_batches):
            seed_dropout(number)
            shard.before_micro_batch(part, is_last=number + 1 == len(micro_batches))
            on_device = batch.to(world.device)
            loss_sum = part(on_device.tokens, **on_device.keywords())
            (loss_sum * scale).backward()
            loss_sums.append(loss_sum.detach())
    else:
        loss_sums = part.step(micro_batches, scale, seed_dropout=seed_dropout)
    apply.sum_gradients(part, world)

    parameters = [parameter for _, parameter in named_parameters(part) if parameter.grad is not None]
    loss_sum, grad_norm = _measure(part, loss_sums, parameters, world)
    loss, grad_norm = loss_sum / num_scored, grad_norm / scaler.scale
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        clipped = clip / grad_norm if clip and grad_norm > clip else 1.0
        optim.scale_gradients(parameters, clipped / scaler.scale)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report = StepReport(loss, grad_norm, finite, scaler.scale, sample_ids)
    scaler.update(finite)
    return report


def _measure(part: Part, loss_sums: list[Tensor], parameters: list[nn.Parameter], world: World) -> tuple[float, float]:
    """The sum of the losses, and the norm of all gradients as if they lay in one place. Equal on every rank, so that
    all of them update or none does."""
    if world.mesh is None:
        return sum(torch.stack(loss_sums).tolist()), optim.global_norm(parameters).item()
    # What several ranks hold is counted by each of them as a part of one: a single sum over all ranks is the total.
    losses = torch.stack(loss_sums).double().sum() / world.layout.tp if loss_sums else torch.zeros(())
    shares = [losses, optim.share_of_squares(counted_parameters(part), world)]
    numbers = torch.stack([share.to(world.device, torch.float64) for share in shares])
    loss_sum, squares = sum_over(world, numbers, "pp", "dp", "fsdp", "tp")
    return loss_sum, math.sqrt(squares)
