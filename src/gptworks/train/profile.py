"""A profiler trace of a few steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch


class Profiler(Protocol):
    def step(self) -> None: ...


class _Off:
    def step(self) -> None:
        pass


@contextmanager
def profiled(steps: tuple[int, ...], run: Path, resumed_step: int) -> Iterator[Profiler]:
    """A Chrome trace of steps [first, last] in RUN/profile; nothing when they are over or none were asked for."""
    if not steps or steps[1] <= resumed_step:
        yield _Off()
        return
    first, last = max(steps[0], resumed_step + 1), steps[1]
    plan = torch.profiler.schedule(wait=first - resumed_step - 1, warmup=0, active=last - first + 1, repeat=1)
    target = run / "profile"
    target.mkdir(exist_ok=True)

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(target / f"steps-{first}-{last}.json"))

    with torch.profiler.profile(schedule=plan, on_trace_ready=write, record_shapes=True) as profile:
        yield profile
