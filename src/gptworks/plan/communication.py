"""What the processes of a layout send each other in one training step, in closed form.

The one place where these formulas are written; benchmarks and tests compare them with what is counted while a step runs
(parallel/traffic.py). A term is what one rank hands to one kind of message along one axis of the layout. Its bytes are
those of the whole tensor that the message is about:

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
from math import ceil, prod

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.config.stages import assign_layers, stages_of

MASTER = 4  # bytes of a parameter: they are kept in fp32


@dataclass(frozen=True)
class Term:
    axis: str  # pp, dp, fsdp or tp
    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all or send
    bytes: int
    what: str


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model, or what tensor parallelism leaves of it on a rank."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None  # the dim that tensor parallelism cuts; None = whole on each rank

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Stage:
    """What a rank holds of one pipeline stage, before it is sharded: one group for each block, and one around them."""

    number: int
    blocks: list[list[Parameter]]
    around: list[Parameter]
    is_first: bool
    is_last: bool

    @property
    def groups(self) -> list[list[Parameter]]:
        return [group for group in [self.around, *self.blocks] if group]

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for group in self.groups for parameter in group]


def per_step(
    model: ModelConfig,
    parallel: ParallelConfig,
    batch: BatchPlan,
    seq_len: int,
    *,
    place: Layout | None = None,
    compute_bytes: int = 4,
    reduce_bytes: int = 4,
) -> list[Term]:
    """All that one rank says in a step. `place`: its coordinates, from 0; stages and uneven cuts make ranks differ."""
    layout = Layout.known(parallel)
    place = place or Layout(0, 0, 0, 0)
    stages = stages_here(model, parallel, place)
    terms = [*_counts(layout)]
    for stage in stages:
        terms += _data(stage, parallel, layout, batch.accumulation, compute_bytes, reduce_bytes)
        if layout.tp > 1:
            terms += _tensor(model, stage, parallel, layout, place, batch, seq_len, compute_bytes)
    if layout.pp > 1:
        terms += _pipeline(model, stages, parallel, layout, place, batch, seq_len, compute_bytes)
    return [term for term in terms if term.bytes]


def totals(terms: list[Term]) -> dict[tuple[str, str], int]:
    """Bytes by axis and kind."""
    found: dict[tuple[str, str], int] = {}
    for term in terms:
        found[term.axis, term.kind] = found.get((term.axis, term.kind), 0) + term.bytes
    return found


def on_the_wire(kind: str, size: int, ranks: int) -> Fraction:
    """What a rank really sends of a message of so many bytes, when each piece takes the shortest way (a ring)."""
    others = Fraction(ranks - 1, ranks)
    return size * {"all_reduce": 2 * others, "send": Fraction(1)}.get(kind, others)


def stages_here(model: ModelConfig, parallel: ParallelConfig, place: Layout) -> list[Stage]:
    layout = Layout.known(parallel)
    num_stages = layout.pp * parallel.virtual_stages
    numbers = stages_of(place.pp, layout.pp, parallel.virtual_stages, parallel.schedule) if layout.pp > 1 else [0]
    layers = assign_layers(model.num_layers, num_stages)
    block = [_here(p, layout.tp, place.tp) for p in _block(model)]  # all of them are alike
    return [
        Stage(
            number,
            [block for _ in layers[number]],
            [_here(p, layout.tp, place.tp) for p in _around(model, number == 0, number == num_stages - 1)],
            number == 0,
            number == num_stages - 1,
        )
        for number in numbers
    ]


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


def _data(
    stage: Stage, parallel: ParallelConfig, layout: Layout, micro_batches: int, compute_bytes: int, reduce_bytes: int
) -> Iterator[Term]:
    zero = parallel.zero if layout.fsdp > 1 else 0
    if zero == 0:
        size = sum(parameter.size for parameter in stage.parameters) * reduce_bytes
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
    yield Term("fsdp", "all_gather", gathered * passes * of_blocks * compute_bytes, "parameters of the blocks")
    yield Term("fsdp", "all_gather", gathered * around * MASTER, "parameters around the blocks")
    scattered = 1 if zero == 1 else micro_batches
    yield Term("fsdp", "reduce_scatter", scattered * (of_blocks + around) * reduce_bytes, "gradients")
    if layout.dp > 1:
        shard = (of_blocks + around) // layout.fsdp
        yield Term("dp", "all_reduce", shard * reduce_bytes, "gradients of the shard")


# tp


def _tensor(
    model: ModelConfig,
    stage: Stage,
    parallel: ParallelConfig,
    layout: Layout,
    place: Layout,
    batch: BatchPlan,
    seq_len: int,
    compute_bytes: int,
) -> Iterator[Term]:
    tokens = batch.accumulation * batch.micro_size * seq_len
    stream = tokens * model.hidden_size  # A x B x T x D numbers
    wide = max(compute_bytes, 4)
    if stage.is_last:
        yield Term("tp", "all_reduce", 3 * tokens * wide, "maximum, sum and target of the softmax")
    blocks = len(stage.blocks)
    if not parallel.sequence:
        # Two pairs of matrices a block: one sum behind each pair, one of gradients before it.
        yield Term("tp", "all_reduce", 4 * blocks * stream * wide, "what lies between the matrices")
        if stage.is_first:
            yield Term("tp", "all_reduce", stream * MASTER, "word embeddings")
        if stage.is_last:
            yield Term("tp", "all_reduce", stream * wide, "gradient of the head's input")
        return
    # A sum in a narrow type is sent as it is and added up in fp32 where it arrives.
    scatter = "reduce_scatter" if compute_bytes >= 4 else "all_to_all"
    # Before each pair: forward, again for the weight's gradient; behind it: the gradient of the sum.
    yield Term("tp", "all_gather", 6 * blocks * stream * compute_bytes, "what lies between the matrices")
    yield Term("tp", scatter, 4 * blocks * stream * compute_bytes, "what lies between the matrices")
    if _goes_back_twice(stage, parallel, layout):
        # The first matrix of a pair gathers its input and sums its gradient as one: for the input, and for the weight.
        yield Term("tp", "all_gather", 2 * blocks * stream * compute_bytes, "the second turn of the backward pass")
        yield Term("tp", scatter, 2 * blocks * stream * compute_bytes, "the second turn of the backward pass")
    if stage.is_first:
        yield Term("tp", "reduce_scatter", stream * MASTER, "word embeddings")
        yield Term("tp", "all_gather", stream * MASTER, "gradient of the word embeddings")
    if stage.is_last:
        yield Term("tp", "all_gather", stream * compute_bytes, "the head's input")
        yield Term("tp", scatter, stream * compute_bytes, "gradient of the head's input")
    whole = [parameter for parameter in stage.parameters if parameter.cut is None]
    size = sum(_shard_size(parameter, parallel, layout, place) for parameter in whole)
    yield Term("tp", "all_reduce", size * 4, "gradients of norms, biases and positions")


def _goes_back_twice(stage: Stage, parallel: ParallelConfig, layout: Layout) -> bool:
    """Zero bubble: first for the gradients of inputs, later for those of weights. The first stage has no input that
    learns; the last takes all in one turn, as do all at zero 3."""
    in_one = stage.is_first or stage.is_last or (parallel.zero == 3 and layout.fsdp > 1)
    return layout.pp > 1 and parallel.schedule == "zero_bubble" and not in_one


# pp


def _pipeline(
    model: ModelConfig,
    stages: list[Stage],
    parallel: ParallelConfig,
    layout: Layout,
    place: Layout,
    batch: BatchPlan,
    seq_len: int,
    compute_bytes: int,
) -> Iterator[Term]:
    rank_of = {
        number: rank
        for rank in range(layout.pp)
        for number in stages_of(rank, layout.pp, parallel.virtual_stages, parallel.schedule)
    }
    length = seq_len // layout.tp if layout.tp > 1 and parallel.sequence else seq_len
    hidden = batch.accumulation * batch.micro_size * length * model.hidden_size * compute_bytes
    for stage in stages:
        if not stage.is_last and rank_of[stage.number + 1] != place.pp:
            yield Term("pp", "send", hidden, "hidden states")
        if not stage.is_first and rank_of[stage.number - 1] != place.pp:
            yield Term("pp", "send", hidden, "gradients of hidden states")
        ends_meet = rank_of[0] == rank_of[max(rank_of)]
        if model.tied and (stage.is_first or stage.is_last) and not ends_meet:
            table = next(parameter for parameter in stage.around if parameter.name in {"wte.weight", "head.weight"})
            size = _shard_size(table, parallel, layout, place)
            yield Term("pp", "send", size * MASTER, "gradient of the tied embedding")


# Parameters


def _block(model: ModelConfig) -> list[Parameter]:
    h, f = model.hidden_size, model.ffn_size
    norms = [Parameter(f"{norm}.{kind}", (h,)) for norm in ("ln1", "ln2") for kind in ("weight", "bias")]
    return norms + [
        Parameter("attn.qkv.weight", (3 * h, h), cut=0),
        Parameter("attn.qkv.bias", (3 * h,), cut=0),
        Parameter("attn.out.weight", (h, h), cut=1),
        Parameter("attn.out.bias", (h,)),
        Parameter("mlp.up.weight", (f, h), cut=0),
        Parameter("mlp.up.bias", (f,), cut=0),
        Parameter("mlp.down.weight", (h, f), cut=1),
        Parameter("mlp.down.bias", (h,)),
    ]


def _around(model: ModelConfig, is_first: bool, is_last: bool) -> list[Parameter]:
    h, found = model.hidden_size, []
    if is_first:
        found += [Parameter("wte.weight", (model.vocab_size, h), cut=0)]
        found += [Parameter("wpe.weight", (model.max_positions, h))]
    if is_last:
        found += [Parameter("ln_f.weight", (h,)), Parameter("ln_f.bias", (h,))]
        if not (model.tied and is_first):
            found += [Parameter("head.weight", (model.vocab_size, h), cut=0)]
    return found


def _here(parameter: Parameter, tp: int, rank: int) -> Parameter:
    if parameter.cut is None or tp == 1:
        return parameter
    shape = list(parameter.shape)
    shape[parameter.cut] = _chunk(shape[parameter.cut], tp, rank)
    return Parameter(parameter.name, tuple(shape), parameter.cut)


def _chunk(size: int, parts: int, number: int) -> int:
    """How many of `size` the part has, cut as torch.chunk cuts: all alike but the last ones."""
    each = ceil(size / parts)
    return max(0, min(each, size - number * each))


def padded(parameter: Parameter, shards: int) -> int:
    """Numbers in all shards together."""
    rows, *rest = parameter.shape
    return ceil(rows / shards) * shards * prod(rest)


def _shard_size(parameter: Parameter, parallel: ParallelConfig, layout: Layout, place: Layout) -> int:
    """Numbers of it that this rank updates."""
    if layout.fsdp == 1 or parallel.zero == 0:
        return parameter.size
    rows, *rest = parameter.shape
    return _chunk(rows, layout.fsdp, place.fsdp) * prod(rest)
