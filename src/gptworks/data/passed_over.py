"""Samples that are passed over: ranges of the order of samples that are never read again.

The order of samples is arithmetic, and so is the order without them: a run remembers the ranges and how many samples it
has read, and any layout finds the same ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class PassedOver:
    """`ranges`: (first, end) of places in the order, apart from each other, the first one first."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def from_json(cls, ranges: Sequence[Sequence[int]]) -> "PassedOver":
        spans = tuple((first, end) for first, end in ranges)
        borders = [-1, *(border for each in spans for border in each)]
        if any(type(border) is not int for border in borders) or any(
            later <= earlier for earlier, later in pairwise(borders)
        ):
            raise ValueError(f"passed_over is {list(ranges)!r}, needed [first, end] of ranges that rise")
        return cls(spans)

    def as_json(self) -> list[list[int]]:
        return [list(each) for each in self.ranges]

    def __len__(self) -> int:
        """How many samples."""
        return sum(end - first for first, end in self.ranges)

    def place(self, number: int) -> int:
        """Where in the order the sample stands that is read as number `number`, from 0."""
        for first, end in self.ranges:
            if number < first:
                break
            number += end - first
        return number

    def stretches(self, number: int, count: int) -> list[tuple[int, int]]:
        """The places of `count` samples from that number on, as (first place, how many that follow each other)."""
        together = []
        while count:
            place = self.place(number)
            border = next((first for first, _ in self.ranges if first > place), place + count)
            length = min(count, border - place)
            together.append((place, length))
            number, count = number + length, count - length
        return together

    def adding(self, number: int, end: int) -> "PassedOver":
        """Passes over also the samples that were read as numbers `number` to `end` - 1."""
        if end <= number:
            return self
        first, last = self.place(number), self.place(end - 1) + 1
        merged: list[tuple[int, int]] = []
        for begin, stop in sorted([*self.ranges, (first, last)]):
            if merged and begin <= merged[-1][1]:
                begin, stop = merged[-1][0], max(merged.pop()[1], stop)
            merged.append((begin, stop))
        return PassedOver(tuple(merged))
