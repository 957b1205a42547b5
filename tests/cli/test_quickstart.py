"""`make quickstart` as it stands in the Makefile, but for the installation."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def quickstart_commands() -> list[str]:
    """The gptworks lines of the target, with make's variables filled in."""
    makefile = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+)\s*:= (.+)$", makefile, re.MULTILINE))
    target = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert target
    lines = [line.strip() for line in target[1].splitlines() if "$(BIN)/gptworks" in line]
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], line.replace("$(BIN)/", "")) for line in lines]


def test_the_quickstart_is_six_commands_that_work(
    tmp_path: Path, corpus_file: Path, call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, but in this process, of a small text and for few steps."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    monkeypatch.chdir(tmp_path)
    smaller = {"sample:python": str(corpus_file), "4096": "512"}
    fewer = ["model.vocab_size=512", "data.split=90,10", "train.steps=4", "optim.warmup_steps=2", "run.threads=1"]
    fewer += ["train.log_every=2"]
    printed = {}
    for command in quickstart_commands():
        words = [smaller.get(word, word) for word in shlex.split(command)[1:]]
        printed[words[0]] = call(*words, *(fewer if words[0] == "train" else [])).out
    assert list(printed) == ["prepare", "train", "eval", "generate", "plot", "report"]
    assert "step 4/4" in printed["train"] and "gzip -9" in printed["eval"] and "loss" in printed["plot"]
    assert (tmp_path / "runs/quickstart/loss.svg").read_text().startswith("<svg")
    assert printed["report"] == "report: runs/quickstart/report.html\n"
    assert (tmp_path / "runs/quickstart/report.html").is_file()


@pytest.mark.slow
def test_the_quickstart_model_beats_unigram_bigram_and_gzip(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    printed = {}
    for command in quickstart_commands():
        verb = command.split()[1]
        shown = command + (" --json" if verb in {"eval", "generate"} else "")
        done = subprocess.run(
            shown,
            shell=True,
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{shown}\n{done.stdout}\n{done.stderr}"
        printed[verb] = done.stdout
    rows = json.loads(printed["eval"])["rows"]
    model, *baselines = (row["bits_per_byte"] for row in rows)
    assert [row["model"] for row in rows[1:]] == ["unigram (tokens)", "bigram (tokens)", "gzip -9"]
    assert model < min(baselines), rows
    assert len(json.loads(printed["generate"])["text"].split()) > 5
    assert "loss" in printed["plot"]
    assert (tmp_path / "runs/quickstart/loss.svg").read_text().startswith("<svg")
