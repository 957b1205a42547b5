"""The learning rate at a step, as a pure function."""

import math

from gptworks.config.derive import cooldown_steps
from gptworks.config.schema import OptimConfig


def lr_at(step: int, optim: OptimConfig, last_step: int) -> float:
    """The rate of update `step` (the first is 1). With W = warmup_steps, D = decay_steps and t = the clock:

    t <= W: lr * t / W;   W < t <= D: from lr to min_lr along the schedule;   t > D: min_lr.
    """
    clock = step - 1 + optim.warmup_from
    warmup, end = optim.warmup_steps, optim.decay_steps or last_step
    # A decay that counts from the start does not begin at lr, so step W is the first of its own (as in OneFlow).
    if clock < warmup or (clock == warmup and warmup and optim.cosine_clock == "after_warmup"):
        return optim.lr * clock / warmup
    if optim.schedule == "constant":
        return optim.lr
    if clock >= end:
        return optim.min_lr
    span = optim.lr - optim.min_lr
    if optim.schedule == "wsd":
        return optim.min_lr + span * min(1.0, (end - clock) / cooldown_steps(optim, end))
    start = warmup if optim.cosine_clock == "after_warmup" else 0
    progress = (clock - start) / (end - start)
    if optim.schedule == "linear":
        return optim.min_lr + span * (1 - progress)
    return optim.min_lr + span * 0.5 * (1 + math.cos(math.pi * progress))


def highest_until(step: int, optim: OptimConfig, last_step: int) -> float:
    """The highest rate of updates 1 to `step`: a rate rises to the end of the warmup, and not after it."""
    around = range(int(optim.warmup_steps) - 1, int(optim.warmup_steps) + 3)
    return max(lr_at(max(1, min(step, each)), optim, last_step) for each in (*around, step))
