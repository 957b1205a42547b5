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

import math
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.errors import UsageError
from gptworks.plan.communication import on_the_wire, per_step
from gptworks.plan.devices import Device, Link
from gptworks.plan.sizes import COMPUTE_BYTES, flops_per_token

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
class Kernels:
    """Facts of a program: see kernels.toml."""

    stream: tuple[float, float]
    inner: tuple[float, float]
    scores: tuple[float, float]
    dropout: tuple[float, float]
    dropped_scores: tuple[float, float]
    kernels: tuple[float, float]
    logits: float
    parameter: float
    update: float
    fused_attention: bool
    tensor_sum: int
    gradient: int
    repeated_sums: int
    overlaps: tuple[str, ...]
    one_stream_with: tuple[str, ...]
    sums_after_pipeline: bool
    scattered_sends: bool
    written_scores: tuple[float, float] = (0.0, 0.0)  # in place of `scores` with model.attention: math


@dataclass(frozen=True)
class Efficiency:
    """What was fitted, for one device generation and one program."""

    peak: float  # share of the peak that a very large product reaches
    half: float  # size at which a cube of a product would take (1 + 3) times its share
    gap: float  # seconds between two kernels
    inside: float  # share of the speed of links within a machine
    between: float
    elementwise: float  # bytes really moved / bytes counted
    overlap: float  # share of the computing during which messages of the axes that overlap can travel


@dataclass(frozen=True)
class Work:
    """Amounts: FLOPs of products, the same times (1/M + 1/N + 1/K), bytes, and kernels."""

    flops: float = 0.0
    slowed: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.flops + other.flops,
            self.slowed + other.slowed,
            self.bytes + other.bytes,
            self.kernels + other.kernels,
        )

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.slowed * times, self.bytes * times, self.kernels * times)


@dataclass(frozen=True)
class Messages:
    """On one axis: what passes a rank's link in a step, over which link, in how many messages."""

    bytes: float
    count: float
    inside: bool
    speed: float  # bytes/s before any loss
    latency: float


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
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    precision: PrecisionConfig,
    recompute: str,
    device: Device,
    link: Link,
    kernels: str = "ours",
    compiled: bool = False,
) -> StepTime:
    """`kernels`: whose program; `ours`, or one of kernels.toml, to compare with what others published."""
    if kernels == "ours":
        program = "ours-fp32" if precision.compute == "fp32" else "ours-compiled" if compiled else "ours"
    else:
        program = kernels
    work = count(
        model,
        parallel,
        batch,
        seq_len,
        precision=precision,
        recompute=recompute,
        device=device,
        link=link,
        facts=facts(program),
    )
    return seconds(work, efficiency(device.generation, kernels), device, precision.compute)


def tokens_per_second(time: StepTime, batch: BatchPlan, seq_len: int) -> float:
    return batch.global_size * seq_len / time.total


def mfu(
    time: StepTime,
    model: ModelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    device: Device,
    num_devices: int,
    precision: PrecisionConfig,
) -> float:
    """FLOPs that the model needs (nothing recomputed, attention's hidden half not counted) over the peak."""
    useful = flops_per_token(model, seq_len) * tokens_per_second(time, batch, seq_len)
    return useful / (num_devices * device.peak[precision.compute])


def count(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    precision: PrecisionConfig,
    recompute: str,
    device: Device,
    link: Link,
    facts: Kernels,
    layers: list[int] | None = None,
) -> Step:
    """`layers`: of each pipeline rank, where a program does not divide them evenly."""
    layout = Layout.known(parallel)
    virtual = parallel.virtual_stages
    forward, backward, again = _block(model, layout, batch, seq_len, facts, recompute, parallel.sequence)
    head = _head(model, layout, batch, seq_len, facts)
    in_block = _block_parameters(model, layout.tp)
    even = [len(each) for each in assign_layers(model.num_layers, layout.pp * virtual)]
    stages, numbers = [], []
    for rank in range(layout.pp):
        here = stages_of(rank, layout.pp, virtual, parallel.schedule) if layout.pp > 1 else [0]
        blocks = layers[rank] if layers else sum(even[stage] for stage in here)
        has_first, has_last = rank == 0, rank == layout.pp - 1
        held = blocks * in_block
        held += model.vocab_size * model.hidden_size / layout.tp * (has_first or has_last)
        work = (forward + backward) * blocks + (head if has_last else Work()) + Work(bytes=held * facts.parameter)
        stages.append((work, again * blocks))
        numbers.append(held)
    sharded = max(numbers) / (layout.fsdp if parallel.zero else 1)
    return Step(
        batch.accumulation,
        stages,
        virtual,
        ZERO_BUBBLE if parallel.schedule == "zero_bubble" else 1.0,
        sharded * facts.update,
        sharded * 4 * _copies(parallel, batch.accumulation) if parallel.offload else 0.0,
        _messages(model, parallel, layout, batch, seq_len, precision, recompute, device, link, facts),
        _overlapping(facts, layout),
        _window(parallel, layout, batch.accumulation, facts.sums_after_pipeline),
    )


