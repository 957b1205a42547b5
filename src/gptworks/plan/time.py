"""How long one training step takes, in closed form.

A step is: matrix products, work that only moves bytes (norms, GELU, casts), the same again where it is recomputed,
messages that nobody computes during, waiting in the pipeline, and the update. Each is an amount of work, counted here,
over a speed:

    products     FLOPs / (peak of the device x share), where a product of [M, K] by [K, N] takes
                 1 + half x (1/M + 1/N + 1/K) times as long as a very large one
    bytes        bytes / (bandwidth x 0.85)
    kernels      their number x the gap between two of them
    messages     bytes on the wire / (speed of the slowest link of their ring x share) + latency

Amounts are facts of shapes and of programs (kernels.toml); devices are in devices.toml; the shares, and `half`, are
fitted to published runs by benchmarks/plan_fit.py (efficiency.toml, with its errors).
"""

from dataclasses import dataclass, field

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.stages import assign_layers, stages_of
from gptworks.plan.devices import Device, Link
from gptworks.plan.messages import Messages, messages_of
from gptworks.plan.rates import Efficiency, Kernels, efficiency, facts
from gptworks.plan.sizes import block_matrices, flops_per_token
from gptworks.plan.work import Work, block_work, head_work
from gptworks.plan.workload import LayoutChoice, Workload

