"""Which layers a pipeline stage holds, and which stages a rank holds."""

import math

from gptworks.errors import ConfigError

# Stages per rank that a schedule has an order for: at least, at most.
STAGES_PER_RANK = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved": (2, math.inf),
    "zero_bubble": (1, math.inf),
}


def assign_layers(num_layers: int, num_stages: int) -> list[range]:
    """The layers of each stage, in order; stages differ by one layer at most.

    The layers left over go to the middle stages, from the last of them backwards, and then to the first stage: the last
    stage has the head to compute besides, the first has the embeddings to hold, and an early stage keeps the
    activations of more micro-batches than a late one.

    >>> [len(layers) for layers in assign_layers(6, 4)]
    [1, 2, 2, 1]
    """
    if num_layers < num_stages:
        raise ConfigError(
            "parallel",
            [
                f"parallel.pp: {num_stages} pipeline stages, but the model has {num_layers} layers; needs a layer or "
                f"more in each. Use at most {num_layers} stages (pp x virtual_stages)."
            ],
        )
    each, left_over = divmod(num_layers, num_stages)
    favoured = [*range(num_stages - 2, 0, -1), 0][:left_over]
    stages, first = [], 0
    for stage in range(num_stages):
        size = each + (stage in favoured)
        stages.append(range(first, first + size))
        first += size
    return stages


def check_schedule(schedule: str, virtual_stages: int) -> None:
    """Refuse a number of stages per rank that the schedule has no order for."""
    if schedule not in STAGES_PER_RANK:
        known = ", ".join(STAGES_PER_RANK)
        raise ConfigError("parallel", [f"parallel.schedule: {schedule} is unknown. Known: {known}."])
    least, most = STAGES_PER_RANK[schedule]
    if not least <= virtual_stages <= most:
        needed = str(least) if least == most else f"{least} or more"
        fitting = [name for name, (low, high) in STAGES_PER_RANK.items() if low <= virtual_stages <= high]
        raise ConfigError(
            "parallel",
            [
                f"parallel.virtual_stages: {virtual_stages}, but schedule {schedule} needs {needed}. "
                f"Set it to {least}, or use parallel.schedule: {' or '.join(fitting)}."
            ],
        )


def check_micro_batches(schedule: str, num_micro_batches: int, pp: int) -> None:
    """Refuse a step that leaves ranks without work, or that the schedule has no order for."""
    problem = ""
    if num_micro_batches < pp:
        problem = f"fewer than the {pp} pipeline stages: some stages would have no work. Needed: {pp} or more"
    elif schedule in {"interleaved", "zero_bubble"} and num_micro_batches % pp:
        below = num_micro_batches // pp * pp
        problem = f"not a multiple of pp = {pp}, which schedule {schedule} needs. Nearest: {below} or {below + pp}"
    if problem:
        raise ConfigError(
            "batch",
            [
                f"batch.accumulation: {num_micro_batches} micro-batches per step and data-parallel rank are {problem}. "
                "Change batch.global_size or batch.micro_size."
            ],
        )


def stages_of(pp_rank: int, pp: int, virtual_stages: int, schedule: str) -> list[int]:
    """The stages of a rank, in the order of the model.

    >>> [stages_of(rank, 2, 2, "interleaved") for rank in (0, 1)]
    [[0, 2], [1, 3]]
    """
    check_schedule(schedule, virtual_stages)
    return [pp_rank + turn * pp for turn in range(virtual_stages)]
