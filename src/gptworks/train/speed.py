"""How fast it goes: tokens per second, and which share of what the device can multiply."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gptworks.config.schema import ModelConfig
from gptworks.plan import sizes


@dataclass(frozen=True)
class Speed:
    tokens_per_sec: float
    steps_per_sec: float
    reader_seconds: float  # per step, spent waiting for data
    mfu: float


class Stopwatch:
    """Counts steps and tokens between laps, leaving out evaluation and saving."""

    def __init__(self, model: ModelConfig, seq_len: int, *, peak: float) -> None:
        self.flops_per_token = sizes.flops_per_token(model, seq_len)
        self.peak = peak
        self._start_lap()

    def _start_lap(self) -> None:
        self.started = time.perf_counter()
        self.steps = self.tokens = 0
        self.reader = 0.0

    def count(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    @contextmanager
    def reading(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.reader += time.perf_counter() - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def lap(self) -> Speed:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        rate = self.tokens / seconds
        achieved = rate * self.flops_per_token
        self.peak = max(self.peak, achieved)  # it was measured while something else was running
        mfu = achieved / self.peak
        speed = Speed(rate, self.steps / seconds, self.reader / max(1, self.steps), mfu)
        self._start_lap()
        return speed


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product, measured: what MFU is a share of."""
    size = 8192
    if device.type == "cpu":  # where half precision may take a hundred times as long
        size = 1024 if dtype == torch.float32 else 256
    a = torch.ones(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(4):
        _synchronize(device)
        before = time.perf_counter()
        a @ a
        _synchronize(device)
        best = min(best, time.perf_counter() - before)
    return 2 * size**3 / best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
