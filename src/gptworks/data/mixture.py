"""Which source each sample is of, where the weights of the sources change on the way.

Within a stage shares are exact to one sample of each source. Each source goes on where it was at the end of the stage
before. All of it is arithmetic: any rank finds any sample without the ones before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gptworks.data import order


@dataclass(frozen=True)
class Stage:
    """From the place `first` in the order on, sources have these weights."""

    first: int
    weights: tuple[float, ...]


def as_json(stages: Sequence[Stage]) -> list[list[object]]:
    return [[stage.first, list(stage.weights)] for stage in stages]


def from_json(values: Sequence[Sequence[object]]) -> tuple[Stage, ...]:
    stages = []
    for first, weights in values:
        numbers = list(weights) if isinstance(weights, list) else []
        if type(first) is not int or not numbers or any(type(each) not in (int, float) for each in numbers):
            raise TypeError(f"stages is {list(values)!r}, needed [first sample, weights] of each stage")
        stages.append(Stage(first, tuple(float(each) for each in numbers)))
    return tuple(stages)


class Mixture:
    def __init__(self, stages: Sequence[Stage], seed: int) -> None:
        self.stages, self.seed = tuple(stages), seed
        self._left = [
            order.not_blended(after.first - stage.first, stage.weights, *self._key(stage))
            for stage, after in pairwise(self.stages)
        ]

    def where(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The source of each, and the how-manieth sample of that source."""
        sources, numbers = np.empty(len(index), np.int64), np.empty(len(index), np.int64)
        firsts = [stage.first for stage in self.stages]
        which = np.searchsorted(firsts, index, side="right") - 1
        for number in np.unique(which).tolist():
            here, stage = which == number, self.stages[number]
            sources[here], within = order.blend(index[here] - stage.first, stage.weights, *self._key(stage))
            numbers[here] = self._going_on(number, sources[here], within)
        return sources, numbers

    def _going_on(self, stage: int, sources: np.ndarray, within: np.ndarray) -> np.ndarray:
        """Numbers of a stage as numbers of the sources: first what the stage before has left of its last block."""
        while stage:
            stage -= 1
            earlier = np.empty_like(within)
            for source in np.unique(sources).tolist():
                here = sources == source
                left, after = self._left[stage][source]
                beyond = after + within[here] - len(left)
                is_left = within[here] < len(left)
                earlier[here] = np.where(is_left, np.append(left, 0)[np.minimum(within[here], len(left))], beyond)
            within = earlier
        return within

    def _key(self, stage: Stage) -> tuple[object, ...]:
        """What the order of a stage is drawn from; the first stage has that of a run without stages."""
        return (self.seed, "stage", stage.first) if stage.first else (self.seed,)


def going_on(before: Sequence[Stage], now: Sequence[Stage], place: int, *, planned: bool) -> tuple[Stage, ...] | None:
    """The stages of a run that goes on at a place in the order: what was is kept, and what is asked for now holds from
    there on. None where that is not possible.

    `planned`: `now` says of the past, too, what it was; else it is the weights of now.
    """
    past = tuple(stage for stage in before if stage.first < place)
    if planned:
        return tuple(now) if tuple(stage for stage in now if stage.first < place) == past else None
    if not past:
        return tuple(now)
    if len(now) != 1 or len(now[0].weights) != len(past[-1].weights):
        return None
    return past if past[-1].weights == now[0].weights else (*past, Stage(place, now[0].weights))
