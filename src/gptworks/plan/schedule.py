"""The order in which a pipeline rank runs the passes of a step, and what each of them finds."""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from operator import ge


def order(schedule: str, pp: int, virtual: int, rank: int, micro_batches: int) -> Iterator[tuple[str, int]]:
    """The passes of a rank: F forward, B backward; I and W are a backward pass in two, for inputs and for weights."""
    if not schedule:
        for _ in range(micro_batches):
            yield from (("F", 0), ("B", 0))
        return
    if schedule == "gpipe":
        for kind in "FB":
            yield from ((kind, rank) for _ in range(micro_batches))
        return
    if schedule == "1f1b":
        warm = min(micro_batches, pp - rank)
        yield from (("F", rank) for _ in range(warm))
        for _ in range(micro_batches - warm):
            yield from (("B", rank), ("F", rank))
        yield from (("B", rank) for _ in range(warm))
        return
    in_two = schedule == "zero_bubble"
    rounds = max(1, micro_batches // pp)
    each = micro_batches // rounds
    every = virtual * micro_batches
    warm = min((virtual - 1) * each + (1 if in_two else 2) * (pp - 1 - rank), every)

    def forward(step: int) -> tuple[str, int]:
        return "F", step // each % virtual * pp + rank

    def backward(step: int) -> int:
        return (virtual - 1 - (step - warm) // each % virtual) * pp + rank

    done: list[int] = []
    weights = 0
    for step in range(every + warm):
        if step < every:
            yield forward(step)
        if step >= warm:
            yield "I" if in_two else "B", backward(step)
            done.append(backward(step))
            if in_two and step - warm >= rank:
                yield "W", done[weights]
                weights += 1
    if in_two:
        yield from (("W", number) for number in done[weights:])


Passes = list[tuple[tuple[str, int, bool, int, int], list[tuple[int, ...]]]]


@lru_cache(maxsize=1 << 14)
def passes(schedule: str, pp: int, virtual: int, rank: int, micro_batches: int, zero: int) -> tuple[Passes, int]:
    """The passes of a rank: kind, stage, whether it is the stage's last, whether the stage has gradients, whether its
    parameters are gathered. And what such a pass finds, for every stage: micro-batches in flight, those waiting for
    the gradients of weights, whether there are gradients, whether parameters are gathered, how often it has sent. What
    another pass exceeds in all of these is left out. Then the most micro-batches in flight at any time.

    R: the gradients of a stage are reduced after its last pass."""
    flying, waiting, backwards, gathered, sends = range(5)
    states = [[0, 0, 0, 0, 0] for _ in range(virtual)]
    left = [micro_batches] * virtual
    last = pp * virtual - 1 if schedule else 0
    most_flying = 0
    seen: dict[tuple[str, int, bool, int, int], dict[tuple[int, ...], None]] = {}

    def see(kind: str, at: int, is_last: bool = False) -> None:
        states_met = seen.setdefault((kind, at, is_last, states[at][backwards], states[at][gathered]), {})
        states_met[tuple(value for state in states for value in state)] = None

    for kind, number in order(schedule, pp, virtual, rank, micro_batches):
        at = number // pp if schedule else 0
        mine = states[at]
        if kind == "F":
            see("F", at)
            mine[flying] += 1
            mine[gathered] = int(zero in {1, 2})
            most_flying = max(most_flying, sum(state[flying] for state in states))
        elif kind == "I" and number != last and zero != 3:
            see("I", at)
            mine[waiting] += 1
        elif kind in {"B", "I"}:
            left[at] -= 1
            see("B", at, left[at] == 0)
            mine[flying] -= 1
            mine[backwards] = 1
            mine[sends] += 1
            if zero == 3 or (zero and left[at] == 0 and not schedule):
                mine[gathered] = 0
        elif mine[waiting]:
            left[at] -= 1
            see("W", at)
            mine[flying] -= 1
            mine[waiting] -= 1
            mine[backwards] = 1
            mine[sends] += 1
        if schedule and left[at] == 0:
            see("R", at)
            mine[gathered] = 0
            left[at] = -1

    def exceeded(some: tuple[int, ...], states: Iterable[tuple[int, ...]]) -> bool:
        return any(other != some and all(map(ge, other, some)) for other in states)

    kinds = [(kind, [some for some in states if not exceeded(some, states)]) for kind, states in seen.items()]
    return kinds, most_flying


def enough(schedule: str, pp: int, micro_batches: int) -> int:
    """Later micro-batches repeat what some have shown."""
    if not schedule:
        return min(micro_batches, 3)
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, pp + 2 if schedule == "1f1b" else 4 * pp)
