"""The peak of each stage that the planner predicts, beside that of the code of training on tensors without memory."""

from dataclasses import dataclass, replace
from typing import Any

from gptworks.config.schema import RunConfig
from gptworks.plan.memory import rank_memories
from gptworks.plan.report import Report
from gptworks.simulate.step import Simulated, simulate_all


@dataclass(frozen=True)
class Comparison:
    """Bytes of one rank of a stage, or of stages that are alike."""

    simulated: Simulated
    planned: int  # for what is simulated
    planned_for_device: int

    @property
    def difference(self) -> float:
        """Relative to what is simulated."""
        return (self.planned - self.simulated.peak) / self.simulated.peak

    def as_dict(self) -> dict[str, Any]:
        return self.simulated.as_json() | {"planned_peak": self.planned, "difference": self.difference}


def compare(config: RunConfig, made: Report) -> list[Comparison]:
    """The simulation runs the code of training as a CPU does, uncompiled and with nothing offloaded: what is planned
    for the same is compared with it."""
    parallel = made.choice.parallel.model_copy(update={"offload": False})
    workload = replace(made.workload, kernels="cpu", compiled=False)
    planned = rank_memories(workload, replace(made.choice, parallel=parallel))
    return [
        Comparison(
            each,
            max(planned[rank].peak for rank in each.pp_ranks),
            max(made.memories[rank].peak for rank in each.pp_ranks),
        )
        for each in simulate_all(config, made.devices)
    ]
