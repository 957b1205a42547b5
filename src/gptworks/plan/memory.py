"""The most bytes that a training step holds on each pipeline rank, in closed form.

It follows what our own code does: the passes through a block come from plan/activations.py, the order of the passes
from the schedule, and each moment at which much is there is looked at; the largest is the peak. Tensors only: what an
allocator wastes, a CUDA context or the Python process itself needs is not in it. Never imports torch.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import ge, mul

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.plan import activations
from gptworks.plan.activations import FP32, NOTHING, Bytes, Loss, Shape
from gptworks.plan.communication import Parameter, Stage, padded, stages_here
from gptworks.plan.sizes import COMPUTE_BYTES


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
    kernels: str = "cpu",
) -> list[RankMemory]:
    """One for each pipeline rank. `kernels`: cpu or cuda, which keep different things for dropout and attention."""
    layout = Layout.known(parallel)
    shape = _shape(model, parallel, layout, batch, seq_len, precision, recompute, kernels)
    return [_rank(model, parallel, layout, batch, shape, precision, pp_rank) for pp_rank in range(layout.pp)]


def largest(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    precision: PrecisionConfig,
    recompute: str = "none",
    kernels: str = "cpu",
) -> int:
    """The largest peak of all ranks, for a search over many layouts: of pipeline ranks that hold alike the first has
    the most micro-batches in flight, so that the others need not be looked at."""
    layout = Layout.known(parallel)
    shape = _shape(model, parallel, layout, batch, seq_len, precision, recompute, kernels)
    ranks = _unlike(model.num_layers, layout.pp, parallel.virtual_stages, parallel.schedule)
    return max(_rank(model, parallel, layout, batch, shape, precision, rank).peak for rank in ranks)


def states(model: ModelConfig, parallel: ParallelConfig, *, cuda: bool) -> int:
    """Bytes of weights, gradients and Adam's moments on the fullest rank when it updates them, and of nothing else."""
    layout = Layout.known(parallel)
    zero = parallel.zero if layout.fsdp > 1 else 0
    numbers = max(
        sum(sizes.here for _, sizes in _held(model, parallel, rank, layout.fsdp if zero else 1, FP32, FP32))
        for rank in _unlike(model.num_layers, layout.pp, parallel.virtual_stages, parallel.schedule)
    )
    return numbers if parallel.offload and zero and cuda else 4 * numbers


@lru_cache(maxsize=1 << 12)
def _unlike(num_layers: int, pp: int, virtual: int, schedule: str) -> list[int]:
    """The first pipeline rank of each kind; all of them where late ranks wait with the gradients of weights."""
    if pp == 1 or schedule == "zero_bubble":
        return list(range(pp))
    layers = assign_layers(num_layers, pp * virtual)
    kinds = [
        (rank == 0, rank == pp - 1, *(len(layers[stage]) for stage in stages_of(rank, pp, virtual, schedule)))
        for rank in range(pp)
    ]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _shape(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    seq_len: int,
    precision: PrecisionConfig,
    recompute: str,
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
    )


class _Moments:
    """The fullest that was seen."""

    def __init__(self) -> None:
        self.name, self.most = "update", NOTHING

    def see(self, name: str, held: Bytes) -> None:
        if held.total > self.most.total:
            self.name, self.most = name, held


@dataclass(frozen=True)
class _Sizes:
    """Of one stage of the rank, in bytes. Shards are padded, as FSDP pads them."""

    blocks: int  # how many
    block: int  # fp32, of one
    around: int  # fp32, of all that is not in a block
    table: int  # fp32, word embedding or head; the larger where both are here
    positions: int
    block_here: int  # fp32, what this rank updates of a block
    around_here: int
    gathered_block: int  # in the type of computation
    reduced_block: int  # in the type of reduction
    reduced_around: int

    @classmethod
    def of(cls, stage: Stage, shards: int, compute: int, reduce: int) -> "_Sizes":
        def numbers(group: list[Parameter]) -> int:
            return sum(padded(parameter, shards) for parameter in group)

        block, around = numbers(stage.blocks[0]), numbers(stage.around)
        tables = [parameter.size for parameter in stage.around if parameter.name in {"wte.weight", "head.weight"}]
        positions = [parameter.size for parameter in stage.around if parameter.name == "wpe.weight"]
        return cls(
            len(stage.blocks),
            block * FP32,
            around * FP32,
            max(tables, default=0) * FP32,
            sum(positions) * FP32,
            block // shards * FP32,
            around // shards * FP32,
            block * compute,
            block * reduce,
            around * reduce,
        )

    @property
    def here(self) -> int:
        return self.blocks * self.block_here + self.around_here


