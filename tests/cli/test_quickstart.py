"""`make quickstart` as it stands in the Makefile, but for the installation."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def quickstart_commands() -> list[str]:
    """The gptworks lines of the target, with make's variables filled in."""
    makefile = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+)\s*:= (.+)$", makefile, re.MULTILINE))
    target = re.search(r"^quickstart:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    assert target
    lines = [line.strip() for line in target[1].splitlines() if "$(BIN)/gptworks" in line]
    return [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], line.replace("$(BIN)/", "")) for line in lines]


def test_the_quickstart_model_beats_unigram_bigram_and_gzip(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    commands = quickstart_commands()
    assert [command.split()[1] for command in commands] == ["prepare", "train", "eval", "generate", "plot"]
    printed = {}
    for command in commands:
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
