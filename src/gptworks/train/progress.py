"""How far a run has come."""

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass
class Progress:
    """What a checkpoint remembers besides tensors and the number of samples."""

    step: int = 0
    updates: int = 0  # skipped steps are not among them
    skipped_in_a_row: int = 0
    rollbacks: int = 0
    held_out_loss: float | None = None
    best: dict[str, float] | None = None  # step, and held_out_loss or what else is looked at
    evaluations_since_best: int = 0
    held_out_samples: int = 0  # that both were measured on; 0 = none yet, or not known
    unlogged_loss: float = 0.0  # sum over the steps since the last log line
    unlogged_steps: int = 0

    def measured_on(self, samples: int) -> bool:
        """Whether losses on so many samples may be compared with the best so far; if not, it is chosen anew."""
        is_alike = self.best is None or self.held_out_samples == samples
        if not is_alike:
            self.best, self.evaluations_since_best = None, 0
        self.held_out_samples = samples
        return is_alike

    def see(self, name: str, measured: Mapping[str, float], *, higher_is_better: bool = False) -> bool:
        """Whether the number of that name is the best so far. One that was best by another name does not count."""
        value = measured.get(name, math.nan)
        before = None if self.best is None else self.best.get(name)
        is_better = before is None or (value > before if higher_is_better else value < before)
        is_best = math.isfinite(value) and is_better
        if is_best:
            self.best = {"step": self.step, name: value}
        self.evaluations_since_best = 0 if is_best else self.evaluations_since_best + 1
        return is_best

    def mean_loss(self) -> float:
        """The mean of the steps since the last line, which then begin anew. A skipped step has a line of its own."""
        mean = self.unlogged_loss / self.unlogged_steps
        self.unlogged_loss, self.unlogged_steps = 0.0, 0
        return mean
