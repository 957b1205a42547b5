"""What the ranks of a layout send in a step, over which links, and in how many messages."""

import math
from dataclasses import dataclass, replace

from gptworks.config.derive import Layout
from gptworks.plan.communication import on_the_wire, per_step
from gptworks.plan.devices import Device, Link
from gptworks.plan.rates import Kernels
from gptworks.plan.sizes import columns_and_rows
from gptworks.plan.workload import LayoutChoice, Workload


@dataclass(frozen=True)
class Messages:
    """On one axis: what passes a rank's link in a step, over which link, in how many messages."""

    bytes: float
    count: float
    inside: bool
    speed: float  # bytes/s before any loss
    latency: float


def messages_of(
    workload: Workload, choice: LayoutChoice, device: Device, link: Link, facts: Kernels
) -> dict[str, Messages]:
    """By axis; those of one rank have none."""
    layout = choice.layout
    wire, numbers = _wire_bytes(workload, choice, facts), _numbers(workload, choice)
    if choice.recompute == "full":
        # Per block a sum for each matrix that takes the stream or gives to it; along the sequence halves of sums, three
        # and two for each. Recomputation says those of the forward pass again.
        taking, giving = columns_and_rows(workload.model)
        if choice.parallel.sequence:
            more = (taking + facts.repeated_sums) / (3 * taking + 2 * giving)
        else:
            more = facts.repeated_sums / (taking + giving)
        wire["tp"] *= 1 + more
        numbers["tp"] *= 1 + more
    messages = {}
    stride = layout.world_size
    for axis, ranks in vars(layout).items():
        stride //= ranks
        if ranks == 1:
            continue
        here = together(ranks, stride, device.per_node)
        inside = here == ranks
        near = link.near(here)
        speed = near if inside else min(near, link.between * here)
        latency = link.inside_latency if inside else link.between_latency
        # A ring of few ranks, a tree of many, there and back.
        rounds = 1.0 if axis == "pp" else 2 * min(ranks - 1, 2 * math.log2(ranks))
        messages[axis] = Messages(wire[axis], numbers[axis], inside, speed, latency * rounds)
    return messages


def _wire_bytes(workload: Workload, choice: LayoutChoice, facts: Kernels) -> dict[str, float]:
    """By axis, on the last rank of the pipeline. Bytes grow with the blocks on a straight line: two points of it take
    less time than writing all blocks down."""
    stages = choice.layout.pp * choice.parallel.virtual_stages

    def sent(blocks_per_stage: int) -> dict[str, float]:
        model = workload.model.model_copy(update={"num_layers": stages * blocks_per_stage})
        return _sent(replace(workload, model=model), choice, facts)

    one, two = sent(1), sent(2)
    steps = _blocks(workload, choice) / choice.parallel.virtual_stages - 1
    return {axis: one[axis] + steps * (two[axis] - one[axis]) for axis in one}


def _sent(workload: Workload, choice: LayoutChoice, facts: Kernels) -> dict[str, float]:
    layout, compute = choice.layout, workload.compute_bytes
    gradient = facts.gradient if workload.precision.reduce == "fp32" else min(facts.gradient, compute)
    counts = dict.fromkeys(vars(layout), 0.0)
    for term in per_step(workload, choice, Layout(layout.pp - 1, 0, 0, 0), gradient_bytes=gradient):
        size = float(on_the_wire(term.kind, term.bytes, getattr(layout, term.axis)))
        if term.is_hidden and facts.scattered_sends and not choice.parallel.sequence:
            size /= layout.tp
        if term.axis == "tp" and term.kind == "all_reduce":
            size *= facts.tensor_sum / max(compute, 4)
        counts[term.axis] += size
    return counts


def _blocks(workload: Workload, choice: LayoutChoice) -> int:
    """The blocks of the pipeline rank that has most."""
    return math.ceil(workload.model.num_layers / choice.layout.pp)


def _numbers(workload: Workload, choice: LayoutChoice) -> dict[str, float]:
    """How many messages, by axis."""
    blocks, micro_batches = _blocks(workload, choice), choice.batch.accumulation
    return {
        "pp": 2 * micro_batches * choice.parallel.virtual_stages,
        "dp": blocks,
        "fsdp": 3 * blocks * micro_batches if choice.parallel.zero == 3 else 2 * blocks,
        "tp": sum(columns_and_rows(workload.model)) * blocks * micro_batches,
    }


def together(ranks: int, stride: int, per_node: int) -> int:
    """How many ranks of an axis are in one machine, when neighbours on it are `stride` apart.

    >>> together(8, 1, 8), together(16, 1, 8), together(4, 4, 8), together(4, 8, 8)
    (8, 8, 2, 1)
    """
    return max(1, min(ranks, per_node // stride))
