"""A step's micro-batches in the order of a pipeline, as Megatron-LM and FleetX run them."""

from collections.abc import Callable
from typing import Any

import torch

from gptworks.simulate.systems.case import Case
from gptworks.simulate.systems.operations import new
from gptworks.simulate.systems.trace import Recorder


def one_forward_one_backward(
    case: Case, stage: int, forward: Callable[[Any], torch.Tensor], recorder: Recorder
) -> None:
    """One step's micro-batches in the order of the pipeline; more of them than stages change nothing."""
    first, last = stage == 0, stage == case.pp - 1
    count = min(case.accumulate, case.pp + 2) if case.pp > 1 else case.accumulate
    shape = (case.seq_len, case.micro_batch, case.hidden)
    ahead = min(case.pp - 1 - stage, count)
    waiting: list[tuple[Any, torch.Tensor]] = []

    def run_forward() -> None:
        x = None if first else new(*shape).requires_grad_()
        waiting.append((x, forward(x)))
        recorder.synchronize()  # the timers of training.py call torch.cuda.synchronize

    def run_backward() -> None:
        x, out = waiting.pop(0)
        if x is not None:
            x.retain_grad()
        if last:
            torch.autograd.backward(out / count)
        else:
            torch.autograd.backward(out, new(*shape))
        recorder.synchronize()

    for _ in range(ahead):
        run_forward()
    for _ in range(count - ahead):
        run_forward()
        run_backward()
    for _ in range(ahead):
        run_backward()


STEPS = 4  # the first two differ (states are made in the first update); from the third on every step is the same


def forget(p: torch.Tensor) -> None:
    p.grad = None  # added to the buffer (DistributedDataParallel._make_param_hook)
