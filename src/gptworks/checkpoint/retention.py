"""Which checkpoints stay: those that the configuration asks for, and those that a run which goes wrong will need.

A checkpoint holds the weights after its last update, and no loss before that update tells what the update did. What
tells is the loss of the steps after it: the smoothed loss of the next checkpoint, or of now for the newest one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gptworks.config.schema import CheckpointConfig

MUCH_WORSE = 1.0  # nats above the lowest smoothed loss: a perplexity 2.7 times as high


@dataclass(frozen=True)
class Kept:
    asked: set[int]  # the steps that the configuration keeps
    needed: set[int]  # the steps that stay besides, because newer ones are much worse


def newest_sound(losses: Mapping[int, float | None], now: float | None) -> int | None:
    """The newest checkpoint after which training did not get much worse.

    `losses`: the smoothed loss of each checkpoint, by step; `now`: that of the present. None is one that is not known,
    and nothing is held against a checkpoint for what is not known.
    """
    lowest = _lowest(losses, now)
    after = now
    for step in sorted(losses, reverse=True):
        if not _is_much_worse(after, lowest):
            return step
        after = losses[step]
    return None


def choose(losses: Mapping[int, float | None], now: float | None, cfg: CheckpointConfig, best: int | None) -> Kept:
    """`best`: the step of the lowest held-out loss, or None."""
    steps = sorted(losses)
    asked = set(steps[-cfg.keep_last :])
    if best is not None:
        asked.add(best)
    if cfg.keep_every:
        asked |= {step for step in steps if step % cfg.keep_every == 0}
    sound = newest_sound(losses, now)
    needed = set() if sound is None else {sound}
    known = {step: loss for step, loss in losses.items() if loss is not None}
    if known:
        lowest = min(known, key=lambda step: (known[step], -step))
        newer = [now, *(loss for step, loss in known.items() if step > lowest)]
        if any(_is_much_worse(loss, known[lowest]) for loss in newer):
            needed.add(lowest)
    return Kept(asked, needed - asked)


def _lowest(losses: Mapping[int, float | None], now: float | None) -> float | None:
    return min((loss for loss in [*losses.values(), now] if loss is not None), default=None)


def _is_much_worse(loss: float | None, lowest: float | None) -> bool:
    return loss is not None and (lowest is None or not loss <= lowest + MUCH_WORSE)
