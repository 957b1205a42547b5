"""The most bytes that a training step holds on each pipeline rank, in closed form.

It follows what our own code does: the passes through a block come from plan/activations.py, the order of the passes
from the schedule, and each moment at which much is there is looked at; the largest is the peak. Tensors only: what an
allocator wastes, a CUDA context or the Python process itself needs is not in it. Never imports torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from gptworks.plan import activations
from gptworks.plan.activations import FP32, NOTHING, Bytes, Loss, Passes, Shape
from gptworks.plan.communication import Parameter, Stage, _padded, stages_here

COMPUTE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class RankMemory:
    """Of one pipeline rank, the fullest of its tp, dp and fsdp ranks. Bytes at the moment of the peak."""

    pp_rank: int
    layers: int
    parameters: int  # fp32, or this rank's shard of them
    gradients: int
    optimizer: int  # Adam's two moments
    activations: int  # kept for the backward pass, of all micro-batches in flight
    temporaries: int  # what is being computed: logits, casts, gradients on their way
    communication: int  # what FSDP has gathered, what a pipeline or tensor-parallel ranks exchange
    moment: str  # forward, loss, backward or update
    in_flight: int  # micro-batches whose activations are there, the most at any time

    @property
    def peak(self) -> int:
        return (
            self.parameters + self.gradients + self.optimizer + self.activations + self.temporaries + self.communication
        )


def memory(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    precision: PrecisionConfig,
    recompute: str = "none",
    compiled: bool = False,
    kernels: str = "cpu",
) -> list[RankMemory]:
    """One for each pipeline rank. `kernels`: cpu or cuda, which keep different things for dropout and attention."""
    layout = Layout.known(parallel)
    shape = _shape(model, parallel, layout, batch, seq_len, precision, recompute, compiled, kernels)
    return [_rank(model, parallel, layout, batch, shape, precision, pp_rank) for pp_rank in range(layout.pp)]


def _shape(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    seq_len: int,
    precision: PrecisionConfig,
    recompute: str,
    compiled: bool,
    kernels: str,
) -> Shape:
    cpu = kernels == "cpu"
    attention = "fused"
    if model.attention == "math":
        attention = "math"
    elif model.dropout_attention and cpu:
        attention = "sdpa_math"
    return Shape(
        rows=batch.micro_size,
        length=seq_len,
        hidden=model.hidden_size,
        ffn=model.ffn_size // layout.tp,
        heads=model.num_heads // layout.tp,
        tp=layout.tp,
        split=layout.tp > 1 and parallel.sequence,
        compute=COMPUTE_BYTES[precision.compute],
        attention=attention,
        gelu=model.gelu,
        dropout=model.dropout_hidden > 0,
        dropout_attention=model.dropout_attention > 0,
        cpu=cpu,
        recompute=recompute,
        casts=layout.fsdp == 1 or parallel.zero == 0,
        compiled=compiled,
    )


@dataclass(frozen=True)
class _Sizes:
    """Of one stage of the rank, in bytes."""

    blocks: int  # how many
    block_gradient: int  # fp32, whole; of one
    around_gradient: int
    table: int  # the largest parameter around the blocks: word embedding or head
    gathered_block: int  # in the type of computation
    gathered_around: int
    shard: int  # fp32, of the whole stage


class _Moments:
    def __init__(self) -> None:
        self.name, self.most = "update", NOTHING

    def see(self, name: str, held: Bytes) -> None:
        if held.total > self.most.total:
            self.name, self.most = name, held


def _rank(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    shape: Shape,
    precision: PrecisionConfig,
    pp_rank: int,
) -> RankMemory:
    stages = stages_here(model, parallel, Layout(pp_rank, 0, 0, 0))
    zero = parallel.zero if layout.fsdp > 1 else 0
    sizes = [_sizes(stage, shape, layout.fsdp if zero else 1) for stage in stages]
    parameters = sum(one.shard for one in sizes)
    moments = _Moments()
    in_flight = _walk(model, parallel, layout, batch, shape, precision, stages, sizes, zero, pp_rank, moments)
    most = moments.most
    offloaded = parallel.offload and zero > 0 and not shape.cpu
    return RankMemory(
        pp_rank,
        sum(len(stage.blocks) for stage in stages),
        0 if offloaded else parameters,
        most.gradients,
        0 if offloaded else 2 * parameters,
        most.activations,
        most.temporaries,
        most.communication,
        moments.name,
        in_flight,
    )


def _sizes(stage: Stage, shape: Shape, shards: int) -> _Sizes:
    def whole(group: list[Parameter]) -> int:
        return sum(_padded(parameter, shards) for parameter in group)

    block = stage.blocks[0] if stage.blocks else []
    table = max((parameter.size for parameter in stage.around), default=0)
    return _Sizes(
        len(stage.blocks),
        whole(block) * FP32,
        whole(stage.around) * FP32,
        table * FP32,
        whole(block) * shape.compute,
        whole(stage.around) * FP32,
        (sum(whole(block) for block in stage.blocks) + whole(stage.around)) // shards * FP32,
    )


def _walk(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    shape: Shape,
    precision: PrecisionConfig,
    stages: list[Stage],
    sizes: list[_Sizes],
    zero: int,
    pp_rank: int,
    moments: _Moments,
) -> int:
    """All passes of a step in their order. Returns the most micro-batches in flight."""
    passes = activations.block(shape)
    stage_of = {stage.number: at for at, stage in enumerate(stages)}
    reduce_bytes = FP32 if precision.reduce == "fp32" else shape.compute
    edges = shape.stream if layout.pp > 1 else 0  # the stage's own record of what came in and went out
    losses = [_loss(model, stage, shape, layout) for stage in stages]
    kept = [_kept(stage, passes, loss, edges, shape) for stage, loss in zip(stages, losses, strict=True)]
    flying = [0] * len(stages)
    has_gradients = [False] * len(stages)
    # Later micro-batches repeat what some have shown.
    several = min(batch.accumulation, 4 * layout.pp * max(1, len(stages)))
    several = max(layout.pp, several // layout.pp * layout.pp) if layout.pp > 1 else min(batch.accumulation, 3)
    if parallel.schedule == "gpipe" and layout.pp > 1:
        several = batch.accumulation
    most_flying = 0

    def resting() -> Bytes:
        held = NOTHING
        for at, one in enumerate(sizes):
            held += flying[at] * kept[at]
            if has_gradients[at]:
                held += Bytes(gradients=one.shard)
                if zero == 1:
                    held += Bytes(communication=(one.block_gradient * one.blocks + one.around_gradient))
            if zero in {1, 2}:
                held += Bytes(communication=one.blocks * one.gathered_block + one.gathered_around)
            elif zero == 3:
                held += Bytes(communication=one.gathered_around)
        return held

    for kind, number in order(parallel.schedule if layout.pp > 1 else "", layout.pp, len(stages), pp_rank, several):
        at = stage_of[number]
        stage, size, loss = stages[at], sizes[at], losses[at]
        if kind == "F":
            held = resting()
            lower = (size.blocks - 1) * passes.kept + Bytes(activations=edges)
            gathering = Bytes(communication=(2 if zero == 3 else 1) * size.gathered_block if zero else 0)
            if size.blocks:
                moments.see("forward", held + lower + passes.forward + gathering)
            if loss is not None:
                gathering = Bytes(communication=size.gathered_block if zero else 0)
                moments.see("loss", held + size.blocks * passes.kept + loss.forward + gathering)
            flying[at] += 1
            most_flying = max(most_flying, sum(flying))
        elif kind in {"B", "I"}:
            fresh = not has_gradients[at]
            held = resting() - kept[at]
            head = Bytes(temporaries=size.table if loss is not None else 0)
            incoming = Bytes(communication=0 if loss is not None or layout.pp == 1 else shape.stream)
            backward = passes.backward if fresh or zero else passes.backward_again
            if zero:
                rs = size.block_gradient // FP32 * reduce_bytes
                backward += Bytes(communication=rs + (2 if zero == 3 else 0) * size.gathered_block)
            grown = Bytes(gradients=0 if not fresh else size.block_gradient // (layout.fsdp if zero else 1))
            for block in {0, size.blocks - 1} if size.blocks else set():
                below = block * passes.kept + Bytes(activations=2 * edges) + (size.blocks - 1 - block) * grown
                moments.see("backward", held + below + backward + head + incoming)
            if stage.is_first:
                grown_all = size.blocks * grown
                ends = Bytes(temporaries=size.table + 2 * shape.own_tokens * shape.hidden * FP32)
                moments.see("backward", held + grown_all + head + ends)
            if kind == "B" or stage.is_last:
                flying[at] -= 1
            has_gradients[at] = True
        elif kind == "W" and not stage.is_last:
            held = resting()
            moments.see("backward", held + Bytes(temporaries=max(shape.matrices().values()) * FP32))
            flying[at] -= 1
    gradients = Bytes(gradients=sum(one.shard for one in sizes))
    moments.see("update", gradients + Bytes(temporaries=_update(model, parallel, layout, stages, sizes, zero)))
    return most_flying


def _update(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    stages: list[Stage],
    sizes: list[_Sizes],
    zero: int,
) -> int:
    """The other end's gradient of a tied embedding."""
    if layout.pp > 1 and model.tied and any(stage.is_first or stage.is_last for stage in stages):
        return max(one.table for one in sizes) // (layout.fsdp if zero else 1)
    return 0


def _loss(model: ModelConfig, stage: Stage, shape: Shape, layout: Layout) -> Loss | None:
    if not stage.is_last:
        return None
    return activations.loss(shape, -(-model.vocab_size // layout.tp))


def _kept(stage: Stage, passes: Passes, loss: Loss | None, edges: int, shape: Shape) -> Bytes:
    kept = len(stage.blocks) * passes.kept
    if loss is not None:
        return kept + loss.kept
    return kept + Bytes(activations=edges * (2 if shape.narrow and not stage.is_first else 1))


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
