"""Every verb on a machine whose bf16 products kill the process: it multiplies nothing before that is known."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gptworks import child_process, cpu
from gptworks.launch import rank_env
from gptworks.launch.fork_server import ForkServer

pytestmark = pytest.mark.skipif(not child_process.POSSIBLE, reason="products are tried by fork, on Linux only")
BAD = ["bfloat16", "int8"]
API = "import gptworks, torch; gptworks.GPT.from_pretrained({run!r})(torch.zeros(1, 16, dtype=torch.long))"
SHAPE = "num_layers=1, hidden_size=32, num_heads=2, vocab_size=64, max_positions=16"
NEW = f"import gptworks, torch; from gptworks.config import ModelConfig; gptworks.GPT(ModelConfig({SHAPE}))(torch.zeros(1, 16).long())"  # noqa: E501
# Its ranks are processes of their own, which start as those of training do.
LAYOUT = """
import pathlib, tempfile
from gptworks.config.derive import Layout
from gptworks.config.load import load
from gptworks.verify import layout
comparison = layout.plan(load({recipe!r}), Layout.parse("tp2"), steps=1, shrink="never")
with tempfile.TemporaryDirectory() as folder:
    layout.record(comparison, pathlib.Path(folder))
"""
USED = "import torch; torch.nn.functional.gelu(torch.ones(64, 64)); "


@pytest.fixture(scope="module")
def outcomes(recipe: Path, small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("deadly")
    run, out = str(folder / "run"), str(folder / "program")
    text = ["--prompt", "The sea", "--max-new-tokens", "3"]
    train = ["train", "-c", str(recipe), "train.steps=2", "precision.compute=bf16"]
    verbs: dict[str, list[str]] = {
        "train": [*train, "--out", run],
        "train --dry-run": [*train, "--out", str(folder / "dry"), "--dry-run"],
        "generate": ["generate", "--model", run, *text],
        "generate int8": ["generate", "--model", run, "--weights", "int8", *text],
        "eval": ["eval", "--model", run, "--data", str(small_store)],
        "convert": ["convert", run, str(folder / "hf"), "--to", "hf", "--verify"],
        "export": ["export", "--model", run, "--to", "torch", "--out", out],
        "infer": ["infer", out, *text],
        "inspect": ["inspect", run],
        "plot": ["plot", run],
        "verify": ["verify", run],
        "doctor": ["doctor"],
    }
    jobs: dict[str, Any] = {
        name: {"argv": argv, "kills": BAD, "unless": ["SSE41", "off"]} for name, argv in verbs.items()
    }
    jobs["API, weights"] = {"code": API.format(run=run), "kills": BAD, "unless": ["SSE41", "off"]}
    jobs["API, new model"] = {"code": NEW, "kills": BAD, "unless": ["SSE41", "off"]}
    jobs["verify layout"] = {"code": LAYOUT.format(recipe=str(recipe)), "kills": BAD, "unless": ["SSE41", "off"]}
    jobs["torch first"] = {"code": USED + API.format(run=run), "kills": BAD, "unless": ["off"]}
    jobs["no cure"] = {"argv": [*train, "--out", str(folder / "none")], "kills": BAD, "unless": []}
    fp32 = [*train, "precision.compute=fp32", "--out", str(folder / "fp32")]
    jobs["no cure, fp32"] = {"argv": fp32, "kills": BAD, "unless": []}
    jobs["no cure, doctor"] = {"argv": ["doctor", *train[1:]], "kills": BAD, "unless": []}
    program = Path(__file__).with_name("deadly_machine.py")
    done = subprocess.run(
        [sys.executable, program], input=json.dumps(jobs), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "folder": folder}


VERBS = ["train", "generate", "generate int8", "eval", "convert", "export", "infer", "verify layout"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*VERBS, "API, weights", "API, new model"])
def test_what_multiplies_is_capped_before_its_first_product(name: str, outcomes: dict[str, Any]) -> None:
    done = outcomes[name]
    assert done["code"] == 0, done
    assert done["instructions"] == "Intel SSE4.1", "something was multiplied before the cap was set"
    if name != "export":  # it writes a program and multiplies nothing
        assert done["err"].count("ONEDNN_MAX_CPU_ISA=SSE41 is set, which cures it") == 1, done["err"]


@pytest.mark.parametrize("name", ["train --dry-run", "inspect", "plot", "verify"])
def test_what_multiplies_nothing(name: str, outcomes: dict[str, Any]) -> None:
    assert outcomes[name]["code"] == 0, outcomes[name]
    assert outcomes[name]["instructions"] == "Intel SSE4.1"


def test_after_somebody_else_multiplied_onednn_is_switched_off(outcomes: dict[str, Any]) -> None:
    done = outcomes["torch first"]
    # This also shows that the tests above can fail: here the cap came too late.
    assert done["code"] == 0 and done["instructions"] != "Intel SSE4.1"
    assert not done["uses_onednn"]
    assert "oneDNN is switched off, which is slow" in done["err"] and "ONEDNN_MAX_CPU_ISA=SSE41" in done["err"]


def test_a_type_without_a_cure_is_refused_before_anything_is_written(outcomes: dict[str, Any]) -> None:
    done = outcomes["no cure"]
    assert done["code"] == 2 and not (outcomes["folder"] / "none").exists()
    last = done["err"].splitlines()[-1]
    assert last.startswith("error: bf16 on this CPU (") and "SIGILL" in last and "precision.compute=fp32" in last
    assert outcomes["no cure, fp32"]["code"] == 0, outcomes["no cure, fp32"]
    assert (outcomes["folder"] / "fp32" / "checkpoints").is_dir()


def test_the_doctor_tells_of_both(outcomes: dict[str, Any]) -> None:
    cured, lines = outcomes["doctor"], outcomes["doctor"]["out"].splitlines()
    assert cured["code"] == 0 and cured["err"] == ""
    (line,) = (line for line in lines if line.startswith("note     products"))
    assert "bf16 (SIGILL), int8 (SIGILL)" in line and "ONEDNN_MAX_CPU_ISA=SSE41 is set" in line
    (line,) = (line for line in lines if " cpu " in line and "torch uses" in line)
    assert "oneDNN Intel SSE4.1 (capped: ONEDNN_MAX_CPU_ISA=SSE41)" in line
    done = outcomes["no cure, doctor"]
    assert done["code"] == 2 and "PROBLEM  precision.compute" in done["out"]
    assert "nothing helps bf16, int8" in done["out"]


@pytest.mark.slow
def test_all_ranks_of_a_machine_say_it_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are copies of a process that has imported torch and looked; what it found is theirs."""
    (tmp_path / "preloaded.py").write_text(
        "import os, signal, torch\n"
        "from gptworks import cpu\n"
        "def multiply(dtype):\n"
        "    if os.environ.get(cpu.CAP) != 'AVX2' and dtype == torch.bfloat16:\n"
        "        os.kill(os.getpid(), signal.SIGILL)\n"
        "cpu.multiply = multiply\n"
    )
    (tmp_path / "rank.py").write_text(
        "import os, sys\n"
        "from gptworks import cpu\n"
        "cpu.examine = lambda: sys.exit('it was looked at again')\n"
        "assert cpu.settle().setting.cap == os.environ[cpu.CAP] == 'AVX2'\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != cpu.CAP}
    environment |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), rank_env.LOG_DIR: str(tmp_path)}
    ranks = {number: {"RANK": str(number)} for number in range(2)}
    copies = ForkServer([str(tmp_path / "rank.py")], ["preloaded"], ranks, environment)
    codes = [copy.wait() for copy in copies.ranks.values()]
    said = capfd.readouterr().err + "".join(file.read_text() for file in tmp_path.glob("*.log"))
    assert codes == [0, 0], said
    assert said.count("products of bf16 (SIGILL) would kill this process") == 1
