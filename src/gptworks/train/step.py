"""One optimizer step."""

import math
from dataclasses import dataclass

import torch

from gptworks.data.loader import Batch
from gptworks.errors import DataError
from gptworks.model import GPT
from gptworks.model.init import seed_of
from gptworks.parallel.launch import World
from gptworks.train import optim
from gptworks.train.precision import LossScaler


@dataclass(frozen=True)
class StepReport:
    loss: float  # mean over the scored tokens of the global batch
    grad_norm: float  # before clipping
    tokens: int
    updated: bool  # False: not finite, the weights are as before
    loss_scale: float
    sample_ids: list[int]


def train_step(
    part: GPT,
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
    sample_ids = torch.cat([batch.sample_ids for batch in micro_batches]).tolist()
    if num_scored == 0:
        raise DataError(
            f"step {step}: no token of samples {sample_ids[:8]} is scored, so there is nothing to learn from. Prompts "
            "that fill data.seq_len leave no room for their completions: enlarge it, or set data.too_long: skip."
        )
    loss_sums = []
    for number, batch in enumerate(micro_batches):
        # Dropout depends on what it is for, not on what was drawn before: resuming needs no generator state.
        torch.manual_seed(seed_of(seed, "dropout", step, number, world.data_rank))
        on_device = batch.to(world.device)
        loss_sum = part(on_device.tokens, **on_device.keywords())
        (loss_sum * (scaler.scale / num_scored)).backward()
        loss_sums.append(loss_sum.detach())

    parameters = [parameter for parameter in part.parameters() if parameter.grad is not None]
    grad_norm = optim.global_norm(parameters).item() / scaler.scale
    loss = sum(torch.stack(loss_sums).tolist()) / num_scored
    finite = math.isfinite(loss) and math.isfinite(grad_norm)
    if finite:
        clipped = clip / grad_norm if clip and grad_norm > clip else 1.0
        optim.scale_gradients(parameters, clipped / scaler.scale)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    report = StepReport(loss, grad_norm, sum(b.tokens.numel() for b in micro_batches), finite, scaler.scale, sample_ids)
    scaler.update(finite)
    return report
