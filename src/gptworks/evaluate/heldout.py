"""Loss on text the model was not trained on."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from gptworks.data.loader import EodPolicy, check_ids, collate
from gptworks.data.windows import OrderedSamples
from gptworks.errors import DataError
from gptworks.launch.world import World
from gptworks.model import GPT, IGNORED
from gptworks.model.inference import evaluating
from gptworks.parallel.parts import Part, device_number, sum_over


@dataclass(frozen=True, repr=False)
class HeldOut:
    """Sums over the scored tokens. `text_bytes` is 0 when the vocabulary does not tell bytes."""

    nats: float
    tokens: int
    text_bytes: int
    samples: int

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def __repr__(self) -> str:
        bits = "" if self.bits_per_byte is None else f", bits_per_byte={self.bits_per_byte:.4f}"
        return (
            f"HeldOut(loss={self.loss:.4f}, perplexity={self.perplexity:.4f}{bits}, tokens={self.tokens}, "
            f"samples={self.samples})"
        )


@torch.no_grad()
def held_out_loss(
    part: Part | GPT,
    samples: OrderedSamples,
    eod_policy: EodPolicy,
    *,
    micro_size: int,
    num_samples: int = 0,
    device: torch.device,
    byte_lengths: np.ndarray | None = None,
    world: World | None = None,
) -> HeldOut:
    """Over the first `num_samples` of the samples, or over all of them (0).

    In a world of many ranks those that read different data share the batches; all of them know the result.
    """
    total = min(samples.per_epoch, num_samples or samples.per_epoch)
    loss_sums, tokens, text_bytes = [], 0, 0
    world = world or World(device)
    with evaluating(part):
        for first, is_mine in _turns(range(0, total, micro_size), world):
            chosen = samples.at(first, min(micro_size, total - first))
            check_ids(chosen, first, part.cfg.vocab_size)
            batch = collate(chosen, first, eod_policy)
            if not is_mine:
                batch = replace(batch, labels=torch.full_like(batch.labels, IGNORED))
            on_device = batch.pinned_for(device).to(device)
            loss_sums.append(part(on_device.tokens, **on_device.keywords()))
            tokens += batch.num_scored
            if byte_lengths is not None:
                text_bytes += int(byte_lengths[batch.labels[batch.labels != IGNORED].numpy()].sum())
    # Read once, so that a GPU need not wait for the next batch to be made.
    losses = torch.stack(loss_sums) if loss_sums else torch.zeros(0, device=device)
    if world.mesh is None:
        nats = sum(losses.tolist())
    else:
        assert isinstance(part, Part)  # a GPT alone has no other ranks
        part.reshard_all()
        shares = [losses.double().sum(), device_number(world, tokens), device_number(world, text_bytes)]
        nats, *counts = sum_over(world, torch.stack(shares), "dp", "fsdp").tolist()
        tokens, text_bytes = (int(count) for count in counts)
    if tokens == 0:
        raise DataError(
            f"no token of the {total} samples to evaluate is scored. Prompts that fill data.seq_len leave no room for "
            "their completions: enlarge it, or set data.too_long: skip."
        )
    return HeldOut(nats, tokens, text_bytes, total)


def _turns(firsts: range, world: World) -> Iterator[tuple[int, bool]]:
    """Which batches this rank reads. Ranks that share a model take every turn together: one that has run out of batches
    reads the first again, and nothing of it is scored."""
    for turn in range(0, len(firsts), world.data_parallel):
        number = turn + world.data_rank
        yield firsts[number if number < len(firsts) else 0], number < len(firsts)
