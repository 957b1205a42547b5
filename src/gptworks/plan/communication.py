"""What the processes of a layout send each other in one training step, in closed form.

The one place where these formulas are written; benchmarks and tests compare them with what is counted while a step runs
(parallel/comm_counter.py). A term is what one rank hands to one kind of message along one axis of the layout. Its bytes
are those of the whole tensor that the message is about:

    all_reduce       the tensor that is summed
    all_gather       what every rank has afterwards
    reduce_scatter   what every rank brings
    all_to_all       what every rank brings
    send             what leaves; receiving is the sender's term

What then passes a rank's network card is `on_the_wire`.

Not in them: recomputation (train.recompute repeats the forward messages of tensor parallelism), evaluation, saving, the
first step of a pipeline, in which the stages tell each other their shapes.

Parameters around the blocks travel in fp32; sums over tp are taken in fp32 at least.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from gptworks.config.derive import Layout
from gptworks.config.stages import stages_of
from gptworks.plan.rank_parameters import Stage, padded, shard_size, stages_here
from gptworks.plan.sizes import FP32, columns_and_rows
from gptworks.plan.workload import LayoutChoice, Workload

MASTER = FP32  # bytes of a parameter: they are kept in fp32


@dataclass(frozen=True)
class Term:
    axis: str  # pp, dp, fsdp or tp
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all or send
    bytes: int
    payload: str
    is_hidden: bool = False  # hidden states or their gradients, from one stage to another


def per_step(
    workload: Workload, choice: LayoutChoice, coords: Layout | None = None, *, gradient_bytes: int | None = None
) -> list[Term]:
    """All that one rank says in a step. `coords`: of the rank, from 0; stages and uneven cuts make ranks differ.
    `gradient_bytes`: of a number of a gradient on its way, where a program does not do as precision.reduce says."""
    coords = coords or Layout(0, 0, 0, 0)
    stages = stages_here(workload.model, choice.parallel, coords)
    terms = [*_counts(choice.layout)]
    for stage in stages:
        terms += _data(workload, choice, stage, gradient_bytes or workload.reduce_bytes)
        if choice.layout.tp > 1:
            terms += _tensor(workload, choice, stage, coords)
    if choice.layout.pp > 1:
        terms += _pipeline(workload, choice, stages, coords)
    return [term for term in terms if term.bytes]


def totals(terms: list[Term]) -> dict[tuple[str, str], int]:
    """Bytes by axis and kind."""
    sums: dict[tuple[str, str], int] = {}
    for term in terms:
        sums[term.axis, term.kind] = sums.get((term.axis, term.kind), 0) + term.bytes
    return sums


def on_the_wire(kind: str, size: int, ranks: int) -> Fraction:
    """What a rank really sends of a message of so many bytes, when each piece takes the shortest way (a ring)."""
    others = Fraction(ranks - 1, ranks)
    return size * {"all_reduce": 2 * others, "send": Fraction(1)}.get(kind, others)


# What is asked of all ranks


def _counts(layout: Layout) -> Iterator[Term]:
    """Scored tokens (one number of 8 bytes); then loss, squared gradient norm, and how many ranks received each of four
    signals to stop (six). So every rank knows all of them, and divides by the same."""
    for axis in ("dp", "fsdp"):
        if getattr(layout, axis) > 1:
            yield Term(axis, "all_reduce", 8, "number of scored tokens")
    for axis, size in vars(layout).items():
        if size > 1:
            yield Term(axis, "all_reduce", 48, "loss, gradient norm and signals to stop")


# dp and fsdp


def _data(workload: Workload, choice: LayoutChoice, stage: Stage, gradient_bytes: int) -> Iterator[Term]:
    layout, zero = choice.layout, choice.zero
    micro_batches = choice.batch.accumulation
    if zero == 0:
        size = sum(parameter.size for parameter in stage.parameters) * gradient_bytes
        for axis in ("dp", "fsdp"):
            if getattr(layout, axis) > 1:
                yield Term(axis, "all_reduce", size, "gradients")
        return
    # Shards are equal: what does not divide is padded, along the first dim.
    of_blocks = sum(padded(parameter, layout.fsdp) for block in stage.blocks for parameter in block)
    around = sum(padded(parameter, layout.fsdp) for parameter in stage.around)
    gathered = micro_batches if zero == 3 else 1
    # At stage 3 a block is gathered for each of its two passes; what is around the blocks is kept between them.
    passes = 2 if zero == 3 else 1
    yield Term("fsdp", "all_gather", gathered * passes * of_blocks * workload.compute_bytes, "parameters of the blocks")
    yield Term("fsdp", "all_gather", gathered * around * MASTER, "parameters around the blocks")
    scattered = 1 if zero == 1 else micro_batches
    yield Term("fsdp", "reduce_scatter", scattered * (of_blocks + around) * gradient_bytes, "gradients")
    if layout.dp > 1:
        shard = (of_blocks + around) // layout.fsdp
        yield Term("dp", "all_reduce", shard * gradient_bytes, "gradients of the shard")


# tp


def _tensor(workload: Workload, choice: LayoutChoice, stage: Stage, coords: Layout) -> Iterator[Term]:
    compute_bytes = workload.compute_bytes
    tokens = choice.batch.accumulation * choice.batch.micro_size * workload.seq_len
    stream = tokens * workload.model.hidden_size  # A x B x T x D numbers
    wide = max(compute_bytes, 4)
    if stage.is_last:
        yield Term("tp", "all_reduce", 3 * tokens * wide, "maximum, sum and target of the softmax")
    blocks = len(stage.blocks)
    columns, rows = columns_and_rows(workload.model)
    if not choice.parallel.sequence:
        # A sum behind each matrix into the stream, one of gradients before each that takes it.
        yield Term("tp", "all_reduce", (rows + columns) * blocks * stream * wide, "what lies between the matrices")
        of_heads = [parameter for parameter in stage.parameters if parameter.role.sees_own_heads]
        if of_heads:
            size = sum(shard_size(parameter, choice, coords) for parameter in of_heads)
            yield Term("tp", "all_reduce", size * 4, "gradients of the norms of heads")
        if stage.is_first:
            yield Term("tp", "all_reduce", stream * MASTER, "word embeddings")
        if stage.is_last:
            yield Term("tp", "all_reduce", stream * wide, "gradient of the head's input")
        return
    # A sum in a narrow type is sent as it is and added up in fp32 where it arrives.
    scatter = "reduce_scatter" if compute_bytes >= 4 else "all_to_all"
    # Before each that takes the stream: forward, again for the weight's gradient; behind the others: the gradient of
    # the sum.
    gathers = 2 * columns + rows
    yield Term("tp", "all_gather", gathers * blocks * stream * compute_bytes, "what lies between the matrices")
    yield Term("tp", scatter, (rows + columns) * blocks * stream * compute_bytes, "what lies between the matrices")
    if _goes_back_twice(stage, choice):
        # The first matrix of a pair gathers its input and sums its gradient as one: for the input, and for the weight.
        again = columns * blocks * stream * compute_bytes
        yield Term("tp", "all_gather", again, "the second turn of the backward pass")
        yield Term("tp", scatter, again, "the second turn of the backward pass")
    if stage.is_first:
        yield Term("tp", "reduce_scatter", stream * MASTER, "word embeddings")
        yield Term("tp", "all_gather", stream * MASTER, "gradient of the word embeddings")
    if stage.is_last:
        yield Term("tp", "all_gather", stream * compute_bytes, "the head's input")
        yield Term("tp", scatter, stream * compute_bytes, "gradient of the head's input")
    whole = [parameter for parameter in stage.parameters if parameter.role.tp_dim is None]
    size = sum(shard_size(parameter, choice, coords) for parameter in whole)
    yield Term("tp", "all_reduce", size * 4, "gradients of norms, biases and positions")


def _goes_back_twice(stage: Stage, choice: LayoutChoice) -> bool:
    """Zero bubble: first for the gradients of inputs, later for those of weights. The first stage has no input that
    learns; the last takes all in one turn, as do all at zero 3."""
    in_one = stage.is_first or stage.is_last or choice.zero == 3
    return choice.layout.pp > 1 and choice.parallel.schedule == "zero_bubble" and not in_one


# pp


def _pipeline(workload: Workload, choice: LayoutChoice, stages: list[Stage], coords: Layout) -> Iterator[Term]:
    layout, parallel, batch = choice.layout, choice.parallel, choice.batch
    rank_of = {
        number: rank
        for rank in range(layout.pp)
        for number in stages_of(rank, layout.pp, parallel.virtual_stages, parallel.schedule)
    }
    length = workload.seq_len // (layout.tp if choice.splits_sequence else 1)
    tokens = batch.accumulation * batch.micro_size * length
    hidden = tokens * workload.model.hidden_size * workload.compute_bytes
    for stage in stages:
        if not stage.is_last and rank_of[stage.number + 1] != coords.pp:
            yield Term("pp", "send", hidden, "hidden states", is_hidden=True)
        if not stage.is_first and rank_of[stage.number - 1] != coords.pp:
            yield Term("pp", "send", hidden, "gradients of hidden states", is_hidden=True)
        ends_meet = rank_of[0] == rank_of[max(rank_of)]
        if workload.model.tied and (stage.is_first or stage.is_last) and not ends_meet:
            table = stage.of("vocabulary")[0]
            size = shard_size(table, choice, coords)
            yield Term("pp", "send", size * MASTER, "gradient of the tied embedding")
