"""The memory of a rank: the most bytes that a training step holds on it, in closed form. There is no other answer to
this question: `plan`, `train`, `doctor`, `verify` and every dry run ask here, and simulate/ is its check.

It follows what our own code does: the passes through a block come from plan/activations.py, the order of the passes
from the schedule, and each moment at which much is there is looked at; the largest is the peak. Tensors only: what an
allocator wastes, a CUDA context or the Python process itself needs is not in it. Never imports torch.
"""

from dataclasses import dataclass
from functools import lru_cache
from operator import mul

from gptworks import optimizer_state
from gptworks.config.derive import Layout
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.plan import schedule
from gptworks.plan.block_kinds import kind_of
from gptworks.plan.block_shape import BlockShape
from gptworks.plan.ledger import NOTHING, Bytes
from gptworks.plan.rank_parameters import Stage, stages_here
from gptworks.plan.sizes import FP32, block_matrices
from gptworks.plan.stage_memory import Fullest, StageMemory, StageSizes
from gptworks.plan.workload import LayoutChoice, Workload

TERMS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "communication")


@dataclass(frozen=True)
class RankMemory:
    """Bytes that a rank holds at the moment of its peak: one rank, or the fullest of all of a pipeline rank."""

    pp_rank: int
    layers: int
    parameters: int  # fp32, or this rank's shard of them
    gradients: int
    optimizer: int  # what `optimizer_state` says of each parameter
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


def rank_memories(workload: Workload, choice: LayoutChoice) -> list[RankMemory]:
    """One for each pipeline rank, of the fullest of its tp, dp and fsdp ranks."""
    shape = _block_shape(workload, choice)
    return [_rank(workload, choice, shape, Layout(pp_rank, 0, 0, 0)) for pp_rank in range(choice.layout.pp)]


def rank_memory(workload: Workload, choice: LayoutChoice, coords: Layout) -> RankMemory:
    """What the rank with these coordinates holds. The first of the shards has the most: it stands for all of them."""
    return _rank(workload, choice, _block_shape(workload, choice), coords)


def peak_memory(workload: Workload, choice: LayoutChoice) -> int:
    """The largest peak of all ranks, for a search over many layouts: of pipeline ranks that hold alike the first has
    the most micro-batches in flight, so that the others need not be looked at."""
    shape = _block_shape(workload, choice)
    ranks = _unlike(workload.model.num_layers, choice.parallel)
    return max(_rank(workload, choice, shape, Layout(rank, 0, 0, 0)).peak for rank in ranks)


def state_memory(workload: Workload, parallel: ParallelConfig) -> int:
    """The least that any batch needs: weights, gradients and moments on the fullest rank when it updates them."""
    layout = Layout.from_config(parallel)
    zero = parallel.zero if layout.fsdp > 1 else 0
    shards = layout.fsdp if zero else 1
    weights = max(
        sum(sizes.here for _, sizes in _held(workload.model, parallel, Layout(rank, 0, 0, 0), shards, FP32, FP32))
        for rank in _unlike(workload.model.num_layers, parallel)
    )
    if parallel.offload and zero and not workload.on_cpu:
        return weights
    return weights + weights + _optimizer_bytes(weights)  # gradients are as large as the weights


def _optimizer_bytes(weights: int) -> int:
    """From the bytes of fp32 weights."""
    return weights // FP32 * optimizer_state.BYTES_PER_VALUE


@lru_cache(maxsize=1 << 12)
def _unlike(num_layers: int, parallel: ParallelConfig) -> list[int]:
    """The first pipeline rank of each kind; all of them where late ranks wait with the gradients of weights."""
    pp = Layout.from_config(parallel).pp
    if pp == 1 or parallel.schedule == "zero_bubble":
        return list(range(pp))
    virtual = parallel.virtual_stages
    layers = assign_layers(num_layers, pp * virtual)
    kinds = [
        (rank == 0, rank == pp - 1, *(len(layers[stage]) for stage in stages_of(rank, pp, virtual, parallel.schedule)))
        for rank in range(pp)
    ]
    return [kinds.index(kind) for kind in dict.fromkeys(kinds)]


