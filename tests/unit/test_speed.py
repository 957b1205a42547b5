"""What MFU is a share of: the datasheet of a known device, a product measured here, or nothing; and which, said."""

import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks.config.schema import ModelConfig
from gptworks.plan.devices import datasheet_peak
from gptworks.train import speed
from gptworks.train.console import LogLine, gptworks_line
from gptworks.train.speed import Peak, Product, Speed, Stopwatch, find_peak, judge

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
MODEL = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=64, max_positions=16)


# TFLOP/s of dense bf16 and fp32, from the datasheets; names as nvidia-smi and rocminfo print them.
@pytest.mark.parametrize(
    ("name", "bf16", "fp32"),
    [
        ("Tesla V100-SXM2-32GB", 15.7, 15.7),
        ("Tesla V100-PCIE-16GB", 14, 14),
        ("Tesla T4", 8.1, 8.1),
        ("NVIDIA A100-SXM4-80GB", 312, 19.5),
        ("NVIDIA A100-SXM4-40GB", 312, 19.5),
        ("A100-PCIE-40GB", 312, 19.5),
        ("NVIDIA A800-SXM4-80GB", 312, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.4, 66.9),
        ("NVIDIA H100 PCIe", 756, 51),
        ("NVIDIA H800", 989.4, 66.9),
        ("NVIDIA H200", 989.4, 67),
        ("NVIDIA B200", 2250, 75),
        ("NVIDIA L4", 121, 30.3),
        ("NVIDIA L40S", 362.05, 91.6),
        ("NVIDIA GeForce RTX 4090", 165.2, 82.6),
        ("NVIDIA GeForce RTX 3090", 71, 35.6),
        ("AMD Instinct MI300X", 1307.4, 163.4),
    ],
)
def test_a_known_device_has_the_peak_of_its_datasheet(
    name: str, bf16: float, fp32: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    found = find_peak(CUDA, "bf16")
    assert found.flops == pytest.approx(bf16 * 1e12)
    assert found.source == f"datasheet of {name}, dense bf16"
    assert find_peak(CUDA, "fp32").flops == pytest.approx(fp32 * 1e12)


def test_devices_without_bf16_units_have_fp16_ones() -> None:
    for name, fp16 in (("Tesla V100-SXM2-16GB", 125e12), ("Tesla T4", 65e12)):
        known = datasheet_peak(name)
        assert known is not None and known["fp16"] == fp16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A100-SXM4-80GB MIG 3g.40gb",  # a part of one
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "GRID A100X-40C",
        "NVIDIA L40",  # not L4, not L40S
        "NVIDIA H100",
        "",
    ],
)
def test_a_device_that_is_not_in_the_table_is_measured(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(speed, "_products", lambda *_: [Product(0.02), Product(0.01)])
    assert datasheet_peak(name) is None
    assert find_peak(CUDA, "bf16") == Peak(2 * 8192**3 / 0.01, "a product of bf16 measured here")


def test_fp32_by_tf32_units_is_measured_and_other_types_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    monkeypatch.setattr(speed, "_products", lambda *_: [Product(0.01)])
    assert find_peak(CUDA, "fp32").source == "a product of fp32 measured here"
    assert find_peak(CUDA, "bf16").flops == 312e12


def test_a_quiet_cpu_is_measured_by_its_fastest_product() -> None:
    found = judge([Product(0.5, 0.2), Product(0.02, 0.97), Product(0.03, 1.0)], 1024, "measured")
    assert found.flops == 2 * 1024**3 / 0.02
    assert str(found) == "MFU: of 107 GFLOP/s, measured"


def test_a_busy_cpu_has_no_peak() -> None:
    found = judge([Product(0.5, 0.2), Product(0.1, 0.35)], 1024, "measured")
    assert found.flops is None
    said = "MFU is not shown: the CPU was busy when its speed was measured (our threads had 35% of the time). "
    assert str(found) == said + "Beside other work fewer threads are often faster: run.threads=1"


def test_time_on_cores_is_that_of_running_against_that_of_waiting() -> None:
    assert speed._share_of_cores((100, 50), (190, 60)) == 0.9
    assert speed._share_of_cores((0, 0), (0, 0)) == 1.0  # a system that does not count
    before = speed._on_cores()
    assert before[0] > 0
    deadline = time.process_time() + 1.0  # the kernel counts at its ticks
    while speed._on_cores()[0] == before[0] and time.process_time() < deadline:
        sum(range(20_000))
    assert speed._on_cores()[0] > before[0]


class Watched(TorchDispatchMode):
    """The operands of products."""

    def __init__(self) -> None:
        super().__init__()
        self.operands: list[torch.Tensor] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op is torch.ops.aten.mm.default:
            self.operands += args
        return op(*args, **(kwargs or {}))


def test_numbers_that_are_multiplied_are_random() -> None:
    with Watched() as watched:
        speed._products(CPU, torch.float32, 32)
    assert len(watched.operands) == 8
    assert all(operand.std() > 0.5 for operand in watched.operands)


def lap_of(watch: Stopwatch, tokens: int) -> Speed:
    watch.started = time.perf_counter() - 10
    watch.count(tokens)
    return watch.lap()


def test_mfu_is_the_share_of_the_peak_of_all_devices() -> None:
    watch = Stopwatch(MODEL, 16, peak=Peak(1e12, "measured"), num_devices=4)
    found = lap_of(watch, 1000)
    assert found.mfu == pytest.approx(found.tokens_per_sec * watch.flops_per_token / 4e12)
    assert watch.peak == Peak(1e12, "measured")


def test_a_model_that_is_faster_than_the_peak_ends_mfu_and_says_so() -> None:
    watch = Stopwatch(MODEL, 16, peak=Peak(100.0, "a product of fp32 measured here"))
    assert lap_of(watch, 1000).mfu is None
    assert watch.peak.flops is None
    assert "more than 1e-07 GFLOP/s, a product of fp32 measured here" in str(watch.peak)
    assert lap_of(watch, 1).mfu is None, "once wrong is always wrong"


@pytest.mark.parametrize(("mfu", "shown"), [(0.416, "MFU 42%"), (None, "MFU -")])
def test_a_log_line_shows_the_share_or_a_dash(mfu: float | None, shown: str) -> None:
    line = LogLine(1, 2, 0, 0, 3.0, 1e-3, 1e-3, 1.0, Speed(1234.0, 1.0, 0.0, mfu), None)
    assert f"1,234 tok/s  {shown}  ETA 0:01" in gptworks_line(line)
