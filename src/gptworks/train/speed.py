"""How fast it goes: tokens per second, and which share of what the device can multiply."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gptworks.config.schema import ModelConfig
from gptworks.plan import sizes
from gptworks.plan.devices import datasheet_peak
from gptworks.train.precision import DTYPES

DATA, FORWARD_BACKWARD, OPTIMIZER, SAVING = "data", "forward_backward", "optimizer", "saving"
# The share of that time from which on a measured speed is taken for that of the machine.
UNDISTURBED = 0.9


@dataclass(frozen=True)
class Speed:
    tokens_per_sec: float
    steps_per_sec: float
    reader_seconds: float  # per step, spent waiting for data
    mfu: float | None  # None where what it is a share of is not known
    seconds: Mapping[str, float] = field(default_factory=dict)  # of a step, by what they were spent on
    saving_seconds: float = 0.0  # since the last lap, in which training waited


@dataclass(frozen=True)
class Peak:
    """What MFU is a share of: FLOP/s of one device, or None where it could not be found out, and where it is from."""

    flops: float | None
    source: str

    def __str__(self) -> str:
        return (
            f"MFU is not shown: {self.source}" if self.flops is None else f"MFU: of {_flops(self.flops)}, {self.source}"
        )


class Stopwatch:
    """Counts steps and tokens between laps, leaving out evaluation and saving."""

    def __init__(self, model: ModelConfig, seq_len: int, *, peak: Peak, num_devices: int = 1) -> None:
        self.flops_per_token = sizes.flops_per_token(model, seq_len)
        self.peak, self.num_devices = peak, num_devices
        self._start_lap()

    def _start_lap(self) -> None:
        self.started = time.perf_counter()
        self.steps = self.tokens = 0
        self.seconds = dict.fromkeys((DATA, FORWARD_BACKWARD, OPTIMIZER, SAVING), 0.0)

    def count(self, tokens: int) -> None:
        self.steps += 1
        self.tokens += tokens

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """A GPU works behind this process: the time of the optimizer is that of asking for it, and the rest of it is in
        the forward and backward passes of the next step."""
        before = time.perf_counter()
        yield
        self.seconds[phase] += time.perf_counter() - before

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def lap(self) -> Speed:
        seconds = max(time.perf_counter() - self.started, 1e-9)
        rate = self.tokens / seconds
        mfu = self._share(rate * self.flops_per_token / self.num_devices)
        steps = max(1, self.steps)
        each = {name: self.seconds[name] / steps for name in (DATA, FORWARD_BACKWARD, OPTIMIZER)}
        speed = Speed(rate, self.steps / seconds, each[DATA], mfu, each, self.seconds[SAVING])
        self._start_lap()
        return speed

    def _share(self, achieved: float) -> float | None:
        """A model that is faster than the peak shows that the peak is wrong: from then on there is none."""
        if self.peak.flops is not None and achieved > self.peak.flops:
            self.peak = Peak(
                None, f"the model does {_flops(achieved)}, more than {_flops(self.peak.flops)}, {self.peak.source}"
            )
        return None if self.peak.flops is None else achieved / self.peak.flops


def find_peak(
    device: torch.device, compute: str, multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
) -> Peak:
    """By the datasheet where the device is known, and measured otherwise. `compute`: fp32, bf16 or fp16; multiply: in
    place of torch's product, one of fp32 matrices."""
    if device.type == "cuda" and (compute != "fp32" or not _uses_tf32()):
        name = torch.cuda.get_device_name(device)
        known = datasheet_peak(name)
        if known is not None:
            return Peak(known[compute], f"datasheet of {name}, dense {compute}")
    size = 8192
    if device.type == "cpu":  # where half precision may take a hundred times as long
        size = 1024 if compute == "fp32" or multiply else 256
    dtype = torch.float32 if multiply else DTYPES[compute]
    return judge(
        _products(device, dtype, size, multiply or torch.matmul), size, f"a product of {compute} measured here"
    )


@dataclass(frozen=True)
class Product:
    """How long a product took, and which share of the time in which its threads wanted to run they ran."""

    seconds: float
    share: float = 1.0


def judge(products: list[Product], size: int, source: str) -> Peak:
    """The fastest of some products of two square matrices, unless even that was disturbed."""
    best = min(products, key=lambda product: product.seconds)
    if best.share < UNDISTURBED:
        return Peak(
            None,
            f"the CPU was busy when its speed was measured (our threads had {best.share:.0%} of the time). Beside "
            "other work fewer threads are often faster: run.threads=1",
        )
    return Peak(2 * size**3 / best.seconds, source)


def _products(
    device: torch.device,
    dtype: torch.dtype,
    size: int,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> list[Product]:
    # Random numbers: of equal ones a GPU multiplies more in a second, since fewer of its wires change.
    a, b = (torch.randn(size, size, generator=torch.Generator(device).manual_seed(i), device=device) for i in (1, 2))
    a, b = a.to(dtype), b.to(dtype)
    products = []
    for _ in range(4):
        _synchronize(device)
        before, earlier = time.perf_counter(), _on_cores()
        multiply(a, b)
        _synchronize(device)
        seconds = max(time.perf_counter() - before, 1e-9)
        products.append(Product(seconds, _share_of_cores(earlier, _on_cores()) if device.type == "cpu" else 1.0))
    return products


def _on_cores() -> tuple[int, int]:
    """Nanoseconds that the threads of this process ran, and that they waited for a core while others had it.

    Linux counts both for every thread: threads that sleep have neither, so it does not matter how many take part.
    """
    ran = waited = 0
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, ValueError):  # it has just ended, or the kernel does not count
            numbers = (thread / "schedstat").read_text(encoding="ascii").split()
            ran, waited = ran + int(numbers[0]), waited + int(numbers[1])
    return ran, waited


def _share_of_cores(before: tuple[int, int], after: tuple[int, int]) -> float:
    """The part that our threads ran of the time in which they wanted to; 1 where nobody counts it."""
    ran, waited = (later - earlier for earlier, later in zip(before, after, strict=True))
    return ran / (ran + waited) if ran + waited > 0 else 1.0


def peak_memory(device: torch.device) -> int:
    """Bytes: what torch has had of a GPU at most; elsewhere what this process has had of the machine, 0 if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    with suppress(ImportError):  # Windows has none
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return 0


def _uses_tf32() -> bool:
    return torch.get_float32_matmul_precision() != "highest"


def _flops(number: float) -> str:
    return f"{number / 1e12:,.4g} TFLOP/s" if number >= 1e12 else f"{number / 1e9:,.3g} GFLOP/s"


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