def _block_shape(workload: Workload, choice: LayoutChoice) -> BlockShape:
    model, tp = workload.model, choice.layout.tp
    attention = "fused"
    if model.attention == "math":
        attention = "math"
    elif model.dropout_attention and workload.on_cpu:
        attention = "sdpa_math"
    return BlockShape(
        rows=choice.batch.micro_size,
        length=workload.seq_len,
        hidden=model.hidden_size,
        ffn=model.ffn_size // tp,
        heads=max(1, model.num_heads // tp),
        kv_heads=max(1, model.num_kv_heads // tp),
        head_size=model.head_size,
        matrices=_matrices(model, tp),
        tp=tp,
        split=choice.splits_sequence,
        compute=workload.compute_bytes,
        attention=attention,
        dropout=model.dropout_hidden > 0,
        dropout_attention=model.dropout_attention > 0,
        cpu=workload.on_cpu,
        recompute=choice.recompute,
        casts=choice.zero == 0,
        **kind_of(model, workload.seq_len),
    )


@lru_cache(maxsize=1 << 10)
def _matrices(model: ModelConfig, tp: int) -> tuple[tuple[str, int], ...]:
    """The matrices of a block on the first of the tensor-parallel ranks: name of the module, numbers in it."""
    specs = block_matrices(model).items()
    return tuple((name.split(".")[-2], spec.on_rank(tp, 0).size) for name, spec in specs)


def _rank(workload: Workload, choice: LayoutChoice, shape: BlockShape, coords: Layout) -> RankMemory:
    parallel, batch = choice.parallel, choice.batch
    compute, reduce = workload.compute_bytes, workload.reduce_bytes
    held = _held(workload.model, parallel, coords, choice.shards, compute, reduce)
    stages = [StageMemory(workload, choice, shape, stage, sizes) for stage, sizes in held]
    moments = Fullest()
    in_flight = _walk(choice, stages, coords.pp, moments)
    moments.see("update", _update(workload, choice, stages))
    tokens = 2 * 8 * shape.tokens * batch.accumulation  # and labels, int64, of all micro-batches of the step
    parameters = sum(stage.sizes.here for stage in stages)
    most = moments.most
    offloaded = parallel.offload and choice.zero > 0 and not workload.on_cpu
    return RankMemory(
        coords.pp,
        sum(stage.sizes.blocks for stage in stages),
        0 if offloaded else parameters,
        most.gradients,
        0 if offloaded else _optimizer_bytes(parameters),
        most.activations,
        most.temporaries + tokens,
        most.communication,
        moments.name,
        in_flight,
    )


@lru_cache(maxsize=1 << 14)
def _held(
    model: ModelConfig, parallel: ParallelConfig, coords: Layout, shards: int, compute: int, reduce: int
) -> list[tuple[Stage, StageSizes]]:
    stages = stages_here(model, parallel, coords)
    return [(stage, StageSizes.measure(stage, shards, compute, reduce)) for stage in stages]


def _walk(choice: LayoutChoice, stages: list[StageMemory], pp_rank: int, moments: Fullest) -> int:
    """All passes of a step that can be the fullest. Returns the most micro-batches in flight."""
    pp, micro_batches = choice.layout.pp, choice.batch.accumulation
    name = choice.parallel.schedule if pp > 1 else ""
    enough = schedule.enough(name, pp, micro_batches)
    passes, most_flying = schedule.passes(name, pp, len(stages), pp_rank, enough, choice.zero)
    amounts = tuple(size for stage in stages for size in stage.amounts())
    # Passes of one kind through stages that are alike differ in what rests meanwhile, and in nothing else: the one that
    # finds most is looked at.
    fullest: dict[tuple[object, ...], tuple[int, str, int, bool, tuple[int, ...]]] = {}
    for (kind, at, is_last, *own), states in passes:
        stage = stages[at]
        alike = (kind, is_last, *own, stage.stage.is_first, stage.stage.is_last, stage.sizes.blocks)
        for state in states:
            held = sum(map(mul, state, amounts))
            if alike not in fullest or held > fullest[alike][0]:
                fullest[alike] = held, kind, at, is_last, state
    for _, kind, at, is_last, state in fullest.values():
        for number, each in enumerate(stages):
            each.set(state[5 * number : 5 * number + 5], micro_batches - enough)
        others = NOTHING
        for other in stages:
            if other is not stages[at]:
                others += other.resting
        _run_pass(kind, stages[at], others, moments, is_last)
    return most_flying


def _run_pass(kind: str, stage: StageMemory, others: Bytes, moments: Fullest, is_last: bool) -> None:
    """A pass of plan/schedule.py. `others`: what the other stages of the rank hold meanwhile."""
    if kind == "F":
        stage.forward(others, moments)
    elif kind == "I":
        if not stage.stage.is_first:
            stage.inputs(others, moments)
    elif kind == "B":
        sync = stage.zero > 1 or (stage.zero == 1 and is_last and not stage.in_pipeline)
        stage.backward(others, moments, is_last, sync)
    elif kind == "W":
        stage.weights(others, moments)
    else:
        stage.reduce(others, moments)


def _update(workload: Workload, choice: LayoutChoice, stages: list[StageMemory]) -> Bytes:
    """Gradients that meet, and Adam, which needs nothing more: its kernel is a fused one."""
    layout, reduce = choice.layout, workload.reduce_bytes
    gradients = sum(stage.sizes.here for stage in stages)
    travelling = 0
    if layout.data_parallel > 1 and not choice.zero and reduce < FP32:
        travelling = gradients // FP32 * reduce
    ends = [stage for stage in stages if stage.stage.is_first != stage.stage.is_last]
    if layout.pp > 1 and workload.model.tied and ends:  # the other end's gradient of the tied embedding
        travelling = max(travelling, max(stage.sizes.table for stage in ends) // choice.shards)
    return Bytes(gradients=gradients, communication=travelling)
