"""What each rank of a layout would hold: its part is built by the code of training, on tensors that have no memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from gptworks.config.contradictions import fit_layout, suits
from gptworks.config.derive import BatchPlan, Layout, num_steps, plan_batch, solve_layout
from gptworks.config.schema import ModelConfig, ParallelConfig, RunConfig
from gptworks.config.stages import assign_layers, stages_of
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.parallel.build import build
from gptworks.plan import sizes
from gptworks.train.precision import DTYPES
from gptworks.train.setup import prepare

_FP32 = 4
_BLOCKS_IN_FLIGHT = 2  # with zero 3: the one at work, and the next, which is gathered meanwhile


@dataclass(frozen=True)
class Holding:
    """One rank for all that hold as much. Stages and tensor-parallel ranks are those of the ranks it stands for."""

    pp_ranks: range
    tp_ranks: range
    num_ranks: int
    layers: list[range]  # of the first of pp_ranks; a range for each stage that a rank has
    heads: int
    words: int  # rows of the word embedding or head that are here
    stage_parameters: int  # of the whole model on these stages; the copy of a tied embedding is not counted
    parameters: int  # numbers on this rank, copies too
    weights: int  # bytes, as all below
    gradients: int
    optimizer: int
    gathered: int  # more that FSDP holds while it has put shards together

    @property
    def in_all(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True)
class Survey:
    layout: Layout
    parallel: ParallelConfig
    batch: BatchPlan
    holdings: list[Holding]

    @property
    def parameters(self) -> int:
        """Of the whole model, as the stages add up to it."""
        return sum(h.stage_parameters * len(h.pp_ranks) for h in self.holdings if h.tp_ranks.start == 0)


def survey(cfg: RunConfig, world_size: int) -> Survey:
    """Refuses what a run of so many processes would refuse, as long as it needs no data to know it."""
    layout = solve_layout(cfg.parallel, world_size, partial(suits, cfg))
    parallel = fit_layout(cfg, layout)
    batch = plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel)
    holdings = []
    for pp_ranks in alike(cfg.model, parallel, layout.pp):
        for tp_ranks in _tp_alike(cfg.model, layout.tp, layers_of(cfg.model, parallel, layout.pp, pp_ranks.start)):
            rank = pp_ranks.start * (world_size // layout.pp) + tp_ranks.start
            with process_group.imagined(layout, rank) as world:
                holdings.append(_holding(cfg, world, parallel, batch, pp_ranks, tp_ranks))
    return Survey(layout, parallel, batch, holdings)


def layers_of(model: ModelConfig, parallel: ParallelConfig, pp: int, pp_rank: int) -> list[range]:
    """Of each stage of a pipeline rank."""
    if pp == 1:
        return [range(model.num_layers)]
    every = assign_layers(model.num_layers, pp * parallel.virtual_stages)
    return [every[stage] for stage in stages_of(pp_rank, pp, parallel.virtual_stages, parallel.schedule)]


def alike(model: ModelConfig, parallel: ParallelConfig, pp: int) -> Iterator[range]:
    """Neighbours in the pipeline that have as many layers, and neither end of the model, hold the same."""
    kinds = []
    for pp_rank in range(pp):
        layers = layers_of(model, parallel, pp, pp_rank)
        ends = (layers[0].start == 0, layers[-1].stop == model.num_layers)
        kinds.append(([len(of_stage) for of_stage in layers], ends))
    first = 0
    for pp_rank in range(1, pp + 1):
        if pp_rank == pp or kinds[pp_rank] != kinds[first]:
            yield range(first, pp_rank)
            first = pp_rank


def _tp_alike(model: ModelConfig, tp: int, layers: list[range]) -> list[range]:
    """Matrices are cut evenly; of the vocabulary the last rank may have fewer words than the others."""
    has_words = layers[0].start == 0 or layers[-1].stop == model.num_layers
    if model.vocab_size % tp == 0 or not has_words:
        return [range(tp)]
    return [range(tp - 1), range(tp - 1, tp)]


def _holding(
    cfg: RunConfig, world: World, parallel: ParallelConfig, batch: BatchPlan, pp_ranks: range, tp_ranks: range
) -> Holding:
    # What is offloaded lies in real memory. How much it is does not depend on where it lies.
    built = parallel.model_copy(update={"offload": False})
    part = build(cfg.model, world, DTYPES[cfg.precision.compute], None, parallel=built)
    layout, zero = world.layout, parallel.zero
    compute = DTYPES[cfg.precision.compute].itemsize
    reduced = _FP32 if cfg.precision.reduce == "fp32" else compute
    here = together = gathered = words = 0
    blocks: dict[str, int] = {}
    for name, parameter in part.named_parameters():
        whole = shard.num_gathered(parameter)
        here, together = here + shard.local(parameter).numel(), together + whole
        if name in {"wte.weight", "head.weight"}:
            words = whole // cfg.model.hidden_size
        if name.startswith("blocks."):
            block = ".".join(name.split(".")[:2])
            blocks[block] = blocks.get(block, 0) + whole * compute
        else:
            gathered += whole * _FP32
    gradients = here * _FP32
    if zero == 1 and batch.accumulation > 1:  # they stay whole until the last micro-batch
        gradients += together * reduced
    if zero == 3:
        gathered += sum(sorted(blocks.values())[-_BLOCKS_IN_FLIGHT:])
    else:
        gathered = gathered + sum(blocks.values()) if zero else 0
    return Holding(
        pp_ranks,
        tp_ranks,
        len(pp_ranks) * layout.data_parallel * len(tp_ranks),
        layers_of(cfg.model, parallel, layout.pp, pp_ranks.start),
        cfg.model.num_heads // layout.tp,
        words,
        sum(parameter.numel() for parameter in part.counted_parameters()),
        here,
        here * _FP32,
        gradients,
        2 * here * _FP32,  # the two moments of Adam
        gathered,
    )


def describe(cfg: RunConfig, world_size: int) -> str:
    """The plan of a run of so many processes. Where there is data, with what it is enough for."""
    found = survey(cfg, world_size)
    layout, batch, parallel = found.layout, found.batch, found.parallel
    seq_len = cfg.data.seq_len
    lines = [
        f"layout           {layout}: {layout.world_size} processes",
        f"parameters       {found.parameters:,}",
        f"precision        {cfg.precision.compute}; weights, gradients and Adam's moments in fp32",
        f"batch            {batch.global_size} = {batch.micro_size} micro-batch x {batch.accumulation} accumulation "
        f"x {batch.data_parallel} data-parallel; {batch.global_size * seq_len:,} tokens per step",
    ]
    if layout.pp > 1:
        bubble = (layout.pp - 1) / (parallel.virtual_stages * batch.accumulation)
        idle = "" if parallel.schedule == "zero_bubble" else f"; waiting adds {bubble:.0%} to the work of a step"
        lines.append(f"pipeline         {parallel.schedule}, {batch.accumulation} micro-batches{idle}")
    if parallel.zero:
        kept = " in the memory of the CPU" if parallel.offload else ""
        lines.append(f"sharding         zero {parallel.zero} over {layout.fsdp} ranks{kept}")
    last_step = None
    if cfg.data.path:
        setup = prepare(cfg, World(torch.device("cpu"), layout))
        last_step = setup.last_step
        lines.append(f"samples          {setup.train_samples.per_epoch:,} per epoch of {seq_len} tokens")
    elif not cfg.train.epochs and (cfg.train.steps or cfg.train.tokens):
        last_step = num_steps(cfg.train, 0, batch.global_size, seq_len)
    if last_step is not None:
        tokens = last_step * batch.global_size * seq_len
        lines.append(f"steps            {last_step:,} ({tokens:,} tokens)")
        lines.append(f"compute          {tokens * sizes.flops_per_token(cfg.model, seq_len):.3g} FLOP in all")
    lines += ["", "what one rank holds (GiB), without activations:", *_table(found)]
    if any(holding.gathered for holding in found.holdings):
        lines.append("gathered: parameters that FSDP has put together; with zero 3 at most so much at a time")
    note = shard.note(parallel)
    if note and parallel.zero == 3:  # slower or not, it may be the one that fits, or that needs no recomputation
        note += " `gptworks plan --search` compares what that costs."
    lines += ["", *([note] if note else [])]
    lines.append("One rank of each line was built, on tensors without memory; those that hold as much share a line.")
    if parallel.zero:
        lines.append("Of the shards it is the first, which none exceeds.")
    lines.append("nothing was written (--dry-run)")
    return "\n".join(lines)


def _table(found: Survey) -> list[str]:
    titles = ("stage", "tp", "ranks", "layers", "heads", "words", "parameters")
    rows: list[tuple[str, ...]] = [(*titles, "weights", "gradients", "optimizer", "gathered", "in all")]
    for held in found.holdings:
        amounts = (held.weights, held.gradients, held.optimizer, held.gathered, held.in_all)
        rows.append(
            (
                span(held.pp_ranks),
                span(held.tp_ranks),
                str(held.num_ranks),
                _shown_layers(held),
                str(held.heads),
                f"{held.words:,}" if held.words else "-",
                f"{held.parameters:,}",
                *(f"{amount / 2**30:.2f}" for amount in amounts),
            )
        )
    return aligned(rows)


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _shown_layers(held: Holding) -> str:
    if len(held.pp_ranks) == 1:
        return "+".join(span(layers) for layers in held.layers)
    return "+".join(str(len(layers)) for layers in held.layers) + " each"


def span(numbers: range) -> str:
    return str(numbers.start) if len(numbers) == 1 else f"{numbers.start}-{numbers.stop - 1}"