def seconds(step: Step, rates: Efficiency, device: Device, compute: str) -> StepTime:
    peak, bandwidth = device.peak[compute] * rates.peak, device.bandwidth * BANDWIDTH_REACHED

    def of(work: Work) -> float:
        products = (work.flops + rates.half * work.slowed) / peak
        return products + work.bytes * rates.elementwise / bandwidth + work.kernels * rates.gap

    def taking(axis: str) -> float:
        found = step.messages.get(axis)
        if found is None:
            return 0.0
        return found.bytes / (found.speed * (rates.inside if found.inside else rates.between)) + (
            found.count * found.latency
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


def _window(parallel: ParallelConfig, layout: Layout, micro_batches: int, sums_after_pipeline: bool) -> float:
    """Share of the computing in which data-parallel messages travel, where they do: gradients in the backward pass
    (two thirds) of the last micro-batch, with several stages per rank of the last one of each; gathered parameters in
    the forward pass of the first. With zero 2 and 3 in all micro-batches."""
    zero = parallel.zero if layout.fsdp > 1 else 0
    last = 1.0 if zero >= 2 else min(1.0, (layout.pp if parallel.virtual_stages > 1 else 1) / micro_batches)
    if zero == 1 and layout.pp > 1 and sums_after_pipeline:
        return last * (1.0 - BACKWARD)
    return last * (1.0 if zero else BACKWARD)


def _copies(parallel: ParallelConfig, micro_batches: int) -> int:
    """How often a shard of the parameters goes up, and one of the gradients down, where the CPU keeps them."""
    up = 2 * micro_batches if parallel.zero == 3 else 1
    return up + (micro_batches if parallel.zero >= 2 else 1)


# Amounts of one block and one micro-batch


def _product(m: float, n: float, k: float, times: float = 1.0) -> Work:
    flops = 2 * m * n * k * times
    return Work(flops, flops * (1 / m + 1 / n + 1 / k))


def _block(
    model: ModelConfig, layout: Layout, batch: BatchPlan, seq_len: int, facts: Kernels, recompute: str, sequence: bool
) -> tuple[Work, Work, Work]:
    """Forward, backward, and what is computed again."""
    h, f, tp = model.hidden_size, model.ffn_size, layout.tp
    tokens = batch.micro_size * seq_len
    heads = max(1, model.num_heads // tp)
    linear_attention = _product(tokens, 3 * h / tp, h) + _product(tokens, h, h / tp)
    feed_forward = _product(tokens, f / tp, h) + _product(tokens, h, f / tp)
    fused = facts.fused_attention and model.attention == "auto"
    seen = 0.5 if fused else 1.0  # a fused kernel skips what the mask hides
    attention = _product(seq_len, seq_len, model.head_size, batch.micro_size * heads * 2 * seen)
    stream = tokens * h / (tp if sequence else 1)
    inner, scores = tokens * h / tp, batch.micro_size * heads * seq_len**2
    passes = []
    for way in (0, 1):
        moved = stream * (facts.stream[way] + facts.dropout[way] * (model.dropout_hidden > 0))
        moved += inner * facts.inner[way]
        bytes_of_score = facts.scores[way] if model.attention == "auto" else facts.written_scores[way]
        around = scores * (bytes_of_score + facts.dropped_scores[way] * (model.dropout_attention > 0))
        passes.append((moved, around))
    forward = linear_attention + feed_forward + attention + Work(bytes=sum(passes[0]), kernels=facts.kernels[0])
    backward = (linear_attention + feed_forward) * 2 + attention * (2.5 if fused else 2)
    backward += Work(bytes=sum(passes[1]), kernels=facts.kernels[1])
    again = {
        "none": Work(),
        "full": forward,
        "full_attn": linear_attention
        + attention
        + Work(bytes=passes[0][1] + passes[0][0] / 2, kernels=facts.kernels[0] / 2),
        "core_attn": attention + Work(bytes=passes[0][1], kernels=facts.kernels[0] / 4),
    }[recompute]
    return forward, backward, again


def _head(model: ModelConfig, layout: Layout, batch: BatchPlan, seq_len: int, facts: Kernels) -> Work:
    tokens, vocabulary = batch.micro_size * seq_len, model.vocab_size / layout.tp
    return _product(tokens, vocabulary, model.hidden_size, 3) + Work(bytes=tokens * vocabulary * facts.logits)


def _block_parameters(model: ModelConfig, tp: int) -> float:
    h, f = model.hidden_size, model.ffn_size
    return (4 * h * h + 2 * h * f) / tp


# Messages


def _messages(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    seq_len: int,
    precision: PrecisionConfig,
    recompute: str,
    device: Device,
    link: Link,
    facts: Kernels,
) -> dict[str, Messages]:
    compute = COMPUTE_BYTES[precision.compute]
    gradient = facts.gradient if precision.reduce == "fp32" else min(facts.gradient, compute)
    blocks = math.ceil(model.num_layers / layout.pp)

    def sent(blocks_per_stage: int) -> dict[str, float]:
        """By axis, on the last rank of the pipeline."""
        small = model.model_copy(update={"num_layers": layout.pp * parallel.virtual_stages * blocks_per_stage})
        last = Layout(layout.pp - 1, 0, 0, 0)
        terms = per_step(small, parallel, batch, seq_len, place=last, compute_bytes=compute, reduce_bytes=gradient)
        found = dict.fromkeys(vars(layout), 0.0)
        for term in terms:
            size = float(on_the_wire(term.kind, term.bytes, getattr(layout, term.axis)))
            if term.what.endswith("hidden states") and facts.scattered_sends and not parallel.sequence:
                size /= layout.tp
            if term.axis == "tp" and term.kind == "all_reduce":
                size *= facts.tensor_sum / max(compute, 4)
            found[term.axis] += size
        return found

    # Bytes grow with the blocks on a straight line: two points of it take less time than writing all blocks down.
    one, two = sent(1), sent(2)
    steps = blocks / parallel.virtual_stages - 1
    wire = {axis: one[axis] + steps * (two[axis] - one[axis]) for axis in one}
    m = batch.accumulation
    # Per block 4 sums; along the sequence 10 halves of one. Recomputation says those of the forward pass again.
    messages: dict[str, float] = {
        "pp": 2 * m * parallel.virtual_stages,
        "dp": blocks,
        "fsdp": 2 * blocks,
        "tp": 4 * blocks * m,
    }
    if recompute == "full":
        more = facts.repeated_sums / 4 if not parallel.sequence else (2 + facts.repeated_sums) / 10
        wire["tp"] *= 1 + more
        messages["tp"] *= 1 + more
    if parallel.zero == 3:
        messages["fsdp"] = 3 * blocks * m
    found = {}
    inner = layout.world_size
    for axis, ranks in vars(layout).items():
        inner //= ranks
        if ranks == 1:
            continue
        here = together(ranks, inner, device.per_node)
        inside = here == ranks
        near = link.near(here)
        speed = near if inside else min(near, link.between * here)
        latency = link.inside_latency if inside else link.between_latency
        # A ring of few ranks, a tree of many, there and back.
        rounds = 1.0 if axis == "pp" else 2 * min(ranks - 1, 2 * math.log2(ranks))
        found[axis] = Messages(wire[axis], messages[axis], inside, speed, latency * rounds)
    return found


def together(ranks: int, stride: int, per_node: int) -> int:
    """How many ranks of an axis are in one machine, when neighbours on it are `stride` apart.

    >>> together(8, 1, 8), together(16, 1, 8), together(4, 4, 8), together(4, 8, 8)
    (8, 8, 2, 1)
    """
    return max(1, min(ranks, per_node // stride))


# Data files


@cache
def facts(program: str) -> Kernels:
    table = _table("kernels.toml")
    if program not in table:
        raise UsageError(f"kernels {program!r} are not known. Known: {', '.join(table)}.")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in table[program].items()
    }
    return Kernels(**values)


@cache
def efficiency(generation: str, program: str) -> Efficiency:
    table = _table("efficiency.toml")
    return Efficiency(
        **table["generations"][generation], **table["kernels"], **table["links"], **table["systems"][program]
    )


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
