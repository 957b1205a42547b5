"""The model that is compared: the user's own, or a small one that is cut in the same way."""

import math
from dataclasses import replace

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import ModelConfig, RunConfig
from gptworks.plan import sizes
from gptworks.plan.budget import MemoryBudget
from gptworks.plan.memory import rank_memories
from gptworks.plan.sizes import FP32
from gptworks.plan.workload import LayoutChoice, Workload

PROCESS = 150e6  # bytes that a process takes for itself, without what processes share
MOST_WORK = 2e13  # FLOP of one side: about ten minutes on a few cores


def memory_needed(workload: Workload, choice: LayoutChoice) -> float:
    """Bytes on this machine for all ranks of the layout together: what a step holds on each, the processes, and once
    more the weights and gradients that are compared."""
    together = MemoryBudget(math.inf, shared_by=choice.layout.world_size)
    needed = together.needed(rank_memories(workload, choice), choice.layout)
    return needed + 2 * FP32 * sizes.num_parameters(workload.model) + PROCESS * choice.layout.world_size


def work(workload: Workload, samples: int) -> float:
    return samples * workload.seq_len * sizes.flops_per_token(workload.model, workload.seq_len)


def scale_down(cfg: RunConfig, choice: LayoutChoice) -> tuple[RunConfig, LayoutChoice]:
    """Fewer of everything, but every cut as before: heads, features, words, tokens and layers are shared out alike,
    what was uneven stays uneven. The vocabulary stays as it is, since the data is written in it."""
    model, layout, batch, tp = cfg.model, choice.layout, choice.batch, choice.layout.tp
    stages = layout.pp * choice.parallel.virtual_stages
    layers = min(model.num_layers, stages + (model.num_layers % stages or stages))
    # As many heads of keys and values per rank, and heads that share one, as two of each can show.
    kv_heads = tp * min(2, model.num_kv_heads // tp) or model.num_kv_heads  # fewer than ranks: some have copies
    heads = max(tp, kv_heads) * min(2, model.num_heads // max(tp, model.num_kv_heads))
    head_size = min(16, model.head_size)
    hidden = heads * head_size
    ffn = tp * max(1, round(hidden * model.ffn_size / model.hidden_size / tp))
    seq_len = min(cfg.data.seq_len, tp * math.ceil(64 / tp))
    small = ModelConfig(
        **model.model_dump()
        | {"num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "head_size": head_size}
        | {"hidden_size": hidden, "ffn_size": ffn, "max_positions": seq_len}
    )
    accumulation, micro_size = min(batch.accumulation, 2 * layout.pp), min(2, batch.micro_size)
    samples = micro_size * accumulation * batch.data_parallel
    changed = {
        "model": small,
        "data": cfg.data.model_copy(update={"seq_len": seq_len}),
        "init": cfg.init.model_copy(update={"checkpoint": ""}),
    }
    smaller = replace(choice, batch=BatchPlan(samples, micro_size, accumulation, batch.data_parallel))
    return cfg.model_copy(update=changed), smaller


def changes(before: RunConfig, after: RunConfig, sections: tuple[str, ...]) -> list[str]:
    """`model.num_layers 96 -> 32` for each value of these sections that is another."""
    changed = []
    for name in sections:
        old, new = getattr(before, name).model_dump(), getattr(after, name).model_dump()
        changed += [f"{name}.{key} {old[key]} -> {new[key]}" for key in old if old[key] != new[key]]
    return changed
