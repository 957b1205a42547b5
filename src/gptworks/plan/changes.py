"""What is the smallest change that makes it fit?

Changes of the run come first: they keep the model and the global batch, so that what is learned stays the same. Then
more devices, which keep both too; last, and named so, another model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import log2
from typing import Any

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import ModelConfig, ParallelConfig
from gptworks.errors import ConfigError
from gptworks.plan.budget import MemoryBudget, amount
from gptworks.plan.memory import peak_memory, rank_memories
from gptworks.plan.rejections import refusals
from gptworks.plan.workload import LayoutChoice, Workload

RUN, DEVICES, MODEL = "run", "devices", "model"

# About how much longer a step takes: only to put changes in order, where no device is known to time them on.
RECOMPUTE = {"none": 0.0, "core_attn": 0.03, "full_attn": 0.12, "full": 0.33}
_ZERO = {0: 0.0, 1: 0.02, 2: 0.05, 3: 0.10}
_HALF_THE_MICRO_BATCH = 0.04
_TWICE_THE_TENSOR_PARALLEL = 0.15
_OFFLOAD = 1.0
_MOST_DEVICES = 4096


@dataclass(frozen=True)
class Change:
    settings: dict[str, Any]  # dotted keys, as a command line takes them
    kind: str  # run, devices or model
    needed: int  # bytes afterwards, where it is most
    workload: Workload
    choice: LayoutChoice

    @property
    def devices(self) -> int:
        return self.choice.layout.world_size

    @property
    def overrides(self) -> str:
        return " ".join(
            f"{key}={str(value).lower() if value is True else value}" for key, value in self.settings.items()
        )

    def __str__(self) -> str:
        return f"{self.words}  ({amount(self.needed)})"

    @property
    def words(self) -> str:
        # Processes of one machine share its memory: more of them there would need more of it.
        more = f"on {self.devices} machines: " if self.workload.kernels == "cpu" else f"{self.devices} devices: "
        why = {RUN: "", DEVICES: more, MODEL: "another model: "}[self.kind]
        return f"{why}{self.overrides}"


@dataclass(frozen=True)
class _Step:
    """One alternative of a knob: what it makes of workload and choice, and about what it costs."""

    knob: str
    number: int  # from 1: how far the knob is turned
    cost: float
    value: Any


def smallest(
    workload: Workload, choice: LayoutChoice, budget: MemoryBudget, *, most: int = 3, may_add_devices: bool = True
) -> list[Change]:
    """At most so many that keep the global batch, the smallest first; then what makes another model of it."""
    changes = [*_of_the_run(workload, choice, budget, most)]
    if len(changes) < most and may_add_devices and budget.shared_by == 1:
        changes += _more_devices(workload, choice, budget)
    return changes + list(_another_model(workload, choice, budget))


def _of_the_run(workload: Workload, choice: LayoutChoice, budget: MemoryBudget, most: int) -> list[Change]:
    knobs = [knob for knob in _knobs(workload, choice, budget.per_node) if knob]
    changes: list[tuple[Change, dict[str, int]]] = []
    for turned in range(1, len(knobs) + 1):
        steps = [each for some in combinations(knobs, turned) for each in product(*some)]
        for combined in sorted(steps, key=lambda each: sum(step.cost for step in each)):
            extent = {step.knob: step.number for step in combined}
            if any(_is_no_more(smaller, extent) for _, smaller in changes):
                continue  # what is already there turns the same knobs less
            changed = _turn(workload, choice, combined)
            needed = _needed(*changed, budget) if changed else None
            if changed and needed is not None and needed <= budget.capacity:
                changes.append((Change(_difference(workload, choice, *changed), RUN, needed, *changed), extent))
            if len(changes) == most:
                return [change for change, _ in changes]
    return [change for change, _ in changes]


def _is_no_more(smaller: dict[str, int], extent: dict[str, int]) -> bool:
    return all(extent.get(knob, 0) >= number for knob, number in smaller.items())


def _knobs(workload: Workload, choice: LayoutChoice, per_node: int) -> list[list[_Step]]:
    """Each with its alternatives, the mildest first."""
    parallel, batch, layout = choice.parallel, choice.batch, choice.layout
    attention = [_Step("attention", 1, -0.05, "auto")] if workload.model.attention == "math" else []
    smaller = [size for size in range(batch.micro_size - 1, 0, -1) if batch.micro_size * batch.accumulation % size == 0]
    micro = [
        _Step("micro", number, _HALF_THE_MICRO_BATCH * log2(batch.micro_size / size), size)
        for number, size in enumerate(smaller, 1)
    ]
    modes = list(RECOMPUTE)[list(RECOMPUTE).index(choice.recompute) + 1 :]
    recompute = [
        _Step("recompute", number, RECOMPUTE[mode] - RECOMPUTE[choice.recompute], mode)
        for number, mode in enumerate(modes, 1)
    ]
    shards = [(layout.dp, layout.fsdp, zero) for zero in range(parallel.zero + 1, 4) if layout.fsdp > 1]
    if layout.dp > 1:
        shards += [(1, layout.data_parallel, zero) for zero in range(max(1, parallel.zero), 4)]
    sharding = [
        _Step("sharding", number, _ZERO[zero] - _ZERO[parallel.zero], (dp, fsdp, zero))
        for number, (dp, fsdp, zero) in enumerate(shards, 1)
    ]
    cuts = [2**n for n in range(1, 4) if layout.tp * 2**n <= per_node and layout.data_parallel % 2**n == 0]
    tensor = [_Step("tp", number, _TWICE_THE_TENSOR_PARALLEL * log2(cut), cut) for number, cut in enumerate(cuts, 1)]
    offload = [_Step("offload", 1, _OFFLOAD, True)] if not parallel.offload and workload.kernels != "cpu" else []
    return [attention, micro, recompute, sharding, tensor, offload]


def _turn(workload: Workload, choice: LayoutChoice, steps: tuple[_Step, ...]) -> tuple[Workload, LayoutChoice] | None:
    """None where the result is something that a run would refuse."""
    to = {step.knob: step.value for step in steps}
    if "attention" in to:
        workload = replace(workload, model=workload.model.model_copy(update={"attention": to["attention"]}))
    layout, zero = dict(vars(choice.layout)), choice.parallel.zero
    if "sharding" in to:
        layout["dp"], layout["fsdp"], zero = to["sharding"]
    if "tp" in to:
        # Fewer ranks read data, and each of them accumulates more.
        from_dp = next(n for n in (8, 4, 2, 1) if to["tp"] % n == 0 == layout["dp"] % n)
        from_fsdp = to["tp"] // from_dp
        if layout["fsdp"] % from_fsdp:
            return None
        layout |= {"tp": layout["tp"] * to["tp"], "dp": layout["dp"] // from_dp, "fsdp": layout["fsdp"] // from_fsdp}
        zero = zero if layout["fsdp"] > 1 else 0
    knobs = {**layout, "zero": zero, "offload": to.get("offload", choice.parallel.offload)}
    recompute = to.get("recompute", choice.recompute)
    return rearranged(workload, choice, knobs, micro_size=to.get("micro", choice.batch.micro_size), recompute=recompute)


def rearranged(
    workload: Workload, choice: LayoutChoice, parallel: dict[str, Any], *, micro_size: int, recompute: str
) -> tuple[Workload, LayoutChoice] | None:
    """With the same global batch. None where a run would refuse it."""
    changed = ParallelConfig(**choice.parallel.model_dump() | parallel)
    total, ranks = choice.batch.global_size, Layout.from_config(changed).data_parallel
    if total % (micro_size * ranks):
        return None
    batch = BatchPlan(total, micro_size, total // (micro_size * ranks), ranks)
    return (workload, LayoutChoice(changed, batch, recompute)) if not refusals(workload, changed, batch) else None


def _needed(workload: Workload, choice: LayoutChoice, budget: MemoryBudget) -> int | None:
    try:
        if budget.shared_by == 1:
            return peak_memory(workload, choice)
        return budget.needed(rank_memories(workload, choice), choice.layout)
    except ConfigError:
        return None


def _difference(workload: Workload, choice: LayoutChoice, new_workload: Workload, new: LayoutChoice) -> dict[str, Any]:
    before, after = choice.settings(), new.settings()
    keys = {key for key, value in after.items() if before.get(key) != value}
    if keys & {"batch.micro_size", "batch.accumulation"}:
        # Both, so that the product is right whichever of them the configuration states.
        keys |= {"batch.micro_size", "batch.accumulation"}
    if "parallel.fsdp" in keys:
        keys.add("parallel.zero")
    changed = {key: value for key, value in after.items() if key in keys}
    theirs, model = workload.model.model_dump(), new_workload.model
    changed |= {f"model.{key}": value for key, value in model.model_dump().items() if theirs[key] != value}
    if model.head_size * model.num_heads == model.hidden_size:
        changed.pop("model.head_size", None)  # follows from the others
    return changed


def _more_devices(workload: Workload, choice: LayoutChoice, budget: MemoryBudget) -> list[Change]:
    """The fewest devices, twice as many each time, over which it can be sharded; one change."""
    layout, batch, factor = choice.layout, choice.batch, 2
    while layout.world_size * factor <= _MOST_DEVICES:
        shards = layout.fsdp * factor
        for zero in [zero for zero in (1, 2, 3) if zero >= choice.parallel.zero]:
            per_rank = batch.global_size // (layout.dp * shards)
            micro = next((m for m in range(min(batch.micro_size, per_rank), 0, -1) if per_rank % m == 0), 0)
            for size, mode in ((micro, choice.recompute), (micro, "full"), (1, "full")):
                sharded = {"fsdp": shards, "zero": zero}
                new = size and rearranged(workload, choice, sharded, micro_size=size, recompute=mode)
                needed = _needed(*new, budget) if new else None
                if new and needed is not None and needed <= budget.capacity:
                    return [Change(_difference(workload, choice, *new), DEVICES, needed, *new)]
        factor *= 2
    return []


def _another_model(workload: Workload, choice: LayoutChoice, budget: MemoryBudget) -> Iterator[Change]:
    """Half the width, or half the depth, as often as it takes, but not below an eighth."""
    for name in ("hidden_size", "num_layers"):
        model: ModelConfig | None = workload.model
        for _ in range(3):
            model = _halved(model, name) if model else None
            if model is None:
                break
            changed = replace(workload, model=model)
            if refusals(changed, choice.parallel, choice.batch):
                break
            needed = _needed(changed, choice, budget)
            if needed is not None and needed <= budget.capacity:
                yield Change(_difference(workload, choice, changed, choice), MODEL, needed, changed, choice)
                break


def _halved(model: ModelConfig, name: str) -> ModelConfig | None:
    size = getattr(model, name)
    if size % 2 or size < 4:
        return None
    values = model.model_dump() | {name: size // 2}
    if name == "hidden_size":
        values["ffn_size"] = max(1, model.ffn_size // 2)
        if values["hidden_size"] % model.num_heads:
            if model.num_heads % 2:
                return None
            values["num_heads"] = model.num_heads // 2
            if model.num_kv_heads % 2:
                return None
            values["num_kv_heads"] = model.num_kv_heads // 2
        if model.head_size * model.num_heads == model.hidden_size:  # as it is where nobody says
            del values["head_size"]
    return ModelConfig(**values)
