"""The real llama.cpp writes from a GGUF of our weights what our own engine writes: `make test-interop`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

pytestmark = pytest.mark.interop

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ModelConfig(num_layers=2, hidden_size=64, num_heads=2, max_positions=128)
PROMPTS = ["The sea was calm", "今天天气", "x = [1, 2"]


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("GPTWORKS_PEERS_PYTHON")
    if not found:
        pytest.skip("GPTWORKS_PEERS_PYTHON is not set: the Python of an environment with llama-cpp-python and gguf")
    return found


@pytest.fixture(scope="module")
def folder(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    model = build_gpt(CONFIG, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.4), 2, seed=3))
    tokenizer = Tokenizer.from_pretrained("gpt2")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    huggingface.save(folder / "hf", CONFIG, weights, eod_id=tokenizer.eod_id)
    tokenizer.save(folder / "hf")
    for file, kind in {"f32.gguf": "gguf", "q8_0.gguf": "gguf-q8_0"}.items():
        run(sys.executable, "-m", "gptworks", "convert", "hf", file, "--to", kind, cwd=folder)
    return folder


def run(python: str, *args: str | Path, cwd: Path, expect: int = 0) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [python, *(str(arg) for arg in args)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == expect, done.stderr[-3000:]
    return done


def written(python: str, model: str, folder: Path, *more: str) -> list[dict[str, object]]:
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    settings = ["--max-new-tokens", "24", "--json", "--device", "cpu", *more]
    done = run(python, "-m", "gptworks", "generate", "--model", model, *prompts, *settings, cwd=folder)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_greedy_tokens_and_texts_are_ours(python: str, folder: Path) -> None:
    ours = written(sys.executable, "hf", folder, "--strategy", "greedy")
    theirs = written(python, "f32.gguf", folder, "--strategy", "greedy")
    keys = ("prompt", "tokens", "text", "finish")
    assert [[one[key] for key in keys] for one in theirs] == [[one[key] for key in keys] for one in ours]
    assert theirs[0]["score"] is None


def test_stop_strings_and_streams(python: str, folder: Path) -> None:
    (first, *_) = written(python, "f32.gguf", folder, "--strategy", "greedy")
    text = str(first["text"])
    stop = text[len(text) // 2 :][:3]
    stopped = written(python, "f32.gguf", folder, "--strategy", "greedy", "--stop", stop)[0]
    assert stopped["finish"] == "stop" and stopped["text"] == text[: text.index(stop)]
    command = ["generate", "--model", "f32.gguf", "--prompt", PROMPTS[0], "--strategy", "greedy", "--stream"]
    streamed = run(python, "-m", "gptworks", *command, "--max-new-tokens", "24", cwd=folder)
    assert streamed.stdout == PROMPTS[0] + text + "\n"


def test_sampling_repeats_itself_with_its_seed(python: str, folder: Path) -> None:
    first = written(python, "q8_0.gguf", folder, "--seed", "7", "--top-k", "50")
    assert written(python, "q8_0.gguf", folder, "--seed", "7", "--top-k", "50") == first
    assert written(python, "q8_0.gguf", folder, "--seed", "8", "--top-k", "50") != first


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strategy", "beam", "--num-beams", "2"], "beam"),
        (["--no-repeat-ngram", "2"], "--no-repeat-ngram: is set, but --engine llama.cpp has no such setting"),
        (["--weights", "int8"], "--weights int8: a GGUF file says itself"),
        (["--max-new-tokens", "400"], "the model's context is 128"),
    ],
)
def test_what_it_cannot_do_is_refused(python: str, folder: Path, more: list[str], message: str) -> None:
    command = ["-m", "gptworks", "generate", "--model", "f32.gguf", "--prompt", "a", *more]
    assert message in run(python, *command, cwd=folder, expect=2).stderr


def test_a_file_that_is_no_gguf(python: str, folder: Path) -> None:
    (folder / "bad.gguf").write_bytes(b"GGUF nonsense")
    done = run(python, "-m", "gptworks", "generate", "--model", "bad.gguf", "--prompt", "a", cwd=folder, expect=2)
    assert "bad.gguf: llama.cpp cannot read it" in done.stderr
