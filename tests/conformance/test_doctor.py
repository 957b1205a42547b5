"""`gptworks doctor`, which is for us what `paddle.utils.run_check()` is for PaddleNLP."""

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gptworks.cli.main import main
from gptworks.doctor import machine
from gptworks.launch import gloo_check


class Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """Exit code and findings by name."""

    def ask(*args: str) -> tuple[int, dict[str, dict[str, str]]]:
        code = main(["doctor", "--json", *args])
        said = json.loads(capsys.readouterr().out)
        assert said["ready"] is (code == 0)
        return code, {each["what"]: each for each in said["findings"]}

    return ask


TINY = ("--preset", "tiny-4k", "data.seq_len=32", "batch.global_size=8", "train.steps=100", "checkpoint.every=10")


def test_s2_01_a_machine_that_can_train_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == "ready"
    for what in ("python", "packages", "torch", "device cpu", "gloo", "nccl", "ports", "tokenizer", "C++ kernel"):
        assert f" {what} " in said
    assert "trains in fp32, bf16, fp16" in said


def test_s2_01_what_is_missing_is_named_with_its_cure(
    report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = metadata.version

    def without_torch(name: str) -> str:
        if name == "torch":
            raise metadata.PackageNotFoundError
        return "0.1" if name == "tokenizers" else real(name)

    monkeypatch.setattr(metadata, "version", without_torch)
    code, found = report()
    assert code == 2 and found["packages"]["state"] == "problem"
    assert 'pip install "torch' in found["packages"]["fix"] and '"tokenizers' in found["packages"]["fix"]
    assert "0.1 is installed" in found["packages"]["found"]
    assert main(["doctor"]) == 2
    assert "not ready: 1 problem\n  packages: pip install" in capsys.readouterr().out


def test_s2_01_a_device_that_computes_nothing_useful_is_a_problem(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_try_training", lambda device, precision: "no kernel" if precision != "fp32" else "")
    code, found = report()
    assert code == 0 and found["device cpu"]["state"] == "note" and "fp32" in found["device cpu"]["fix"]
    monkeypatch.setattr(machine, "_try_training", lambda device, precision: "no kernel")
    code, found = report()
    assert code == 2 and "no kernel" in found["device cpu"]["found"]


def test_s2_01_a_network_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gloo_check.gloo() == ""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert gloo_check.gloo(timeout=2.0)


def test_s2_01_a_configuration_with_no_room_for_its_checkpoints(report: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    code, found = report(*TINY)
    assert code == 0 and found["disk"]["state"] == "ok" and "4 checkpoints" in found["disk"]["found"]
    assert found["data.path"]["state"] == "note" and found["memory"]["state"] == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(10**9, 10**9, 1000))
    code, found = report(*TINY)
    assert code == 2 and "checkpoint.keep_last" in found["disk"]["fix"]


def test_s2_01_a_configuration_that_this_machine_cannot_hold(report: Any) -> None:
    code, found = report("--preset", "175B", "batch.global_size=8", "train.steps=10", "run.device=cpu")
    assert code == 2 and "GiB" in found["memory"]["found"] and "parallel.fsdp" in found["memory"]["fix"]


def test_s2_01_the_memory_of_a_configuration_has_its_activations(report: Any) -> None:
    """What the planner says of the same batch, and no longer the same for any of them."""
    small, large = (
        report(*TINY, "run.device=cpu", f"batch.global_size={size}", f"batch.micro_size={size}")[1]["memory"]
        for size in (8, 512)
    )
    amounts = [float(each["found"].split(" GiB")[0].split()[-1].replace(",", "")) for each in (small, large)]
    assert "activations included" in small["found"] and amounts[1] > 4 * amounts[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "what", "said"),
    [
        ("data.path=no/such", "data.path", "gptworks prepare"),
        ("init.checkpoint=no/such", "tiny-4k", "no/such"),
        ("optim.lrr=1", "tiny-4k", "did you mean"),
        ("run.out=/proc/nowhere", "disk", "--out"),
    ],
)
def test_s2_01_what_a_configuration_names_and_is_not_there(report: Any, setting: str, what: str, said: str) -> None:
    code, found = report(*TINY, setting)
    assert code == 2 and said in found[what]["fix"]


def test_s2_01_a_layout_of_several_processes(report: Any, tmp_path: Path) -> None:
    code, found = report(*TINY, "parallel.tp=2", "parallel.dp=2", f"run.out={tmp_path / 'a' / 'b'}")
    assert code == 0 and "4 processes" in found["parallel"]["found"]
    assert str(tmp_path) in found["disk"]["found"]
    code, found = report(*TINY, "parallel.dp=3")
    assert code == 2 and "batch.global_size" in found["tiny-4k"]["fix"]
