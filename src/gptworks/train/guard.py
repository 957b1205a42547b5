"""Is a step far from those before it: its loss, its gradient norm, or one of its samples?

All ranks read the same numbers of a step, so each of them comes to the same answer by itself.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gptworks.config.schema import GuardConfig
from gptworks.model import NOT_SCORED

# The rules; of several that are broken the one that is broken most is told. One bad document hardly moves the mean of a
# large batch, so the samples are compared with each other, too. Too low is bad as well: what repeats itself is learned
# by heart; and before it is, the tokens themselves tell (variety.py).
NONFINITE, LOSS, GRAD_NORM, SAMPLE_HIGH, SAMPLE_LOW = "nonfinite", "loss", "grad_norm", "sample_high", "sample_low"
VARIETY = "variety"

# Deviations below these are taken for these: what hardly varies would make a spike of any change.
_LEAST_OF_LOSS = 0.01  # as a share of the usual loss
_LEAST_OF_SAMPLES = 0.02  # the same
_LEAST_OF_LOG_NORM = 0.25  # 8 of them: more than 7 times the usual norm. Strange but healthy text has had 6.5 times
_SMALLEST = 1e-30
_AS_STANDARD_DEVIATION = 1.4826  # times the median distance from the median, where values are spread as usual


@dataclass(frozen=True)
class Verdict:
    """`rule`: the one that a step has broken, or none."""

    rule: str
    deviations: dict[str, float] = field(default_factory=dict)  # of each rule that could be judged by them
    share_of_variety: float | None = None  # that the most monotonous sample has of the usual, where that is known

    def __str__(self) -> str:
        if self.rule == NONFINITE:
            return "not finite"
        if self.rule == VARIETY:
            return f"a sample that repeats itself, with {self.share_of_variety:.0%} of the usual variety of tokens"
        texts = {
            LOSS: "loss {} deviations above the usual",
            GRAD_NORM: "gradient norm {} deviations above the usual",
            SAMPLE_HIGH: "the loss of a sample {} deviations above those beside it",
            SAMPLE_LOW: "the loss of a sample {} deviations below those beside it",
        }
        return texts[self.rule].format(f"{self.deviations[self.rule]:.1f}")


class Guard:
    """Remembers the last good steps. The norm is judged by its logarithm: it varies by factors, not by differences.
    The highest and the lowest loss of a sample are judged by their distance from the median of their batch, which does
    not fall while the model learns. How varied samples are has a long tail, so that one is judged by its share of the
    usual instead."""

    def __init__(self, cfg: GuardConfig, state: dict[str, list[float]] | None = None) -> None:
        self.cfg = cfg
        self.limits = {
            LOSS: cfg.loss_z,
            GRAD_NORM: cfg.grad_norm_z,
            SAMPLE_HIGH: cfg.sample_high_z,
            SAMPLE_LOW: cfg.sample_low_z,
        }
        self.restore(state or {})

    def restore(self, state: dict[str, list[float]]) -> None:
        self._recent = {rule: _Recent(self.cfg.window, state.get(rule, ())) for rule in (*self.limits, VARIETY)}

    def state(self) -> dict[str, list[float]]:
        """For the checkpoint: what is judged after a restart is what would have been judged without."""
        if self.cfg.action == "off":
            return {}
        return {rule: list(recent.values) for rule, recent in self._recent.items()}

    def judge(
        self, loss: float, grad_norm: float, sample_losses: Sequence[float] = (), varieties: Sequence[float] = ()
    ) -> Verdict:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return Verdict(NONFINITE)
        if self.cfg.action == "off":
            return Verdict("")
        deviations = {
            rule: z
            for rule, value in _measured(loss, grad_norm, sample_losses).items()
            if (z := self._recent[rule].deviations(value, self._least(rule))) is not None
        }
        beyond = {rule: deviations[rule] / limit for rule, limit in self.limits.items() if limit and rule in deviations}
        share = self._share_of_variety(varieties)
        if share is not None:
            beyond[VARIETY] = self.cfg.variety / max(share, _SMALLEST)
        worst = max(beyond, key=beyond.__getitem__, default="")
        return Verdict(worst if worst and beyond[worst] > 1 else "", deviations, share)

    def learn(
        self, loss: float, grad_norm: float, sample_losses: Sequence[float] = (), varieties: Sequence[float] = ()
    ) -> None:
        """From a step that was made. One that was only warned of counts as the worst that is still good."""
        if self.cfg.action == "off":
            return
        for rule, value in _measured(loss, grad_norm, sample_losses).items():
            self._recent[rule].add(value, self.limits[rule], self._least(rule))
        if judged := _judged(varieties):
            self._recent[VARIETY].values.append(statistics.median(judged))

    def expected(self) -> dict[str, Any]:
        """What good steps had, for those who read of a bad one."""
        usual = {rule: recent.usual() for rule, recent in self._recent.items() if recent.values}
        named = {f"usual_{rule}": value for rule, value in usual.items()}
        return named | ({f"usual_{GRAD_NORM}": math.exp(usual[GRAD_NORM])} if GRAD_NORM in usual else {})

    def _share_of_variety(self, varieties: Sequence[float]) -> float | None:
        recent, judged = self._recent[VARIETY], _judged(varieties)
        if not judged or len(recent.values) < recent.window:
            return None
        return min(judged) / max(recent.usual(), _SMALLEST)

    def _least(self, rule: str) -> float:
        if rule == GRAD_NORM:
            return _LEAST_OF_LOG_NORM
        return abs(self._recent[LOSS].usual()) * (_LEAST_OF_LOSS if rule == LOSS else _LEAST_OF_SAMPLES)


def _measured(loss: float, grad_norm: float, sample_losses: Sequence[float]) -> dict[str, float]:
    """What each rule looks at; of a single sample there is nothing to compare."""
    measured = {LOSS: loss, GRAD_NORM: math.log(max(grad_norm, _SMALLEST))}
    scored = _judged(sample_losses)
    if len(scored) > 1:
        middle = statistics.median(scored)
        measured |= {SAMPLE_HIGH: max(scored) - middle, SAMPLE_LOW: middle - min(scored)}
    return measured


def _judged(of_samples: Sequence[float]) -> list[float]:
    return [each for each in of_samples if each != NOT_SCORED]


class _Recent:
    """The last values, their median and how far they lie from it."""

    def __init__(self, window: int, values: Iterable[float] = ()) -> None:
        self.window = window
        self.values = deque(values, maxlen=window)

    def usual(self) -> float:
        return statistics.median(self.values) if self.values else 0.0

    def deviations(self, value: float, least: float) -> float | None:
        """How many deviations a value lies above the usual; None while the window is not full."""
        if len(self.values) < self.window:
            return None
        return (value - self.usual()) / self._deviation(least)

    def add(self, value: float, most: float, least: float) -> None:
        """Not more than `most` deviations above the usual, where that is known and asked for."""
        if most and len(self.values) == self.window:
            value = min(value, self.usual() + most * self._deviation(least))
        self.values.append(value)

    def _deviation(self, least: float) -> float:
        usual = self.usual()
        typical = statistics.median(abs(value - usual) for value in self.values)
        return max(_AS_STANDARD_DEVIATION * typical, least, _SMALLEST)
