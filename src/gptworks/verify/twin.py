"""The model that is compared: the user's own, or a small one that is cut in the same way."""

import math

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig, RunConfig
from gptworks.plan import sizes

PROCESS = 150e6  # bytes that a process takes for itself, without what processes share
MOST_WORK = 2e13  # FLOP of one side: about ten minutes on a few cores


def memory_needed(cfg: RunConfig, parallel: ParallelConfig, layout: Layout, batch: BatchPlan) -> float:
    """Bytes on this machine for all ranks of the layout together. Rough, and rather too much."""
    model = cfg.model
    copies = layout.dp * (1 if parallel.zero else layout.fsdp)
    parameters = sizes.num_parameters(model)
    in_flight = layout.data_parallel * layout.pp
    activations = 70 * batch.micro_size * cfg.data.seq_len * model.hidden_size * model.num_layers * in_flight
    # Weights, gradients and two moments; once more the weights and gradients that are compared.
    return parameters * (16 * copies + 8) + activations + PROCESS * layout.world_size


def work(cfg: RunConfig, batch: BatchPlan, steps: int) -> float:
    return steps * batch.global_size * cfg.data.seq_len * sizes.flops_per_token(cfg.model, cfg.data.seq_len)


def shrunken(cfg: RunConfig, parallel: ParallelConfig, layout: Layout, batch: BatchPlan) -> tuple[RunConfig, BatchPlan]:
    """Fewer of everything, but every cut as before: heads, features, words, tokens and layers are shared out alike,
    what was uneven stays uneven. The vocabulary stays as it is, since the data is written in it."""
    model, tp = cfg.model, layout.tp
    stages = layout.pp * parallel.virtual_stages
    layers = min(model.num_layers, stages + (model.num_layers % stages or stages))
    heads = tp * min(2, model.num_heads // tp)
    hidden = heads * min(16, model.head_size)
    ffn = tp * max(1, round(hidden * model.ffn_size / model.hidden_size / tp))
    seq_len = min(cfg.data.seq_len, tp * math.ceil(64 / tp))
    small = ModelConfig(
        **model.model_dump()
        | {"num_layers": layers, "num_heads": heads, "hidden_size": hidden, "ffn_size": ffn, "max_positions": seq_len}
    )
    accumulation = min(batch.accumulation, 2 * layout.pp)
    plan = BatchPlan(0, min(2, batch.micro_size), accumulation, batch.data_parallel)
    plan = BatchPlan(
        plan.micro_size * accumulation * batch.data_parallel, plan.micro_size, accumulation, plan.data_parallel
    )
    changed = {
        "model": small,
        "data": cfg.data.model_copy(update={"seq_len": seq_len}),
        "init": cfg.init.model_copy(update={"checkpoint": ""}),
    }
    return cfg.model_copy(update=changed), plan


def changes(before: RunConfig, after: RunConfig, sections: tuple[str, ...]) -> list[str]:
    """`model.num_layers 96 -> 32` for each value of these sections that is another."""
    found = []
    for name in sections:
        old, new = getattr(before, name).model_dump(), getattr(after, name).model_dump()
        found += [f"{name}.{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
    return found
