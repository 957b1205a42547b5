"""train --dry-run: the plan of a run, and of one of several processes what each kind of rank would hold."""

import torch

from gptworks.config.derive import num_steps
from gptworks.config.schema import RunConfig
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.plan import sizes
from gptworks.plan.memory import TERMS
from gptworks.simulate.ranks import Inspected, RankState, inspect_ranks, span
from gptworks.text_table import aligned
from gptworks.train.setup import prepare


def describe_one_process(cfg: RunConfig) -> str:
    """The plan of a run of one process, after every check that it makes before its first file is written."""
    setup = prepare(cfg)
    batch = setup.batch
    tokens = setup.last_step * batch.global_size * cfg.data.seq_len
    return "\n".join(
        [
            f"parameters       {sizes.num_parameters(cfg.model):,}",
            f"device           {setup.world.device}, {cfg.precision.compute}",
            f"samples          {setup.train_samples.per_epoch:,} per epoch of {cfg.data.seq_len} tokens",
            f"batch            {batch.global_size} = {batch.micro_size} micro-batch x {batch.accumulation} "
            f"accumulation x {batch.data_parallel} data-parallel",
            f"steps            {setup.last_step:,} ({tokens:,} tokens)",
            f"compute          {tokens * sizes.flops_per_token(cfg.model, cfg.data.seq_len):.3g} FLOP",
            f"one checkpoint   {sizes.checkpoint_bytes(cfg.model, cfg.checkpoint.portable) / 1e6:,.1f} MB",
            f"run folder       {cfg.run.out}",
            "nothing was written (--dry-run)",
        ]
    )


def describe(cfg: RunConfig, world_size: int) -> str:
    """The plan of a run of so many processes. Where there is data, with what it is enough for."""
    inspected = inspect_ranks(cfg, world_size)
    layout, batch, parallel = inspected.choice.layout, inspected.choice.batch, inspected.choice.parallel
    seq_len = cfg.data.seq_len
    lines = [
        f"layout           {layout}: {layout.world_size} processes",
        f"parameters       {inspected.parameters:,}",
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
    lines += ["", f"what one rank holds at its fullest (GiB), on {inspected.workload.kernels}:", *_table(inspected)]
    note = shard.note(parallel)
    if note and parallel.zero == 3:  # slower or not, it may be the one that fits, or that needs no recomputation
        note += " `gptworks plan --search` compares what that costs."
    lines += ["", *([note] if note else [])]
    lines.append(
        "One rank of each line was built, on tensors without memory; memory is that of the fullest of the line."
    )
    if parallel.zero:
        lines.append("Of the shards it is the first, which none exceeds.")
    lines.append("nothing was written (--dry-run)")
    return "\n".join(lines)


def _table(inspected: Inspected) -> list[str]:
    titles = ("stage", "tp", "ranks", "layers", "heads", "words", "parameters")
    rows: list[tuple[str, ...]] = [(*titles, "weights", *TERMS[1:], "in all", "in the")]
    for state in inspected.ranks:
        amounts = (*(getattr(state.memory, name) for name in TERMS), state.memory.peak)
        rows.append(
            (
                span(state.pp_ranks),
                span(state.tp_ranks),
                str(state.num_ranks),
                _shown_layers(state),
                str(state.heads),
                f"{state.words:,}" if state.words else "-",
                f"{state.parameters:,}",
                *(f"{amount / 2**30:.2f}" for amount in amounts),
                state.memory.moment,
            )
        )
    return aligned(rows)


def _shown_layers(state: RankState) -> str:
    if len(state.pp_ranks) == 1:
        return "+".join(span(layers) for layers in state.layers)
    return "+".join(str(len(layers)) for layers in state.layers) + " each"
