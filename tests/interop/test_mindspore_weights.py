"""The real MindSpore loads what we write, and what it writes is the same file. See `make test-interop`."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import mindspore_ckpt
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.systems import huggingface, mindspore
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

pytestmark = pytest.mark.interop
FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "mindspore"
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=4, vocab_size=48, max_positions=12)

# Runs in MindSpore's environment: loads a file (its checksum too), saves it again, and tells what it found.
LOAD_AND_SAVE = """
import sys
import mindspore as ms
import numpy as np
from mindspore.train import serialization

file, again, out, chunk, checksum = sys.argv[1:]
found = ms.load_checkpoint(file, crc_check=checksum == "1")
np.savez(out, **{name: each.astype(ms.float32).asnumpy() if each.dtype == ms.bfloat16 else each.asnumpy()
                 for name, each in found.items()})
for name, each in found.items():
    print("tensor", name, str(each.dtype))
if chunk != "0":
    serialization.SLICE_SIZE = int(chunk) // 1024
ms.save_checkpoint(found, again, crc_check=checksum == "1")
"""

# The network of make_mindspore.py, filled from a file: its own names, strictly.
LOGITS = """
import importlib.util
import sys
import mindspore as ms
import numpy as np

script, file, tokens, out = sys.argv[1:]
spec = importlib.util.spec_from_file_location("make_mindspore", script)
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU")
net = module.GPT(np.random.default_rng(1))
missing, unused = ms.load_param_into_net(net, ms.load_checkpoint(file), strict_load=True)
assert not missing and not unused, (missing, unused)
np.save(out, np.stack([net.logits(ms.Tensor(row, ms.int32)).asnumpy() for row in np.load(tokens)]))
"""


@pytest.fixture(scope="module")
def mindspore_python() -> str:
    python = os.environ.get("GPTWORKS_MINDSPORE_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_MINDSPORE_PYTHON is not set: the Python of an environment with mindspore")
    return python


def run(*command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(("chunk", "checksum"), [(0, False), (0, True), (2048, True)], ids=["plain", "crc", "chunks"])
def test_names_types_and_values_arrive_and_the_file_is_its_own(
    mindspore_python: str, chunk: int, checksum: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensors = {
        "a.weight": torch.randn(48, 33),
        "a.bias": torch.randn(5).half(),
        "b": torch.randn(40, 3).to(torch.bfloat16),
        "c": torch.arange(-3, 5),
        "d": torch.arange(7, dtype=torch.int32),
        "e": torch.tensor([True, False]),
        "f": torch.randn(2, 3, 4, dtype=torch.float64),
        "step": torch.tensor(3, dtype=torch.int32),
        "long." * 40 + "名": torch.randn(2).to(torch.uint8),
    }
    file, again, out = tmp_path / "ours.ckpt", tmp_path / "theirs.ckpt", tmp_path / "found.npz"
    more = {"chunk_bytes": chunk} if chunk else {}
    stored = {name: in_memory(tensor) for name, tensor in tensors.items()}
    mindspore_ckpt.write(file, stored, checksum=checksum, **more)
    told = run(mindspore_python, "-c", LOAD_AND_SAVE, *map(str, (file, again, out, chunk, int(checksum))))
    kinds = dict(line.split()[1:] for line in told.splitlines() if line.startswith("tensor "))
    assert {name: kind.lower() for name, kind in kinds.items()} == {
        name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()
    }
    with np.load(out) as found:
        for name, tensor in tensors.items():
            expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
            assert found[name].shape == tensor.shape and np.array_equal(found[name], expected.numpy()), name
    assert again.read_bytes() == file.read_bytes()
    assert again.stat().st_mode == file.stat().st_mode


def test_s4_10_a_hugging_face_model_computes_the_same_in_mindspore(mindspore_python: str, tmp_path: Path) -> None:
    """pytorch_model.bin -> .ckpt -> MindSpore's network, its names strictly, and its logits are ours."""
    gpt = build_gpt(MODEL, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, seed=5))
    folder = tmp_path / "hf"
    huggingface.save(folder, MODEL, dict(gpt.named_parameters()), eod_id=47)
    found = huggingface.safetensors_file.read(folder / "model.safetensors")
    torch.save({name: each.read().clone() for name, each in found.items()}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    convert(folder, tmp_path / "gpt2.ckpt", "mindspore", verify=True)
    tokens = conversion_check.sample_tokens(MODEL)
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    script = str(FIXTURES / "make_mindspore.py")
    run(
        mindspore_python,
        "-c",
        LOGITS,
        script,
        *(str(tmp_path / name) for name in ("gpt2.ckpt", "tokens.npy", "out.npy")),
    )
    theirs = torch.from_numpy(np.load(tmp_path / "out.npy"))
    with torch.no_grad():
        assert (gpt.eval()(tokens) - theirs).abs().max() < 1e-5


def test_the_fixtures_are_what_mindspore_writes_today(mindspore_python: str, tmp_path: Path) -> None:
    script = tmp_path / "make_mindspore.py"
    script.write_text((FIXTURES / script.name).read_text(encoding="utf-8"), encoding="utf-8")
    run(mindspore_python, str(script))
    for name in ("types.ckpt", "chunks.ckpt"):
        assert (tmp_path / name).read_bytes() == (FIXTURES / name).read_bytes(), name
    one, other = (mindspore.open(each / "rank_0", {"num_heads": 4}) for each in (tmp_path, FIXTURES))
    for name, each in one.require_whole().tensors.items():
        assert torch.allclose(each.read(), other.tensors[name].read(), atol=1e-5), name
