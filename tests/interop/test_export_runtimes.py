"""The real CTranslate2 and llama.cpp run what we export, and give our tokens: `make test-interop`."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks.checkpoint.systems import huggingface
from gptworks.checkpoint.systems import registry as systems
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["The sea was calm", "今天天气", "x = [1, 2"]
SHAPES = {
    "tied": {"layernorm_eps": 1e-3},
    "erf": {"gelu": "erf", "tied": False},
    "sigmoid": {"gelu": "sigmoid", "ffn_size": 96},
    "plain": {},
}
ALONE = """
import runpy, sys
sys.modules["gptworks"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("GPTWORKS_PEERS_PYTHON")
    if not found:
        pytest.skip("GPTWORKS_PEERS_PYTHON is not set: the Python of an environment with ctranslate2 and llama-cpp")
    return found


@pytest.fixture(scope="module")
def sources(small_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, changes in SHAPES.items():
        cfg = ModelConfig(
            **{"num_layers": 2, "hidden_size": 64, "num_heads": 2, "max_positions": 128, "vocab_size": 520, **changes}
        )
        std = 0.1 if name == "plain" else 0.4  # of "plain" int8 is made, which louder noise would drown
        model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=std), 2, seed=3))
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(5))
        made[name] = tmp_path_factory.mktemp(name)
        huggingface.save(made[name], cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
        small_tokenizer.save(made[name])
    return made


def run(python: str, *args: str | Path) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [python, *(str(arg) for arg in args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def infer(python: str, folder: Path) -> list[list[Any]]:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    found = run(python, "-m", "gptworks", "infer", folder, *prompts, "--max-new-tokens", "24", "--json").splitlines()
    return [[json.loads(line)[key] for key in ("prompt", "text", "tokens", "finish")] for line in found]


def ours(source: Path) -> list[list[Any]]:
    model = gptworks.GPT.from_pretrained(source)
    found = gptworks.generations(model, PROMPTS, strategy="greedy", max_new_tokens=24)
    return [[each.prompt, each.text, each.tokens, each.finish] for each in found]


def require_likely(source: Path, found: list[list[Any]]) -> None:
    """Weights of noise have many near ties: the first token of int8 is one of our five likeliest of 512."""
    model = gptworks.GPT.from_pretrained(source)
    for prompt, _, tokens, _ in found:
        with torch.no_grad():
            logits = model(torch.tensor([model.tokenizer.encode(prompt)]))[0, -1, :512]
        assert tokens[0] in logits.topk(5).indices.tolist(), prompt


def size(folder: Path) -> int:
    return max(path.stat().st_size for path in folder.iterdir())


@pytest.mark.parametrize("shape", ["tied", "erf", "sigmoid"])
def test_ctranslate2_gives_our_tokens(shape: str, python: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source = sources[shape]
    run(python, "-m", "gptworks", "export", "--model", source, "--to", "ctranslate2", "--out", tmp_path / "out")
    expected = ours(source)
    assert infer(python, tmp_path / "out") == expected
    alone = run(python, "-I", "-c", ALONE, tmp_path / "out" / "run.py", PROMPTS[0], "24")
    assert alone == f"{PROMPTS[0]}{expected[0][1]}\n"


def test_ctranslate2_in_int8(python: str, sources: dict[str, Path], tmp_path: Path) -> None:
    for kind in ("fp32", "int8"):
        out = ["--to", "ctranslate2", "--weights", kind, "--out", tmp_path / kind]
        run(python, "-m", "gptworks", "export", "--model", sources["plain"], *out)
    assert size(tmp_path / "int8") < 0.4 * size(tmp_path / "fp32")
    require_likely(sources["plain"], infer(python, tmp_path / "int8"))


@pytest.mark.skipif("gguf" not in systems.NAMES, reason="no writer of GGUF is registered")
@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_llama_cpp_gives_our_tokens(kind: str, python: str, sources: dict[str, Path], tmp_path: Path) -> None:
    source, out = sources["plain"], tmp_path / "out"
    run(python, "-m", "gptworks", "export", "--model", source, "--to", "gguf", "--weights", kind, "--out", out)
    expected, found = ours(source), infer(python, out)
    if kind == "int8":
        require_likely(source, found)
        return
    assert found == expected
    alone = run(python, "-I", "-c", ALONE, out / "run.py", PROMPTS[0], "24")
    assert alone == f"{PROMPTS[0]}{expected[0][1]}\n"
