"""Exported folders as the documents promise them. Rows of the conformance list: S2-10, S2-11."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

PROMPTS = ["Question: Where is the sea?\nAnswer:", "Question: Who was the captain?\nAnswer:"]
# Runs a script where gptworks cannot be imported, whatever is installed.
ALONE = """
import runpy, sys
sys.modules["gptworks"] = None
try:
    import gptworks
except ImportError:
    print("gptworks: none", file=sys.stderr)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAIN_FILES = {"hf": ("config.json", "model.safetensors"), "torch": ("model.pt2",)}
MAIN_FILES |= {"onnx": ("model.onnx", "model.onnx.data")}


@pytest.fixture(scope="module")
def source(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=512, max_positions=64)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.25), 2, seed=4))
    path = tmp_path_factory.mktemp("s2_10")
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def exported(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def one(to: str) -> Path:
        if to == "onnx":
            pytest.importorskip("onnx")
            pytest.importorskip("onnxruntime")
        if to not in made:
            out = tmp_path_factory.mktemp(to) / "out"
            assert main(["export", "--model", str(source), "--to", to, "--out", str(out)]) == 0
            made[to] = out
        return made[to]

    return one


def expected(source: Path, count: int) -> list[Any]:
    model = gptworks.GPT.from_pretrained(source)
    return gptworks.generations(model, PROMPTS, strategy="greedy", max_new_tokens=count)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "torch", "onnx"])
def test_s2_10_files_by_their_names(to: str, exported: Callable[[str], Path]) -> None:
    names = {path.name for path in exported(to).iterdir()}
    assert {"vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"} <= names
    assert {*MAIN_FILES[to], "model.info.json"} <= names
    info = json.loads((exported(to) / "model.info.json").read_text())
    assert {"name": "x", "shape": [], "dtype": ""}.keys() == info["parameters"][0].keys()
    assert any("[batch, length]" in shape for shape in info["inputs"].values())


@pytest.mark.slow
@pytest.mark.parametrize("to", ["hf", "torch", "onnx"])
def test_s2_10_the_folder_runs_without_our_package(
    to: str, source: Path, exported: Callable[[str], Path], tmp_path: Path
) -> None:
    (first, _) = expected(source, 12)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", ALONE, str(exported(to) / "run.py"), PROMPTS[0], "12"]
    done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert "gptworks: none" in done.stderr
    assert done.stdout == first.prompt + first.text + "\n"


@pytest.mark.parametrize("to", ["torch", "onnx"])
def test_s2_10_batch_and_length_are_free(to: str, source: Path, exported: Callable[[str], Path]) -> None:
    folder, model = exported(to), gptworks.GPT.from_pretrained(source)
    program = torch.export.load(folder / "model.pt2").module() if to == "torch" else None
    for rows, length in ((1, 1), (1, 64), (5, 7)):
        tokens = torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(length))
        if program is not None:
            found, _ = program(tokens, torch.zeros(rows, dtype=torch.long), torch.zeros(2, 2, rows, 4, 0, 8))
        else:
            import onnxruntime

            session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
            given = {each.name: torch.zeros(rows, 4, 0, 8).numpy() for each in session.get_inputs()}
            given |= {"input_ids": tokens.numpy(), "attention_mask": torch.ones_like(tokens).numpy()}
            given["position_ids"] = torch.arange(length).expand(rows, -1).numpy()
            found = torch.from_numpy(session.run(["logits"], given)[0])
        with torch.no_grad():
            torch.testing.assert_close(found, model(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("to", ["hf", "torch", "onnx"])
def test_s2_11_infer_runs_that_folder(
    to: str, source: Path, exported: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = exported(to)
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    capsys.readouterr()
    assert main(["infer", str(folder), "--prompts", str(file), "--max-new-tokens", "12", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = expected(source, 12)
    assert [each["tokens"] for each in found] == [each.tokens for each in wanted]
    assert [each["text"] for each in found] == [each.text for each in wanted]
