"""How long one training step takes, in closed form.

A step is: matrix products, work that only moves bytes (norms, GELU, casts), the same again where it is recomputed,
messages that nobody computes during, waiting in the pipeline, and the update. Each is an amount of work, counted here,
over a speed:

    products     FLOPs / (peak of the device x share), where a product of [M, K] by [K, N] takes
                 1 + half x (1/M + 1/N + 1/K) times as long as a very large one
    bytes        bytes / (bandwidth x 0.85)
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
from gptworks.plan.sizes import flops_per_token

COMPUTE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
BANDWIDTH_REACHED = 0.85  # of a datasheet's bandwidth, by kernels that only move bytes
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
    logits: float
    parameter: float
    update: float
    fused_attention: bool
    tensor_sum: int
    gradient: int
    repeated_sums: int


@dataclass(frozen=True)
class Efficiency:
    """What was fitted, for one device generation and one program."""

    peak: float  # share of the peak that a very large product reaches
    half: float  # size at which a cube of a product would take (1 + 3) times its share
    inside: float  # share of the speed of links within a machine
    between: float
    elementwise: float  # bytes really moved / bytes counted
    overlap: float  # share of the time of the backward pass that gradients can travel in
    pipeline: float  # share of the sends between stages that nobody computes during


@dataclass(frozen=True)
class Work:
    """Amounts: FLOPs of products, the same times (1/M + 1/N + 1/K), and bytes."""

    flops: float = 0.0
    slowed: float = 0.0
    bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.slowed + other.slowed, self.bytes + other.bytes)

    def __mul__(self, times: float) -> "Work":
        return Work(self.flops * times, self.slowed * times, self.bytes * times)


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
    backward_share: float  # of a micro-batch's computation
    interleaved: int
    waiting: float  # of the bubble of 1f1b
    update: float  # bytes
    host_update: float  # bytes over the link to the machine's memory
    messages: dict[str, Messages]
    whole_step_overlaps: bool  # data-parallel messages of every micro-batch, not of the last alone


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
) -> Step:
    layout = Layout.known(parallel)
    virtual = parallel.virtual_stages
    forward, backward, again = _block(model, layout, batch, seq_len, facts, recompute, parallel.sequence)
    head = _head(model, layout, batch, seq_len, facts)
    in_block = _block_parameters(model, layout.tp)
    # FSDP casts what it gathers once; a replica casts for each micro-batch.
    per_parameter = facts.parameter
    layers = [len(each) for each in assign_layers(model.num_layers, layout.pp * virtual)]
    stages, numbers = [], []
    for rank in range(layout.pp):
        here = stages_of(rank, layout.pp, virtual, parallel.schedule) if layout.pp > 1 else [0]
        blocks = sum(layers[stage] for stage in here)
        has_first, has_last = rank == 0, rank == layout.pp - 1
        held = blocks * in_block
        held += model.vocab_size * model.hidden_size / layout.tp * (has_first or has_last)
        work = (forward + backward) * blocks + (head if has_last else Work()) + Work(bytes=held * per_parameter)
        stages.append((work, again * blocks))
        numbers.append(held)
    sharded = max(numbers) / (layout.fsdp if parallel.zero else 1)
    return Step(
        batch.accumulation,
        stages,
        backward.flops / (forward.flops + backward.flops),
        virtual,
        ZERO_BUBBLE if parallel.schedule == "zero_bubble" else 1.0,
        0.0 if parallel.offload else sharded * facts.update,
        sharded * 8 if parallel.offload else 0.0,
        _messages(model, parallel, layout, batch, seq_len, precision, recompute, device, link, facts),
        parallel.zero >= 2 and layout.fsdp > 1,
    )


def seconds(step: Step, rates: Efficiency, device: Device, compute: str) -> StepTime:
    peak, bandwidth = device.peak[compute] * rates.peak, device.bandwidth * BANDWIDTH_REACHED

    def of(work: Work) -> float:
        products = (work.flops + rates.half * work.slowed) / peak
        return products + work.bytes * rates.elementwise / bandwidth

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
    tensor, pipeline = taking("tp"), taking("pp") * rates.pipeline
    all_ranks = sum(map(sum, times)) + len(times) * (tensor + pipeline) / m
    waiting = all_ranks - sum(times[busiest]) - (tensor + pipeline) / m
    bubble = waiting / step.interleaved * step.waiting
    # Gradients travel while the backward pass computes: that of the last micro-batch, or of all of them.
    window = compute_time * step.backward_share * rates.overlap / (1 if step.whole_step_overlaps else m)
    exposed, hidden = {"tp": tensor, "pp": pipeline}, {"pp": taking("pp") - pipeline}
    for axis in ("fsdp", "dp"):
        whole = taking(axis)
        hidden[axis] = min(whole, window)
        exposed[axis] = whole - hidden[axis]
        window -= hidden[axis]
    optimizer = step.update / bandwidth + step.host_update / device.host
    return StepTime(
        compute_time,
        recompute_time,
        bubble,
        optimizer,
        {axis: exposed[axis] for axis in ("pp", "dp", "fsdp", "tp") if axis in step.messages},
        {axis: time for axis, time in hidden.items() if axis in step.messages},
    )


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
        around = scores * (facts.scores[way] + facts.dropped_scores[way] * (model.dropout_attention > 0))
        passes.append((moved, around))
    forward = linear_attention + feed_forward + attention + Work(bytes=sum(passes[0]))
    backward = (linear_attention + feed_forward) * 2 + attention * (2.5 if fused else 2) + Work(bytes=sum(passes[1]))
    again = {
        "none": Work(),
        "full": forward,
        "full_attn": linear_attention + attention + Work(bytes=passes[0][1] + passes[0][0] / 2),
        "core_attn": attention + Work(bytes=passes[0][1]),
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
    last = Layout(layout.pp - 1, 0, 0, 0)
    terms = per_step(model, parallel, batch, seq_len, place=last, compute_bytes=compute, reduce_bytes=gradient)
    wire = dict.fromkeys(vars(layout), 0.0)
    for term in terms:
        size = float(on_the_wire(term.kind, term.bytes, getattr(layout, term.axis)))
        if term.axis == "tp" and term.kind == "all_reduce":
            size *= facts.tensor_sum / max(compute, 4)
        wire[term.axis] += size
    blocks = math.ceil(model.num_layers / layout.pp)
    m = batch.accumulation
    # Per block 4 sums; along the sequence 10 halves of one. Recomputation says those of the forward pass again.
    messages = {"pp": 2 * m * parallel.virtual_stages, "dp": blocks, "fsdp": 2 * blocks, "tp": 4 * blocks * m}
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
        speed = link.inside if inside else min(link.inside, link.between * here)
        latency = link.inside_latency if inside else link.between_latency
        rounds = 1 if axis == "pp" else 2 * math.log2(ranks)
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
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in table[program].items()}
    return Kernels(**values)


@cache
def efficiency(generation: str, program: str) -> Efficiency:
    table = _table("efficiency.toml")
    return Efficiency(**table["generations"][generation], **table["links"], **table["systems"][program])


@cache
def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