BANDWIDTH_REACHED = 0.85  # of a datasheet's bandwidth, by kernels that only move bytes
BACKWARD = 2 / 3  # of the computing of a micro-batch
# Of the waiting of 1f1b that remains when the gradients of weights fill it (forward + input gradient - weight gradient,
# of three equal thirds).
ZERO_BUBBLE = 1 / 3


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the rank that is busy longest."""

    compute: float  # forward and backward, products and bytes
    recompute: float
    bubble: float  # waiting for other stages
    optimizer: float
    communication: dict[str, float]  # by axis: what nobody computes during
    hidden: dict[str, float] = field(default_factory=dict)  # by axis: what takes place during computation

    @property
    def exposed(self) -> float:
        return sum(self.communication.values())

    @property
    def total(self) -> float:
        return self.compute + self.recompute + self.bubble + self.optimizer + self.exposed


@dataclass(frozen=True)
class Step:
    """All amounts of a step, before any speed is known."""

    micro_batches: int
    stages: list[tuple[Work, Work]]  # of each pipeline rank and one micro-batch: both passes; what is recomputed
    interleaved: int
    waiting: float  # of the bubble of 1f1b
    update: float  # bytes
    copied: float  # bytes between the device and the memory of the machine, where the update is made there; else 0
    messages: dict[str, Messages]
    overlaps: tuple[str, ...]
    window: float  # of the computing of a step, in which gradients (and gathered parameters) can travel


def step_time(
    workload: Workload, choice: LayoutChoice, device: Device, link: Link, *, program: str = "ours"
) -> StepTime:
    """`program`: `ours`, or one of kernels.toml, to compare with what others published."""
    ours = "ours-fp32" if workload.precision.compute == "fp32" else "ours-compiled" if workload.compiled else "ours"
    work = count(workload, choice, device, link, facts(ours if program == "ours" else program))
    return seconds(work, efficiency(device.generation, program), device, workload.precision.compute)


def tokens_per_second(time: StepTime, batch: BatchPlan, seq_len: int) -> float:
    return batch.global_size * seq_len / time.total


def mfu(time: StepTime, workload: Workload, choice: LayoutChoice, device: Device) -> float:
    """FLOPs that the model needs (nothing recomputed, attention's hidden half not counted) over the peak."""
    speed = tokens_per_second(time, choice.batch, workload.seq_len)
    useful = flops_per_token(workload.model, workload.seq_len) * speed
    return useful / (choice.layout.world_size * device.peak[workload.precision.compute])


def count(
    workload: Workload,
    choice: LayoutChoice,
    device: Device,
    link: Link,
    facts: Kernels,
    layers: list[int] | None = None,
) -> Step:
    """`layers`: of each pipeline rank, where a program does not divide them evenly."""
    parallel, layout, model = choice.parallel, choice.layout, workload.model
    block, head = block_work(workload, choice, facts), head_work(workload, choice, facts)
    in_block = sum(spec.size for spec in block_matrices(model).values()) / layout.tp
    stages, numbers = [], []
    for rank, blocks in enumerate(layers or _blocks_of_ranks(workload, choice)):
        has_first, has_last = rank == 0, rank == layout.pp - 1
        held = blocks * in_block
        held += model.vocab_size * model.hidden_size / layout.tp * (has_first or has_last)
        work = (block.forward + block.backward) * blocks + (head if has_last else Work())
        stages.append((work + Work(bytes=held * facts.parameter), block.again * blocks))
        numbers.append(held)
    sharded = max(numbers) / (layout.fsdp if parallel.zero else 1)
    return Step(
        choice.batch.accumulation,
        stages,
        parallel.virtual_stages,
        ZERO_BUBBLE if parallel.schedule == "zero_bubble" else 1.0,
        sharded * facts.update,
        sharded * 4 * _copies(choice) if parallel.offload else 0.0,
        messages_of(workload, choice, device, link, facts),
        _overlapping(facts, layout),
        _window(choice, facts),
    )


def _blocks_of_ranks(workload: Workload, choice: LayoutChoice) -> list[int]:
    """How many blocks each pipeline rank has."""
    parallel, pp = choice.parallel, choice.layout.pp
    if pp == 1:
        return [workload.model.num_layers]
    even = [len(each) for each in assign_layers(workload.model.num_layers, pp * parallel.virtual_stages)]
    ranks = (stages_of(rank, pp, parallel.virtual_stages, parallel.schedule) for rank in range(pp))
    return [sum(even[stage] for stage in stages) for stages in ranks]


def seconds(step: Step, rates: Efficiency, device: Device, compute: str) -> StepTime:
    peak, bandwidth = device.peak[compute] * rates.peak, device.bandwidth * BANDWIDTH_REACHED

    def of(work: Work) -> float:
        products = (work.flops + rates.half * work.slowed) / peak
        return products + work.bytes * rates.elementwise / bandwidth + work.kernels * rates.gap

    def taking(axis: str) -> float:
        messages = step.messages.get(axis)
        if messages is None:
            return 0.0
        return messages.bytes / (messages.speed * (rates.inside if messages.inside else rates.between)) + (
            messages.count * messages.latency
        )

    m = step.micro_batches
    times = [(of(work), of(again)) for work, again in step.stages]
    busiest = max(range(len(times)), key=lambda rank: sum(times[rank]))
    compute_time, recompute_time = (m * part for part in times[busiest])
    # What a micro-batch waits for itself: over tp behind each pair of matrices, over pp between two stages.
    exposed, hidden = {}, {}
    for axis in ("tp", "pp"):
        hidden[axis] = taking(axis) * (rates.overlap if axis in step.overlaps else 0.0)
        exposed[axis] = taking(axis) - hidden[axis]
    waiting = sum(map(sum, times)) - sum(times[busiest]) + (len(times) - 1) * (exposed["tp"] + exposed["pp"]) / m
    bubble = waiting / step.interleaved * step.waiting
    window = compute_time * step.window * rates.overlap
    for axis in ("fsdp", "dp"):
        hidden[axis] = min(taking(axis), window) if axis in step.overlaps else 0.0
        exposed[axis] = taking(axis) - hidden[axis]
        window -= hidden[axis]
    optimizer = step.update / bandwidth
    if step.copied:
        optimizer = step.update / (device.host_memory * BANDWIDTH_REACHED) + step.copied / device.host
    return StepTime(
        compute_time,
        recompute_time,
        bubble,
        optimizer,
        {axis: exposed[axis] for axis in ("pp", "dp", "fsdp", "tp") if axis in step.messages},
        {axis: time for axis, time in hidden.items() if axis in step.messages},
    )


def _overlapping(facts: Kernels, layout: Layout) -> tuple[str, ...]:
    one_stream = any(getattr(layout, axis) > 1 for axis in facts.one_stream_with)
    return tuple(axis for axis in facts.overlaps if not (one_stream and axis in {"dp", "fsdp"}))


def _window(choice: LayoutChoice, facts: Kernels) -> float:
    """Share of the computing in which data-parallel messages travel, where they do: gradients in the backward pass
    (two thirds) of the last micro-batch, with several stages per rank of the last one of each; gathered parameters in
    the forward pass of the first. With zero 2 and 3 in all micro-batches."""
    zero, pp = choice.zero, choice.layout.pp
    passes = pp if choice.parallel.virtual_stages > 1 else 1
    last = 1.0 if zero >= 2 else min(1.0, passes / choice.batch.accumulation)
    if zero == 1 and pp > 1 and facts.sums_after_pipeline:
        return last * (1.0 - BACKWARD)
    return last * (1.0 if zero else BACKWARD)


def _copies(choice: LayoutChoice) -> int:
    """How often a shard of the parameters goes up, and one of the gradients down, where the CPU keeps them."""
    zero, micro_batches = choice.parallel.zero, choice.batch.accumulation
    up = 2 * micro_batches if zero == 3 else 1
    return up + (micro_batches if zero >= 2 else 1)
