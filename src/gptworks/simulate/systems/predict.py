"""What `nvidia-smi` would show of the fullest card if a named system ran the workload of a configuration of ours."""

from collections.abc import Callable

from gptworks.errors import UsageError
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.simulate.systems.case import CARD, CHANNELS, Case, Parts
from gptworks.simulate.systems.fleetx import fleetx
from gptworks.simulate.systems.megatron import megatron
from gptworks.simulate.systems.oneflow import oneflow

# Megatron-LM: that of the reports which the documents cite, of 2021.
RULES: dict[str, Callable[[Case], Parts]] = {"fleetx": fleetx, "megatron": megatron, "oneflow": oneflow}
_RECOMPUTE = {"none": "none", "core_attn": "core", "full": "full"}
_ZERO = {"fleetx": (0, 1, 2), "megatron": (0,), "oneflow": (0,)}


def predict(system: str, workload: Workload, choice: LayoutChoice, card: str) -> Parts | None:
    """MiB by name. None: more than the card has, however its allocator turns."""
    problem = _outside(system, workload, choice, card)
    if problem:
        raise UsageError(f"--rules {system}: {problem}")
    layout, batch = choice.layout, choice.batch
    case = Case(
        hidden=workload.model.hidden_size,
        heads=workload.model.num_heads,
        layers=workload.model.num_layers,
        vocab=workload.model.vocab_size,
        seq_len=workload.seq_len,
        micro_batch=batch.micro_size,
        dp=layout.data_parallel,
        tp=layout.tp,
        pp=layout.pp,
        accumulate=batch.accumulation,
        recompute=_RECOMPUTE[choice.recompute],
        zero=choice.parallel.zero,
        card=card,
    )
    try:
        return RULES[system](case)
    except MemoryError:
        return None


def _outside(system: str, workload: Workload, choice: LayoutChoice, card: str) -> str:
    """Why the rules say nothing about it; empty: they do."""
    if card not in CARD:
        return f"got --device {card}; its rules are known for {', '.join(CARD)}."
    if workload.precision.compute != "fp16":
        return f"got precision.compute={workload.precision.compute}; its published figures, and the rules, are of fp16."
    if choice.parallel.zero not in _ZERO[system]:
        stages = " or ".join(map(str, _ZERO[system]))
        return f"got parallel.zero={choice.parallel.zero}; its rules are known for {stages}."
    if choice.recompute not in _RECOMPUTE:
        return f"got train.recompute={choice.recompute}; its rules are known for {', '.join(_RECOMPUTE)}."
    if system == "oneflow" and choice.recompute != "full":
        return f"got train.recompute={choice.recompute}; OneFlow-GPT recomputes whole layers. Set it to full."
    layout = choice.layout
    ways = {"data-parallel ranks": layout.data_parallel, "parallel.tp": layout.tp, "processes": layout.world_size}
    sizes = CHANNELS[card.split("-")[0]]
    for name, ranks in ways.items():
        if 1 < ranks <= max(sizes) and ranks not in sizes:
            return f"got {ranks} {name}; inside a machine NCCL's buffers are known for {', '.join(map(str, sizes))}."
    if workload.model.num_layers % layout.pp:
        return (
            f"got {workload.model.num_layers} layers on parallel.pp={layout.pp}; its stages have as many layers each."
        )
    return ""
