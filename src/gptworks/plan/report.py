"""One layout on one kind of device: what it holds, how long a step takes, what a number of tokens costs."""

from dataclasses import dataclass, field, replace
from typing import Any

from gptworks.plan import sizes
from gptworks.plan.budget import MemoryBudget
from gptworks.plan.changes import Change, smallest
from gptworks.plan.devices import Device, Link
from gptworks.plan.memory import TERMS, RankMemory, rank_memories
from gptworks.plan.search import Hardware
from gptworks.plan.time import StepTime, mfu, step_time, tokens_per_second
from gptworks.plan.workload import LayoutChoice, Workload

DAY = 86400.0
_WORTH_SAYING = 1.1  # times as long


@dataclass(frozen=True)
class Report:
    workload: Workload
    choice: LayoutChoice
    device: Device
    link: Link
    memories: list[RankMemory]  # one for each pipeline rank
    time: StepTime
    tokens: float | None = None  # to train on in all
    price: float | None = None  # of a device for an hour
    changes: list[Change] = field(default_factory=list)  # that would make it fit
    times: list[StepTime] = field(default_factory=list)  # of a step after each change
    notes: list[str] = field(default_factory=list)

    @property
    def needed(self) -> int:
        return self.budget.needed(self.memories, self.choice.layout)

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget(self.device.capacity, per_node=self.device.per_node)

    @property
    def fits(self) -> bool:
        return self.needed <= self.device.capacity

    @property
    def devices(self) -> int:
        return self.choice.layout.world_size

    @property
    def machines(self) -> int:
        return -(-self.devices // self.device.per_node)

    @property
    def tokens_per_second(self) -> float:
        return tokens_per_second(self.time, self.choice.batch, self.workload.seq_len)

    @property
    def mfu(self) -> float:
        return mfu(self.time, self.workload, self.choice, self.device)

    @property
    def days(self) -> float | None:
        return self.days_at(self.time)

    def days_at(self, time: StepTime) -> float | None:
        """If a step of the same batch took so long."""
        speed = tokens_per_second(time, self.choice.batch, self.workload.seq_len)
        return self.tokens / speed / DAY if self.tokens else None

    @property
    def device_hours(self) -> float | None:
        return self.days * 24 * self.devices if self.days else None

    @property
    def cost(self) -> float | None:
        return self.device_hours * self.price if self.device_hours is not None and self.price is not None else None

    def parts_of_a_step(self) -> dict[str, float]:
        """Seconds, which add up to the step."""
        parts = {"compute": self.time.compute, "recompute": self.time.recompute, "bubble": self.time.bubble}
        parts |= {f"communication {axis}": exposed for axis, exposed in self.time.communication.items()}
        return parts | {"optimizer": self.time.optimizer}

    def as_dict(self) -> dict[str, Any]:
        batch = self.choice.batch
        return {
            "parameters": sizes.num_parameters(self.workload.model),
            "device": self.device.name,
            "devices": self.devices,
            "machines": self.machines,
            "link": self.link.name,
            "layout": str(self.choice.layout),
            "settings": self.choice.settings(),
            "tokens_per_step": batch.global_size * self.workload.seq_len,
            "capacity": self.device.capacity,
            "needed": self.needed,
            "fits": self.fits,
            "stages": [
                {
                    "stage": each.pp_rank,
                    "layers": each.layers,
                    **{name: getattr(each, name) for name in TERMS},
                    "peak": each.peak,
                    "moment": each.moment,
                    "in_flight": each.in_flight,
                }
                for each in self.memories
            ],
            "step": {
                "seconds": self.time.total,
                "compute": self.time.compute,
                "recompute": self.time.recompute,
                "bubble": self.time.bubble,
                "communication": self.time.communication,
                "hidden_communication": self.time.hidden,
                "optimizer": self.time.optimizer,
            },
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "tokens": self.tokens,
            "days": self.days,
            "device_hours": self.device_hours,
            "cost": self.cost,
            "changes": [
                {
                    "settings": each.settings,
                    "kind": each.kind,
                    "devices": each.devices,
                    "needed": each.needed,
                    "seconds": time.total,
                    "days": self.days_at(time),
                }
                for each, time in zip(self.changes, self.times, strict=True)
            ],
            "notes": self.notes,
        }


def report(
    workload: Workload,
    choice: LayoutChoice,
    device: Device,
    link: Link,
    *,
    tokens: float | None = None,
    price: float | None = None,
    notes: list[str] | None = None,
    hardware: Hardware | None = None,
) -> Report:
    """`hardware`: of another number of devices, for changes that need more of them."""
    notes = [*(notes or []), *_hints(workload, choice, device, link)]
    memories, time = rank_memories(workload, choice), step_time(workload, choice, device, link)
    made = Report(workload, choice, device, link, memories, time, tokens, price, notes=notes)
    if made.fits:
        return made
    changes = smallest(workload, choice, made.budget)
    times = []
    for change in changes:
        there = hardware(change.devices) if hardware and change.devices != made.devices else (device, link)
        times.append(step_time(change.workload, change.choice, *there))
    return replace(made, changes=changes, times=times)


def _hints(workload: Workload, choice: LayoutChoice, device: Device, link: Link) -> list[str]:
    hints = []
    if workload.compiled:
        hints.append("train.compile: memory is that of blocks that are not compiled; compiled ones keep less.")
    compute: str = workload.precision.compute
    seconds: dict[str, float] = {
        kind: step_time(_computing_in(workload, kind), choice, device, link).total for kind in (compute, "bf16", "fp16")
    }
    best = min(("bf16", "fp16"), key=lambda kind: seconds[kind])  # bf16 where both are equal: it needs no loss scaling
    if seconds[compute] < _WORTH_SAYING * seconds[best]:
        return hints
    peak: dict[str, float] = dict(device.peak)
    here, there = (f"{peak[kind] / 1e12:,.4g}" for kind in (compute, best))
    smaller = ", and activations are half as large" if compute == "fp32" else ""
    return [
        *hints,
        f"precision.compute: {compute} has {here} of the {there} TFLOP/s of {device.name}. precision.compute={best} is "
        f"{seconds[compute] / seconds[best]:.1f} times as fast{smaller}.",
    ]


def _computing_in(workload: Workload, kind: str) -> Workload:
    return replace(workload, precision=workload.precision.model_copy(update={"compute": kind}))
