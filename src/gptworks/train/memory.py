"""Is there memory enough? Asked before anything is built; and when it was not, what would have been smaller."""

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from gptworks.config.schema import RunConfig
from gptworks.errors import TrainingError
from gptworks.launch import rank_env
from gptworks.launch.ranks import Ranks
from gptworks.launch.world import World
from gptworks.plan import changes, devices, machine
from gptworks.plan.budget import MemoryBudget, amount, breakdown
from gptworks.plan.memory import RankMemory, rank_memories
from gptworks.plan.time import step_time
from gptworks.plan.workload import LayoutChoice, Workload
from gptworks.train import native_blocks
from gptworks.train.setup import Setup
from gptworks.train.speed import Peak

# What torch's allocators say of memory, besides the types that mean nothing else.
_NO_MEMORY = re.compile(r"can't allocate memory|cannot allocate memory|not enough memory|out of memory|bad_alloc", re.I)
_LESS = 0.9  # of what was predicted, where that should have fitted


@dataclass(frozen=True)
class Prediction:
    """What this run should need, and what there was when it began."""

    workload: Workload
    choice: LayoutChoice
    memories: list[RankMemory]
    budget: MemoryBudget
    can_be_many: bool = True  # such devices: of a Mac's there is one

    @property
    def needed(self) -> int:
        return self.budget.needed(self.memories, self.choice.layout)

    @property
    def fits(self) -> bool:
        return self.needed <= self.budget.capacity

    def of_rank(self, rank: int) -> RankMemory:
        layout = self.choice.layout
        return self.memories[rank // (layout.world_size // layout.pp)]

    def amounts(self) -> str:
        who = f"the {self.budget.shared_by} processes of this machine" if self.budget.shared_by > 1 else "this run"
        return f"{who} would need about {amount(self.needed)} for tensors, and {amount(self.budget.capacity)} are free"

    def advice(self, capacity: float) -> list[str]:
        """The three smallest changes; where there are not so many, what makes another model too."""
        budget = MemoryBudget(capacity, self.budget.shared_by)
        smaller = changes.smallest(self.workload, self.choice, budget, may_add_devices=self.can_be_many)
        kept = [change for change in smaller if change.kind != changes.MODEL]
        lines = [f"  {change}" for change in (smaller if len(kept) < 3 else kept)[:4]]
        if not lines:
            return ["Nothing smaller was found: use a larger device, or a smaller model."]
        return ["The smallest changes that keep the global batch:", *lines]


def predict(cfg: RunConfig, setup: Setup) -> Prediction:
    device = setup.world.device
    choice = LayoutChoice(setup.parallel, setup.batch, cfg.train.recompute)
    workload = Workload.from_config(cfg, "cpu" if device.type == "cpu" else "cuda")
    if native_blocks.multiplies_by_itself(cfg.model, cfg.train, cfg.precision.compute, setup.world):
        fp32 = workload.precision.model_copy(update={"compute": "fp32"})  # what is kept of activations
        workload = replace(workload, precision=fp32)
    return Prediction(
        workload, choice, rank_memories(workload, choice), _budget(device), can_be_many=device.type != "mps"
    )


def _budget(device: torch.device) -> MemoryBudget:
    if device.type == "cuda":
        return MemoryBudget(
            torch.cuda.mem_get_info(device)[0]
        )  # of the context that exists by now nothing is left to take
    if device.type == "mps":
        return MemoryBudget(torch.mps.recommended_max_memory())
    processes = rank_env.read(os.environ).local_size
    return MemoryBudget(machine.memory_available(processes), processes)


def check(cfg: RunConfig, setup: Setup, ranks: Ranks) -> Prediction | None:
    """Before the model is built: says so where it will not fit, or refuses. Silent where it will."""
    if cfg.train.check_memory == "off":
        return None
    predicted = ranks.on_all(lambda: predict(cfg, setup))
    too_small = [rank for rank, fits in enumerate(ranks.gather(predicted.fits)) if not fits]
    if not too_small:
        return predicted
    if ranks.rank == too_small[0]:
        text = _warning(predicted, too_small, ranks)
        if cfg.train.check_memory == "warn":
            print(f"warning: {text}", file=sys.stderr, flush=True)
    if cfg.train.check_memory == "refuse":
        texts = ranks.gather(text if ranks.rank == too_small[0] else "")
        raise TrainingError(texts[too_small[0]])
    return predicted


def as_json(predicted: Prediction | None, peak: Peak) -> dict[str, float]:
    """What is written down of a prediction, to be compared with what was measured. `peak`: of one device, without which
    nothing can be said of the time."""
    if predicted is None:
        return {}
    written: dict[str, float] = {"tensor_bytes_of_a_rank": max(each.peak for each in predicted.memories)}
    if peak.flops is not None:
        like = "cpu" if predicted.workload.on_cpu else "a100-80g"
        capacity = max(1.0, predicted.budget.capacity)
        device = devices.custom_device(memory=capacity, tflops=peak.flops / 1e12, like=like)
        written["step_seconds"] = step_time(predicted.workload, predicted.choice, device, devices.link(of=device)).total
    return written


def _warning(predicted: Prediction, too_small: list[int], ranks: Ranks) -> str:
    where = f" (rank {too_small[0]})" if ranks.size > 1 else ""
    fullest = max(predicted.memories, key=lambda each: each.peak)
    return "\n".join(
        [
            f"train.check_memory: {predicted.amounts()}{where}.",
            f"  {breakdown(fullest)}",
            *predicted.advice(predicted.budget.capacity),
        ]
    )


@contextmanager
def explained(world: World, predict: Callable[[], Prediction], known: Prediction | None = None) -> Iterator[None]:
    """Around all that takes memory: running out of it is told with what was predicted, and what would be smaller."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        if not is_out_of_memory(error):
            raise
        raise TrainingError(_explain(error, world, known or predict(), known)) from error


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))


def _explain(error: BaseException, world: World, predicted: Prediction, known: Prediction | None) -> str:
    who = f"rank {world.rank}, " if world.layout.world_size > 1 else ""
    reason = " ".join(str(error).split())[:240] or type(error).__name__
    mine = predicted.of_rank(world.rank)
    # What is free now says little: the failed step may still hold its tensors.
    capacity = predicted.budget.capacity if known and not known.fits else predicted.needed * _LESS
    return "\n".join(
        [
            f"out of memory ({who}{world.device}): {reason}",
            f"Predicted: {amount(mine.peak)} of tensors: {breakdown(mine)}.",
            *predicted.advice(capacity),
        ]
    )