def _rank(
    model: ModelConfig,
    parallel: ParallelConfig,
    layout: Layout,
    batch: BatchPlan,
    shape: Shape,
    precision: PrecisionConfig,
    pp_rank: int,
) -> RankMemory:
    zero = parallel.zero if layout.fsdp > 1 else 0
    shards = layout.fsdp if zero else 1
    reduce = FP32 if precision.reduce == "fp32" else shape.compute
    stages = [
        _StageMemory(model, layout, shape, stage, sizes, zero)
        for stage, sizes in _held(model, parallel, pp_rank, shards, shape.compute, reduce)
    ]
    moments = _Moments()
    in_flight = _walk(parallel, layout, batch.accumulation, stages, pp_rank, moments)
    moments.see("update", _update(model, layout, stages, reduce))
    tokens = 2 * 8 * shape.tokens * batch.accumulation  # and labels, int64, of all micro-batches of the step
    parameters = sum(stage.sizes.here for stage in stages)
    most = moments.most
    offloaded = parallel.offload and zero > 0 and not shape.cpu
    return RankMemory(
        pp_rank,
        sum(stage.sizes.blocks for stage in stages),
        0 if offloaded else parameters,
        most.gradients,
        0 if offloaded else 2 * parameters,
        most.activations,
        most.temporaries + tokens,
        most.communication,
        moments.name,
        in_flight,
    )


@lru_cache(maxsize=1 << 14)
def _held(
    model: ModelConfig, parallel: ParallelConfig, pp_rank: int, shards: int, compute: int, reduce: int
) -> list[tuple[Stage, _Sizes]]:
    stages = stages_here(model, parallel, Layout(pp_rank, 0, 0, 0))
    return [(stage, _Sizes.of(stage, shards, compute, reduce)) for stage in stages]


