"""Products that would kill the process. The machine of the tests may have none: a child kills itself in their place."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gptworks import child_process, cpu
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import DeviceError
from gptworks.launch import process_group
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

pytestmark = pytest.mark.skipif(not child_process.POSSIBLE, reason="products are tried by fork, on Linux only")
Kill = Callable[..., None]
SHAPE = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, max_positions=4)


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if nothing had been multiplied, and nothing set, by anybody."""
    monkeypatch.setattr(cpu, "_verdict", None)
    monkeypatch.setattr(cpu.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv(cpu.CAP, "")  # so that it is put back afterwards, whatever is set
    monkeypatch.delenv(cpu.CAP)
    monkeypatch.delenv("DNNL_MAX_CPU_ISA", raising=False)
    was_enabled = torch.backends.mkldnn.enabled
    yield
    torch.backends.mkldnn.set_flags(_enabled=was_enabled)


@pytest.fixture
def kill(monkeypatch: pytest.MonkeyPatch) -> Kill:
    """kill(torch.bfloat16, unless=["AVX2"]): the child dies in that product, unless so capped ("off": no oneDNN)."""

    def replace(*dtypes: torch.dtype, unless: list[str]) -> None:
        def multiply(dtype: torch.dtype) -> None:
            now = os.environ.get(cpu.CAP, "") if torch._C._get_mkldnn_enabled() else "off"
            if dtype in dtypes and now not in unless:
                os.kill(os.getpid(), signal.SIGILL)

        monkeypatch.setattr(cpu, "multiply", multiply)

    return replace


def test_these_tests_multiply_in_a_process_that_was_looked_at(safe_products: cpu.Verdict | None) -> None:
    assert safe_products is not None and not safe_products.unknown


def test_the_real_products_do_no_harm_here_in_whatever_mode_the_caller_is() -> None:
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, *_: Any, **__: Any) -> Any:
            raise AssertionError(f"{function} was seen by the mode of the caller")

    with torch.device("meta"), Refusing():
        assert cpu.examine() == cpu.Verdict()


