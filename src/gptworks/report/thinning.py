"""Fewer points of a curve, without losing its extremes."""

from itertools import pairwise

Points = list[tuple[float, float]]


def thinned(points: Points, most: int) -> Points:
    """At most `most` points: the first, the last, and the lowest and highest of each piece between.

    A spike of a single step stays, however long the run is; taking every n-th point would lose it.
    """
    if len(points) <= most:
        return points
    pieces = max(1, (most - 2) // 2)
    inner = points[1:-1]
    borders = [len(inner) * piece // pieces for piece in range(pieces + 1)]
    kept = [points[0]]
    for begin, end in pairwise(borders):
        piece = range(begin, end)
        lowest = min(piece, key=lambda at: inner[at][1])
        highest = max(piece, key=lambda at: inner[at][1])
        kept += [inner[at] for at in sorted({lowest, highest})]
    return [*kept, points[-1]]
