"""Samples to batches. Every rank computes the same global batch and takes its own rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import DataConfig
from gptworks.data.passed_over import PassedOver
from gptworks.data.windows import OrderedSamples, Sample
from gptworks.errors import DataError
from gptworks.model import IGNORED


@dataclass(frozen=True)
class Batch:
    """One micro-batch. positions and segments are None where nothing is reset, so that the fast kernels apply."""

    tokens: Tensor  # int64 [B, T]
    labels: Tensor  # int64 [B, T]; -100 = not scored
    positions: Tensor | None  # int64 [B, T]
    segments: Tensor | None  # int64 [B, T]; attention stays within equal numbers
    sample_ids: Tensor  # int64 [B], global sample indices

    def to(self, device: torch.device) -> "Batch":
        """The tensors the model reads; the sample ids stay where they are. What is pinned for a GPU is copied while
        this process goes on."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))

    def pinned_for(self, device: torch.device) -> "Batch":
        """In memory that a GPU copies from by itself; for other devices as it is."""
        return self._each(Tensor.pin_memory) if device.type == "cuda" else self

    def row(self, number: int) -> "Batch":
        """One of its samples."""
        one = self._each(lambda tensor: tensor[number : number + 1])
        return replace(one, sample_ids=self.sample_ids[number : number + 1])

    def _each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        def done(tensor: Tensor | None) -> Any:
            return None if tensor is None else function(tensor)

        return Batch(done(self.tokens), done(self.labels), done(self.positions), done(self.segments), self.sample_ids)

    def keywords(self) -> dict[str, Tensor | None]:
        """What the model's forward takes besides the tokens."""
        return {"labels": self.labels, "positions": self.positions, "segments": self.segments}

    @property
    def num_scored(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True)
class EodPolicy:
    """What happens at an end-of-document token."""

    eod_id: int | None
    mask_loss: bool
    reset_positions: bool
    reset_attention: bool

    @classmethod
    def from_config(cls, cfg: DataConfig, eod_id: int | None) -> "EodPolicy":
        asked = [name for name in ("mask_eod", "reset_positions", "reset_attention") if getattr(cfg, name)]
        if asked and eod_id is None:
            raise DataError(
                f"data.{asked[0]}: the end-of-document token is not known. Prepare the data with a tokenizer that has "
                "one and --append-eod, or set data.tokenizer."
            )
        return cls(eod_id, cfg.mask_eod, cfg.reset_positions, cfg.reset_attention)


def collate(samples: list[Sample], first: int | Sequence[int], eod_policy: EodPolicy) -> Batch:
    """`first`: the place of the first sample in their order, or those of all of them."""
    places = range(first, first + len(samples)) if isinstance(first, int) else first
    windows = np.stack([sample.tokens for sample in samples])
    tokens, labels = windows[:, :-1], windows[:, 1:].copy()
    for row, sample in enumerate(samples):
        if sample.scored is not None:
            labels[row, ~sample.scored] = IGNORED
    is_eod = tokens == eod_policy.eod_id
    if eod_policy.mask_loss:
        labels[is_eod] = IGNORED
    # Number of the document a token belongs to, counted from the start of the window; EOD ends its own document.
    segments = np.concatenate([np.zeros((len(samples), 1), np.int64), np.cumsum(is_eod, 1)[:, :-1]], 1)
    return Batch(
        torch.from_numpy(tokens.copy()),
        torch.from_numpy(labels),
        torch.from_numpy(_positions(segments)) if eod_policy.reset_positions else None,
        torch.from_numpy(segments) if eod_policy.reset_attention else None,
        torch.tensor(places),
    )


def _positions(segments: np.ndarray) -> np.ndarray:
    """Distance from the start of the token's own segment."""
    at = np.arange(segments.shape[1])
    starts = np.zeros_like(segments)
    new = segments[:, 1:] != segments[:, :-1]
    starts[:, 1:] = np.where(new, at[1:], 0)
    return at - np.maximum.accumulate(starts, 1)


class Batches:
    """The micro-batches of each optimizer step for one data rank. `consumed`, how many samples were read, and which
    were passed over besides, is all there is to remember."""

    def __init__(
        self,
        samples: OrderedSamples,
        plan: BatchPlan,
        eod_policy: EodPolicy,
        *,
        vocab_size: int,
        data_rank: int = 0,
        consumed: int = 0,
        passed_over: PassedOver | None = None,
    ) -> None:
        self.samples = samples
        self.plan = plan
        self.eod_policy = eod_policy
        self.vocab_size = vocab_size
        self.data_rank = data_rank
        self.consumed = consumed
        self.passed_over = passed_over or PassedOver()

    def next_step(self) -> list[Batch]:
        """This rank's micro-batches of the next global batch."""
        micro_batches = self.read(self.consumed)
        self.consumed += self.plan.global_size
        return micro_batches

    def read(self, consumed: int) -> list[Batch]:
        """What is next after so many samples. Nothing is remembered."""
        plan = self.plan
        rows = plan.micro_size * plan.data_parallel
        micro_batches = []
        for micro in range(plan.accumulation):
            first = consumed + micro * rows + self.data_rank * plan.micro_size
            samples, places = self._read(first, plan.micro_size)
            check_ids(samples, places[0], self.vocab_size)
            micro_batches.append(collate(samples, places, self.eod_policy))
        return micro_batches

    def _read(self, first: int, count: int) -> tuple[list[Sample], list[int]]:
        """Samples, and their places in the order."""
        samples: list[Sample] = []
        places: list[int] = []
        for place, length in self.passed_over.stretches(first, count):
            samples += self.samples.at(place, length)
            places += range(place, place + length)
        return samples, places

    def place(self) -> int:
        """Where in the order the next sample stands."""
        return self.passed_over.place(self.consumed)

    def pass_over_since(self, consumed: int) -> None:
        """Be where so many samples were read, as if those that were read since then had never been there."""
        self.passed_over = self.passed_over.adding(consumed, self.consumed)
        self.consumed = consumed


def check_ids(samples: list[Sample], first: int, vocab_size: int) -> None:
    """A store without a sidecar does not say how large its vocabulary is, and its bytes may be damaged."""
    highest = max(int(sample.tokens.max()) for sample in samples)
    lowest = min(int(sample.tokens.min()) for sample in samples)
    where = f"samples {first} to {first + len(samples) - 1}"
    if lowest < 0:
        raise DataError(f"token id {lowest} in {where}: ids are never negative. The store is damaged.")
    if highest >= vocab_size:
        raise DataError(
            f"token id {highest} in {where} is outside the model's vocabulary of {vocab_size}. "
            f"Set model.vocab_size to at least {highest + 1}, or prepare the data with the model's tokenizer."
        )