@pytest.mark.parametrize("cure", ["AVX512_CORE_BF16", "AVX512_CORE", "AVX2"])
def test_the_first_cap_that_survives_is_set_and_said_once(
    cure: str, kill: Kill, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(torch.bfloat16, unless=[cure, "off"])
    assert cpu.settle().deaths == {"bf16": "SIGILL"}
    cpu.settle()
    said = capsys.readouterr().err
    assert os.environ[cpu.CAP] == cure and torch.backends.mkldnn.enabled
    assert said.count("\n") == 1 and said.startswith("note: ") and cpu.name() in said
    assert f"ONEDNN_MAX_CPU_ISA={cure} is set, which cures it" in said and "bf16 (SIGILL)" in said
    cpu.require(torch.bfloat16)


@pytest.mark.parametrize(("variable", "number"), [("RANK", "1"), ("SLURM_PROCID", "3"), ("RANK", "0")])
def test_of_several_ranks_the_first_one_says_it(
    variable: str, number: str, kill: Kill, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, number)
    kill(torch.bfloat16, unless=["AVX512_CORE_BF16"])
    cpu.settle()
    assert os.environ[cpu.CAP] == "AVX512_CORE_BF16"
    assert capsys.readouterr().err.count("note: ") == (number == "0")


def test_nothing_is_changed_or_said_where_nothing_dies(kill: Kill, capsys: pytest.CaptureFixture[str]) -> None:
    kill(unless=[])
    assert cpu.settle() == cpu.Verdict()
    assert cpu.CAP not in os.environ and capsys.readouterr().err == ""


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_a_cap_of_the_user_is_kept_if_it_works(variable: str, kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "AVX512_CORE")
    monkeypatch.setattr(cpu, "multiply", lambda dtype: os.environ[variable] == "AVX512_CORE" or os.abort())
    assert cpu.settle().deaths == {} and os.environ[variable] == "AVX512_CORE"


def test_a_cap_of_the_user_that_dies_is_lowered_never_raised(
    kill: Kill, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(cpu.CAP, "avx512_core_vnni")
    kill(torch.int8, unless=["AVX512_CORE_BF16", "AVX2"])
    cpu.settle()
    assert os.environ[cpu.CAP] == "AVX2"
    assert "ONEDNN_MAX_CPU_ISA=AVX2 is set instead of AVX512_CORE_VNNI" in capsys.readouterr().err


def test_where_torch_was_used_before_us_onednn_is_switched_off(kill: Kill, capsys: pytest.CaptureFixture[str]) -> None:
    kill(torch.bfloat16, torch.float16, unless=["off"])  # no cap has an effect once oneDNN was used
    cpu.settle()
    said = capsys.readouterr().err
    assert not torch.backends.mkldnn.enabled and cpu.CAP not in os.environ
    assert "slow" in said and "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16" in said and said.count("\n") == 1
    cpu.require(torch.bfloat16)


def test_a_type_that_nothing_helps_is_refused_when_it_is_asked_for(
    kill: Kill, capsys: pytest.CaptureFixture[str]
) -> None:
    kill(torch.bfloat16, torch.int8, unless=[])
    world, weights = World(torch.device("cpu")), FreshWeights(InitConfig(), 1, 1)
    with pytest.raises(DeviceError) as caught:
        build_gpt(SHAPE, world, torch.bfloat16, weights)
    said = str(caught.value)
    assert said.startswith(f"bf16 on this CPU ({cpu.name()})") and "SIGILL" in said
    assert "AVX512_CORE_BF16" in said and "without oneDNN" in said and "precision.compute=fp32" in said
    with pytest.raises(DeviceError, match="int8 on this CPU"):
        cpu.require(torch.int8)
    assert "nothing helps bf16, int8, which will be refused" in capsys.readouterr().err
    build_gpt(SHAPE, world, torch.float32, weights)
    cpu.require(torch.float16)
    # A world that is only imagined multiplies nothing, and may be of another machine.
    with process_group.imagined(world.layout, 0) as elsewhere:
        build_gpt(SHAPE, elsewhere, torch.bfloat16, weights)
    with process_group.imagined(world.layout, 0, FakeTensorMode()) as elsewhere:
        assert not elsewhere.computes_on_cpu


def test_where_even_fp32_dies_no_other_type_is_advised(kill: Kill) -> None:
    kill(torch.float32, torch.bfloat16, unless=[])  # fp16 survives, but masters and sums are fp32
    with pytest.raises(DeviceError, match="Use a GPU, or another machine"):
        cpu.require(torch.float32)


def test_the_setting_that_helps_most_types_is_taken(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(dtype: torch.dtype) -> None:
        cured = {"AVX512_CORE": [torch.bfloat16]}.get(os.environ.get(cpu.CAP, ""), [])
        if dtype in (torch.bfloat16, torch.float16) and dtype not in cured:
            os.kill(os.getpid(), signal.SIGILL)

    monkeypatch.setattr(cpu, "multiply", multiply)
    assert cpu.settle().deadly == {"fp16": "SIGILL"} and os.environ[cpu.CAP] == "AVX512_CORE"


def test_a_child_that_hangs_or_raises_hinders_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cpu, "_SECONDS", 0.2)
    monkeypatch.setattr(cpu, "multiply", lambda dtype: time.sleep(60))
    found = cpu.settle()
    assert found.deaths == {} and "fp32: no answer within 0.2 seconds" in found.unknown
    cpu.require(torch.bfloat16)
    assert capsys.readouterr().err == ""


def test_another_system_has_no_probe_and_no_failure(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    kill(torch.bfloat16, unless=[])
    monkeypatch.setattr(child_process, "POSSIBLE", False)
    monkeypatch.setattr(cpu.platform, "system", lambda: "Darwin")
    assert cpu.settle().unknown.endswith("on Darwin")
    cpu.require(torch.bfloat16)
    assert cpu.instructions_in_use() == ""


@pytest.mark.time_limit(60)
def test_where_onednn_is_switched_off_nobody_waits_for_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SECONDS", 3600)
    torch._C._set_mkldnn_enabled(False)
    try:
        assert cpu.instructions_in_use() == ""
    finally:
        torch._C._set_mkldnn_enabled(True)


def test_another_processor_has_no_caps_of_intel(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.platform, "machine", lambda: "aarch64")
    kill(torch.bfloat16, unless=["AVX2", "off"])
    assert cpu.settle().setting == cpu.Setting(use_onednn=False)


def test_name_and_flags_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CPUINFO", tmp_path / "cpuinfo")
    assert cpu.name() and cpu.flags() == []
    text = "processor\t: 0\nmodel name\t: Some CPU: 8573C\nflags\t\t: fpu amx_tile\n\nmodel name\t: Other\n"
    (tmp_path / "cpuinfo").write_text(text, encoding="utf-8")
    assert (cpu.name(), cpu.flags()) == ("Some CPU: 8573C", ["fpu", "amx_tile"])
    assert not cpu.is_intel()
    (tmp_path / "cpuinfo").write_text(f"vendor_id\t: GenuineIntel\n{text}", encoding="utf-8")
    assert cpu.is_intel()


# How fast


@pytest.mark.parametrize(("ratio", "is_said"), [(0.4, True), (1.4, True), (1.6, False)])
def test_a_type_that_is_no_gain_is_told(ratio: float, is_said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "product_speed", lambda kind: ratio)
    assert (f"its products are {ratio}x as fast" in cpu.about_speed("bf16")) is is_said
    assert cpu.about_speed("fp32") == ""


def test_the_speed_of_a_product_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp32 takes 3 ticks, bf16 one."""
    now = 0.0

    def multiply(a: torch.Tensor, b: torch.Tensor) -> None:
        nonlocal now
        now += 3.0 if a.dtype == torch.float32 else 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    monkeypatch.setattr(torch, "mm", multiply)
    assert cpu.product_speed("bf16") == 3.0
