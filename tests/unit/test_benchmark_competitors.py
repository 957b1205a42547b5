"""Benchmarks go on without a competitor that is not installed, does not start, or dies, and say which and why."""

import argparse
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from gptworks import cpu

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
READY = "import os, signal, sys; print('ready', flush=True)\n"
DIE = "os.kill(os.getpid(), signal.SIGILL)\n"


def benchmark(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """As Python finds it when it is started from its folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_race_goes_on_without_those_that_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    programs = {
        "good": f"{READY}for line in sys.stdin: print(2 * int(line), flush=True)",
        "missing": "import no_such_package",
        "dies at once": f"import os, signal\n{DIE}",
        "dies later": f"{READY}for line in sys.stdin:\n  if int(line) == 2: {DIE}  print(int(line), flush=True)",
        "leaves": "raise SystemExit(3)",
        "chatters": "print('hello', flush=True); input()",
    }
    race = benchmark("competitors", monkeypatch).Race(
        {name: [sys.executable, "-c", program] for name, program in programs.items()}, {"absent": "x is not installed"}
    )
    assert race.names == ["good", "dies later"]
    assert [race.ask("good", "1"), race.ask("dies later", "1")] == ["2", "1"]
    assert [race.ask("good", "2"), race.ask("dies later", "2")] == ["4", None]
    assert race.names == ["good"] and race.ask("good", "3") == "6"
    race.show_left_out()
    race.close()
    assert capsys.readouterr().out.splitlines() == [
        "  left out: absent: x is not installed",
        "  left out: missing: ModuleNotFoundError: No module named 'no_such_package'",
        "  left out: dies at once: killed by SIGILL",
        "  left out: leaves: ended with exit code 3",
        "  left out: chatters: said 'hello' instead of ready",
        "  left out: dies later: killed by SIGILL",
    ]


# Answers as the competitor that its arguments name: the first as well as it should, all others die in their turn.
WORKER = """
import json, os, signal, sys
name = next(name for name in ("gptworks fp32", "gptworks", "llama.cpp q8_0", "transformers") if name in sys.argv)
print("ready", flush=True)
for line in sys.stdin:
    if name == "llama.cpp q8_0" or name == "transformers":
        os.kill(os.getpid(), signal.SIGILL)
    print("0.5 1.25" if name == "gptworks" else json.dumps([0.5, [[7] * 128]]), flush=True)
"""


def test_comparisons_go_on_without_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    train, generate = benchmark("train", monkeypatch), benchmark("generate", monkeypatch)
    for module in (train, generate):
        monkeypatch.setattr(module, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(generate, "read_speed", lambda threads, clock: 10.0)
    train.compare("small", ["gptworks", "transformers"], 0.0, seconds=0.0)
    said = capsys.readouterr().out
    assert "0.5 1.25" not in said and "no peer" in said and "     1.25\n" in said
    assert said.endswith("  left out: transformers: killed by SIGILL\n")
    names = ["gptworks fp32", "CTranslate2 int8", "llama.cpp q8_0"]
    asked = argparse.Namespace(only=names, task=["batch 1"], rounds=2, threads=1, shape=["gpt2"], clock="wall")
    generate.compare(asked, {"gpt2": tmp_path}, {"gpt2: CTranslate2 int8": "ctranslate2 is not installed"})
    said = capsys.readouterr().out
    assert "gptworks fp32              256.0" in said and "128 of 128" in said
    assert said.endswith(
        "  left out: gpt2: CTranslate2 int8: ctranslate2 is not installed\n"
        "  left out: gpt2: llama.cpp q8_0: killed by SIGILL\n"
    )


@pytest.mark.parametrize(
    "name", ["train", "generate", "parallel", "prepare", "read", "convert", "startup", "plan_ourselves", "speculate"]
)
def test_every_measurement_names_the_processor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.name() in benchmark("competitors", monkeypatch).machine()
    assert "print(machine())" in (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
