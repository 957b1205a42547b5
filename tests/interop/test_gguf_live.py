"""The real `gguf` reads what we write, and the real llama.cpp writes from it what our own engine writes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.formats import gguf_file
from gptworks.checkpoint.systems import gguf, huggingface
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["The sea was calm", "今天天气", "x = [1, 2"]
FILES = {"f32": ("gguf", None), "f16": ("gguf", torch.float16), "q8_0": ("gguf-q8_0", None)}

READ = """
import sys, gguf, numpy as np
found = gguf.GGUFReader(sys.argv[1])
arrays = {each.name: gguf.quants.dequantize(each.data, each.tensor_type) for each in found.tensors}
np.savez(sys.argv[2], **arrays)
import json
settings = {key: field.contents() for key, field in found.fields.items() if not key.startswith("GGUF.")}
types = {each.name: each.tensor_type.name.lower() for each in found.tensors}
print(json.dumps({"settings": settings, "types": types}))
"""

IDS = """
import json, sys
from llama_cpp import Llama
llama = Llama(sys.argv[1], n_ctx=64, verbose=False)
found = []
for token in llama.generate(json.loads(sys.argv[2]), top_k=1, temp=0.0, repeat_penalty=1.0):
    found.append(token)
    if len(found) == 24:
        break
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("GPTWORKS_PEERS_PYTHON")
    if not found:
        pytest.skip("GPTWORKS_PEERS_PYTHON is not set: the Python of an environment with llama-cpp-python and gguf")
    return found


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "own head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is padded, as f32, f16 and q8_0."""
    folder = tmp_path_factory.mktemp("gguf")
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_heads=2, max_positions=128, vocab_size=50304, tied=request.param
    )
    model = build_gpt(config, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.15), 2, seed=3))
    tokenizer = Tokenizer.from_pretrained("gpt2")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    # Rows that are no tokens are never drawn.
    weights["wte.weight" if config.tied else "head.weight"][50257:] = 0
    huggingface.save(folder / "hf", config, weights, eod_id=tokenizer.eod_id)
    tokenizer.save(folder / "hf")
    for name, (to, dtype) in FILES.items():
        convert(folder / "hf", folder / f"{name}.gguf", to, dtype=dtype, verify=True)
    return folder


def run(python: str, *args: str | Path, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [python, *(str(arg) for arg in args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def written(python: str, model: str, folder: Path) -> list[list[Any]]:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    settings = ["--max-new-tokens", "24", "--json", "--device", "cpu", "--strategy", "greedy"]
    out = run(python, "-m", "gptworks", "generate", "--model", model, *prompts, *settings, cwd=folder)
    return [[json.loads(line)[key] for key in ("prompt", "tokens", "text", "finish")] for line in out.splitlines()]


@pytest.mark.parametrize("name", FILES)
def test_the_package_reads_the_same_tensors_and_settings(name: str, python: str, folder: Path) -> None:
    import numpy as np

    theirs = json.loads(run(python, "-c", READ, f"{name}.gguf", "arrays.npz", cwd=folder))
    arrays, ours = np.load(folder / "arrays.npz"), gguf_file.read(folder / f"{name}.gguf")
    assert set(arrays) == ours.tensors.keys()
    for tensor, each in ours.tensors.items():
        assert np.array_equal(arrays[tensor], each.read().float().numpy()), tensor
        assert theirs["types"][tensor] == gguf_file.NAMES[ours.types[tensor]]
    assert theirs["types"]["blk.1.ffn_up.weight"] == name
    assert theirs["settings"].keys() == ours.settings.keys()
    for key, value in ours.settings.items():
        assert theirs["settings"][key] == (value.tolist() if isinstance(value, np.ndarray) else value), key


@pytest.mark.parametrize("name", FILES)
def test_llama_cpp_writes_what_our_engine_writes(name: str, python: str, folder: Path) -> None:
    """Ours computes from the very numbers of the file: what q8_0 made of them too, though llama.cpp then rounds
    activations to 8 bits as well. It is compared by its first tokens."""
    convert(folder / f"{name}.gguf", folder / f"{name} back", "hf", dtype=torch.float32)
    ours, theirs = written(sys.executable, f"{name} back", folder), written(python, f"{name}.gguf", folder)
    if name == "q8_0":
        same = sum(one[1][:4] == other[1][:4] for one, other in zip(ours, theirs, strict=True))
        assert same >= 2
    else:
        assert theirs == ours


def test_a_model_without_words_takes_and_gives_ids(python: str, folder: Path) -> None:
    opened = gguf.open(folder / "f32.gguf", {})
    words = 600
    model = opened.model.model_copy(update={"vocab_size": words})
    tensors = dict(opened.tensors)
    for name in ("wte.weight", "head.weight"):
        if name in tensors:
            rows = tensors[name].read()[:words].clone()
            tensors[name] = type(tensors[name])(rows.shape, rows.dtype, lambda rows=rows: rows)  # type: ignore[misc]
    notes: list[str] = []
    gguf.write(folder / "ids.gguf", Weights(model, tensors, notes=notes))
    assert notes == ["no tokenizer is known: llama.cpp will take and give ids only"]
    found = json.loads(run(python, "-c", IDS, "ids.gguf", "[5, 17, 400, 3]", cwd=folder))
    # Greedy by hand.
    from gptworks.checkpoint import conversion_check

    ids = [5, 17, 400, 3]
    for _ in range(24):
        ids.append(int(conversion_check.logits(model, tensors, torch.tensor([ids]))[0, -1].argmax()))
    assert found == ids[4:]
