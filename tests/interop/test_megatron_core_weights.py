"""The real megatron-core loads what we write, strictly, and computes the same; what it writes, we read.

Set GPTWORKS_MEGATRON_PYTHON to an interpreter that has megatron-core 0.16. See `make test-interop`.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, megatron_core, registry
from gptworks.checkpoint.systems.contract import EXACT, SplitSpec, Weights
from gptworks.config.schema import ModelConfig

SCRIPT = Path(__file__).parents[1] / "fixtures" / "weights" / "megatron" / "make_megatron_core.py"

pytestmark = pytest.mark.interop


def megatron(*args: object) -> None:
    python = os.environ.get("GPTWORKS_MEGATRON_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_MEGATRON_PYTHON does not name an interpreter with megatron-core")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [python, "-W", "ignore", str(SCRIPT), *map(str, args)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def same_logits(checkpoint: Path, answers: Path) -> None:
    opened = registry.open_any(checkpoint).require_whole()
    with np.load(answers) as found:
        tokens, theirs = torch.from_numpy(found["tokens"]), torch.from_numpy(found["logits"])
    ours = conversion_check.logits(opened.model, opened.tensors, tokens)
    allowed = EXACT * max(1.0, float(ours.abs().max()))
    assert float((ours - theirs).abs().max()) <= allowed
    assert float(ours.std()) > 0.1  # they are not all alike


@pytest.mark.parametrize(
    ("cut", "tied"),
    [
        (SplitSpec(1, 1), True),
        (SplitSpec(1, 1), False),
        (SplitSpec(2, 1), True),
        (SplitSpec(1, 2), False),
        (SplitSpec(2, 2), True),
    ],
    ids=str,
)
def test_megatron_core_loads_what_we_write(tmp_path: Path, cut: SplitSpec, tied: bool) -> None:
    model = ModelConfig(
        num_layers=4, hidden_size=24, num_heads=4, ffn_size=56, vocab_size=48, max_positions=16, tied=tied,
        gelu="tanh" if tied else "erf", layernorm_eps=1e-4,
    )  # fmt: skip
    torch.manual_seed(3)
    tensors = {
        name: in_memory(torch.randn(shape) * 0.3 + (name.endswith(("ln1.weight", "ln2.weight", "ln_f.weight"))))
        for name, shape in our_shapes(model).items()
    }
    (tmp_path / "hf").mkdir()
    huggingface.write(tmp_path / "hf", Weights(model, tensors))
    done = convert(tmp_path / "hf", tmp_path / "core", "megatron-core", cut=cut, verify=True)
    megatron("compute", done.destination, tmp_path / "answers.npz")
    same_logits(done.destination, tmp_path / "answers.npz")
    same_logits(tmp_path / "hf", tmp_path / "answers.npz")


LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "tied": False, "rope_theta": 500000.0},
    "llama, llama3": {
        **LLAMA, "rope_scaling": {"type": "llama3", "factor": 32.0, "original_max_positions": 8192}, "rope_theta": 500.0
    },
    "llama, linear, biases": {**LLAMA, "bias": "all", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "mistral": {**LLAMA, "num_kv_heads": 1, "sliding_window": 5},
    "qwen2": {**LLAMA, "bias": "qkv"},
    "qwen3": {**LLAMA, "qk_norm": True, "head_size": 8},
    "no positions": {"positions": "none", "num_kv_heads": 2},
}  # fmt: skip


@pytest.mark.parametrize("cut", [SplitSpec(1, 1), SplitSpec(2, 2), SplitSpec(4, 1)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_megatron_core_loads_every_kind_that_we_write(kind: str, cut: SplitSpec, tmp_path: Path) -> None:
    """With 4 ranks there are more of them than heads of keys and values."""
    model = ModelConfig.model_validate({
        "num_layers": 4, "hidden_size": 24, "num_heads": 4, "ffn_size": 56, "vocab_size": 48, "max_positions": 16,
        "layernorm_eps": 1e-4, **KINDS[kind],
    })  # fmt: skip
    torch.manual_seed(3)
    tensors = {
        name: in_memory(torch.randn(shape) * 0.3 + (len(shape) == 1 and name.endswith("weight")))
        for name, shape in our_shapes(model).items()
    }
    (tmp_path / "core").mkdir()
    megatron_core.write(tmp_path / "core", Weights(model, tensors), cut)
    megatron("compute", tmp_path / "core", tmp_path / "answers.npz")
    same_logits(tmp_path / "core", tmp_path / "answers.npz")


def test_we_read_what_megatron_core_writes(tmp_path: Path) -> None:
    megatron("make", tmp_path)
    for name in ("core", "core-tp2-untied", "core-llama", "core-tp2-qwen3"):
        same_logits(tmp_path / name, tmp_path / name / "logits.npz")