class _StageMemory:
    """One stage of the rank while a step runs."""

    def __init__(
        self, model: ModelConfig, layout: Layout, shape: Shape, stage: Stage, sizes: _Sizes, zero: int
    ) -> None:
        self.stage, self.sizes, self.shape, self.zero = stage, sizes, shape, zero
        self.number = stage.number
        self.passes = activations.block(shape)
        self.loss: Loss | None = None
        if stage.is_last:
            self.loss = activations.loss(shape, -(-model.vocab_size // layout.tp))
        # Head and word embedding in one place are one parameter, whose two gradients wait for each other.
        self.waits = model.tied and stage.is_first and stage.is_last
        self.in_pipeline = layout.pp > 1
        # A pipeline stage keeps a record of what came in and what went out; the first is often kept anyway.
        self.came = shape.stream if self.in_pipeline and not stage.is_first and shape.narrow else 0
        self.went = shape.stream if self.in_pipeline and not stage.is_last else 0
        embed_mask = 0
        if stage.is_first and model.dropout_embed > 0:
            embed_mask = shape.stream if shape.cpu else shape.own_tokens * shape.hidden
        self.edges = Bytes(activations=self.came + self.went + embed_mask)
        self.kept = sizes.blocks * self.passes.kept + self.edges
        if self.loss is not None:
            self.kept += self.loss.kept
        self.flying = 0
        self.waiting_for_weights = 0  # zero bubble: gradients of inputs are done
        self.backwards = 0  # so many are done
        self.gathered = False  # parameters, with zero 1 and 2
        self.sent = 0  # bytes of hidden states and gradients that a schedule holds until its end

    # What is there between passes

    @property
    def resting(self) -> Bytes:
        held = self.flying * self.kept
        if self.waiting_for_weights:
            held += self.waiting_for_weights * self.between
        # FSDP lets go of what it has sent when it sends the next.
        buffer = self.sizes.reduced_around if self.zero > 1 and self.backwards else 0
        return held + self._gradients() + self._gathered() + Bytes(communication=self.sent + buffer)

    def set(self, schedule: str, state: tuple[int, ...], before: int = 0) -> None:
        """As a pass finds it (see _passes). `before`: micro-batches that were left out, since they repeat others."""
        self.flying, self.waiting_for_weights, self.backwards, gathered, sends = state
        self.gathered = gathered > 0
        self.sent = 0
        if sends + before:
            self.sends(schedule)
            self.sent *= 1 if schedule == "1f1b" else sends + before

    def amounts(self, schedule: str) -> tuple[int, ...]:
        """Bytes of a micro-batch in flight, of one that waits for the gradients of weights, of gradients, of what is
        gathered, and of what has been sent."""
        found = [self.kept.total, self.between.total]
        for number in (2, 3, 4):
            self.set(schedule, tuple(int(at == number) for at in range(5)))
            found.append(self.resting.total)
        return tuple(found)

    def sends(self, schedule: str) -> None:
        """After a backward pass. 1f1b remembers the last gradient it sent; the schedules of several stages remember
        all they have sent, the hidden states too."""
        stream = self.shape.stream
        if schedule == "1f1b":
            self.sent = 0 if self.stage.is_first else stream
        elif schedule in {"interleaved", "zero_bubble"}:
            self.sent += (0 if self.stage.is_first else stream) + (0 if self.stage.is_last else stream)

    @property
    def between(self) -> Bytes:
        """Zero bubble: what the gradients of inputs leave for those of weights, beside what was kept before."""
        if self.stage.is_first:
            return Bytes(activations=self.shape.stream)
        s = self.shape
        return Bytes(activations=self.sizes.blocks * (s.inner + 3 * s.in_heads + 4 * s.stream))

    def _gradients(self) -> Bytes:
        if not self.backwards:
            return NOTHING
        if self.zero == 1:  # whole until the last micro-batch is done
            return Bytes(gradients=self.sizes.blocks * self.sizes.reduced_block + self.sizes.reduced_around)
        return Bytes(gradients=self.sizes.here)

    def _gathered(self) -> Bytes:
        if self.zero in {1, 2} and self.gathered:
            return Bytes(communication=self.sizes.blocks * self.sizes.gathered_block + self.sizes.around)
        return NOTHING

    # Passes

    def forward(self, others: Bytes, moments: _Moments) -> None:
        size, passes, zero = self.sizes, self.passes, self.zero
        held = others + self.resting
        fresh = zero > 0 and not self.gathered
        top = size.blocks - 1
        if self.stage.is_first:
            looked_up = 2 * self.shape.own_tokens * self.shape.hidden * FP32
            moments.see("forward", held + Bytes(temporaries=looked_up, communication=2 * size.around if fresh else 0))
        lower = held + top * passes.kept + self.edges
        moments.see("forward", lower + passes.forward + self._for_forward(fresh))
        if self.loss is not None:
            gathered = Bytes(communication=size.around + size.gathered_block * (1 if zero == 3 else size.blocks + 1))
            held += size.blocks * passes.kept + self.edges
            moments.see("loss", held + self.loss.forward + (gathered if fresh else NOTHING))
        self.flying += 1
        self.gathered = zero in {1, 2}

    def _for_forward(self, fresh: bool) -> Bytes:
        """What FSDP has beside what rests, at the last block: it, and the buffer it came in."""
        if not fresh:
            return NOTHING
        blocks = 1 if self.zero == 3 else self.sizes.blocks
        return Bytes(communication=self.sizes.around + (blocks + 1) * self.sizes.gathered_block)

    def backward(self, others: Bytes, moments: _Moments, is_last: bool, sync: bool) -> None:
        """`sync`: FSDP reduces the gradients now."""
        size, passes, zero, shape = self.sizes, self.passes, self.zero, self.shape
        fresh = not self.backwards
        held = others + self.resting - self.kept - self._gathered()
        sums = 2 if shape.cpu else 1  # gloo reduces in a copy of its own
        last_buffer = size.reduced_around if zero > 1 and self.backwards else 0
        held -= Bytes(communication=last_buffer)
        resharding = zero and (zero == 3 or (is_last and not self.in_pipeline))
        if zero == 1 and sync and not fresh:
            held -= self._gradients()
        head = NOTHING
        if self.loss is not None and self.waits:
            head = Bytes(temporaries=size.table)
        elif self.loss is not None and (fresh or zero):
            head = Bytes(gradients=size.table)
        incoming = Bytes(communication=shape.stream if self.went else 0)
        through = passes.backward if fresh or zero else passes.backward_again
        for block in {0, min(1, size.blocks - 1), size.blocks - 1}:
            done = size.blocks - 1 - block
            grown = Bytes(gradients=done * size.block_here if fresh and (zero != 1 or sync) else 0)
            if zero == 1 and sync and not fresh:
                grown = Bytes(gradients=done * size.block_here, communication=(block + 1) * size.reduced_block)
                grown += Bytes(communication=size.reduced_around)
            elif zero == 1 and not sync and fresh:
                grown = Bytes(communication=done * size.reduced_block)
            gathered = 0
            if zero == 3:
                gathered = size.around + (2 if block else 1) * size.gathered_block
            elif zero:
                gathered = size.around + (block + 1 if resharding else size.blocks) * size.gathered_block
            buffer = 0
            if zero and sync:
                buffer = size.reduced_block if done else last_buffer
            below = held + block * passes.kept + self.edges + head + incoming + grown
            moments.see("backward", below + through + Bytes(communication=gathered + buffer))
            if zero and sync:  # the block is done: its gradients are copied together, summed and cut
                ready = Bytes(
                    temporaries=shape.stream,
                    gradients=size.block_here + (size.gathered_block if fresh or zero != 1 else 0),
                    communication=gathered - (size.gathered_block if resharding else 0) + sums * size.reduced_block,
                )
                moments.see("backward", below + ready)
        if zero:
            gathered = size.around if resharding else size.around + size.blocks * size.gathered_block
            held += Bytes(communication=gathered)
        everything = Bytes(gradients=size.blocks * size.block_here if fresh or (zero == 1 and sync) else 0)
        if zero == 1 and not sync and fresh:
            everything = Bytes(communication=size.blocks * size.reduced_block)
        if zero == 1 and sync and not fresh:
            everything += Bytes(communication=size.reduced_around)
        if self.stage.is_first:
            self._embeddings(held + everything + head, moments, fresh, bool(zero and sync))
        if zero and sync:
            freed = size.around if resharding else 0
            once = Bytes(gradients=size.around + size.around_here, communication=sums * size.reduced_around - freed)
            if zero == 1 and not fresh:
                once -= Bytes(gradients=size.around)
            moments.see("backward", held + everything + once)
        self.flying -= 1
        self.backwards += 1
        if resharding:
            self.gathered = False

    def _embeddings(self, held: Bytes, moments: _Moments, fresh: bool, sync: bool) -> None:
        """Their gradients come last."""
        size, shape = self.sizes, self.shape
        wide = shape.own_tokens * shape.hidden * FP32
        if shape.tp > 1:  # once more with the words of other ranks set to zero; with all tokens
            wide += shape.tokens * shape.hidden * FP32 * (3 if shape.split and shape.transposed else 2)
        buffer = size.reduced_block if sync else 0
        new = Bytes(temporaries=wide + size.table, gradients=size.positions, communication=buffer)
        moments.see("backward", held + new)
        if self.waits:
            moments.see("backward", held + Bytes(temporaries=2 * size.table, communication=buffer))

    def inputs(self, others: Bytes, moments: _Moments) -> None:
        """Zero bubble: the first half. Nothing is freed; the gradient at each matrix and norm is remembered."""
        shape, each = self.shape, self.between.activations // self.sizes.blocks
        widest = max(each + 2 * shape.stream, shape.stream + (2 if shape.narrow else 3) * shape.inner)
        held = others + self.resting + Bytes(activations=(self.sizes.blocks - 1) * each)
        moments.see("backward", held + Bytes(temporaries=widest, communication=shape.stream))

    def weights(self, others: Bytes, moments: _Moments) -> None:
        """Zero bubble: the second half of a backward pass."""
        through = self.passes.backward if not self.backwards else self.passes.backward_again
        beside = through - self.passes.kept
        held = others + self.resting
        moments.see(
            "backward", held + Bytes(temporaries=beside.total if self.stage.is_first else self.sizes.block // 3)
        )
        self.flying -= 1
        self.waiting_for_weights -= 1
        self.backwards += 1

    def reduce(self, others: Bytes, moments: _Moments) -> None:
        """zero 1 in a pipeline: after the last backward pass, one group after the other."""
        size = self.sizes
        if self.zero == 1:
            sums = 2 if self.shape.cpu else 1
            once = Bytes(gradients=size.around_here, communication=sums * size.reduced_around - size.around)
            moments.see("backward", others + self.resting + once)
        self.zero_done()

    def zero_done(self) -> None:
        self.gathered = False


def _walk(
    parallel: ParallelConfig,
    layout: Layout,
    micro_batches: int,
    stages: list[_StageMemory],
    pp_rank: int,
    moments: _Moments,
) -> int:
    """All passes of a step that can be the fullest. Returns the most micro-batches in flight."""
    schedule = parallel.schedule if layout.pp > 1 else ""
    enough = _enough(schedule, layout.pp, len(stages), micro_batches)
    found, most_flying = _passes(schedule, layout.pp, len(stages), pp_rank, enough, stages[0].zero)
    amounts = tuple(size for stage in stages for size in stage.amounts(schedule))
    # Passes of one kind through stages that are alike differ in what rests meanwhile, and in nothing else: the one that
    # finds most is looked at.
    fullest: dict[tuple[object, ...], tuple[int, str, int, bool, tuple[int, ...]]] = {}
    for (kind, at, is_last, *own), states in found:
        stage = stages[at]
        alike = (kind, is_last, *own, stage.stage.is_first, stage.stage.is_last, stage.sizes.blocks)
        for state in states:
            held = sum(map(mul, state, amounts))
            if alike not in fullest or held > fullest[alike][0]:
                fullest[alike] = held, kind, at, is_last, state
    for _, kind, at, is_last, state in fullest.values():
        for number, each in enumerate(stages):
            each.set(schedule, state[5 * number : 5 * number + 5], micro_batches - enough)
        stage, others = stages[at], NOTHING
        for other in stages:
            if other is not stage:
                others += other.resting
        if kind == "F":
            stage.forward(others, moments)
        elif kind == "I":
            if not stage.stage.is_first:
                stage.inputs(others, moments)
        elif kind == "B":
            sync = stage.zero > 1 or (stage.zero == 1 and is_last and not schedule)
            stage.backward(others, moments, is_last, sync)
        elif kind == "W":
            stage.weights(others, moments)
        else:
            stage.reduce(others, moments)
    return most_flying


_Passes = list[tuple[tuple[str, int, bool, int, int], list[tuple[int, ...]]]]


@lru_cache(maxsize=1 << 14)
def _passes(schedule: str, pp: int, virtual: int, rank: int, micro_batches: int, zero: int) -> tuple[_Passes, int]:
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
        found = seen.setdefault((kind, at, is_last, states[at][backwards], states[at][gathered]), {})
        found[tuple(value for state in states for value in state)] = None

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

    def exceeded(some: tuple[int, ...], found: Iterable[tuple[int, ...]]) -> bool:
        return any(other != some and all(map(ge, other, some)) for other in found)

    kinds = [(kind, [some for some in found if not exceeded(some, found)]) for kind, found in seen.items()]
    return kinds, most_flying


def _enough(schedule: str, pp: int, virtual: int, micro_batches: int) -> int:
    """Later micro-batches repeat what some have shown."""
    if not schedule:
        return min(micro_batches, 3)
    if schedule == "gpipe":
        return micro_batches
    return min(micro_batches, pp + 2 if schedule == "1f1b" else 4 * pp)


def _update(model: ModelConfig, layout: Layout, stages: list[_StageMemory], reduce: int) -> Bytes:
    """Gradients that meet, and Adam, which needs nothing more: its kernel is a fused one."""
    gradients = sum(stage.sizes.here for stage in stages)
    travelling = 0
    if layout.data_parallel > 1 and not stages[0].zero and reduce < FP32:
        travelling = gradients // FP32 * reduce
    ends = [stage for stage in stages if stage.stage.is_first != stage.stage.is_last]
    if layout.pp > 1 and model.tied and ends:  # the other end's gradient of the tied embedding
        shards = layout.fsdp if stages[0].zero else 1
        travelling = max(travelling, max(stage.sizes.table for stage in ends) // shards)
    return Bytes(gradients=gradients, communication=travelling)


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
