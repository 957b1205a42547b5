"""Whatever `generate` opens is served: files of other systems, Llama's kind of model, several at once, a run."""

import json
import re
import subprocess
import sys
import time
import urllib.request
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

GREEDY: dict[str, Any] = {"prompt": "The river", "temperature": 0, "max_tokens": 20}


def expected(path: Path) -> str:
    model = gptworks.GPT.from_pretrained(path)
    (text,) = gptworks.generate(model, "The river", strategy="greedy", max_new_tokens=20)
    return str(text)


def llama_folder(folder: Path, tokenizer: Any) -> Path:
    kind = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
    shape = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "vocab_size": 512, "max_positions": 96}
    cfg = ModelConfig.model_validate({**shape, **kind, "ffn_size": 128})
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.2), 2, seed=6))
    huggingface.save(folder, cfg, dict(model.named_parameters()), eod_id=tokenizer.eod_id)
    tokenizer.save(folder)
    return folder


@pytest.mark.parametrize("kind", ["gguf", "gguf-q8_0", "gptworks", "llama"])
def test_what_generate_opens_is_served(
    base_folder: Path, serving: Callable[..., Any], small_tokenizer: Any, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / ("it.gguf" if kind.startswith("gguf") else "it")
    if kind == "llama":
        llama_folder(path, small_tokenizer)
    else:
        assert main(["convert", str(base_folder), str(path), "--to", kind]) == 0
    with serving({"it": path}, max_batch=1) as served:
        assert served.complete(**GREEDY)["choices"][0]["text"] == expected(path)


def test_models_that_are_asked_at_once_do_not_meet(served: Any, base_folder: Path, chat_folder: Path) -> None:
    """Two models take turns in one thread; each row is of its own."""
    import concurrent.futures

    alone = {"base": expected(base_folder), "chat": expected(chat_folder)}
    assert alone["base"] != alone["chat"]
    names = ["base", "chat"] * 6
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda name: served.complete(model=name, **GREEDY), names))
    assert [(each["model"], each["choices"][0]["text"]) for each in answers] == [(name, alone[name]) for name in names]


@pytest.mark.slow
def test_the_command_follows_a_run_that_trains(base_folder: Path, small_store: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [f"data.path={small_store}", "data.seq_len=32", "model.num_layers=1", "model.hidden_size=32"]
    command += ["model.num_heads=2", "model.vocab_size=512", "model.max_positions=96", "batch.global_size=4"]
    command += ["run.device=cpu", "evaluate.every=0", "train.steps=2", "--out", str(run)]
    assert main(["train", *command]) == 0
    serve = ["serve", "--model", str(run), "--model", f"other={base_folder}", "--port", "0", "--watch"]
    with subprocess.Popen(
        [sys.executable, "-m", "gptworks", *serve, "--max-batch", "2"], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            lines = [server.stdout.readline() for _ in range(3)]
            assert "run: " in lines[0] and "step 2" in lines[0] and "other: " in lines[1]
            found = re.search(r"http://\S+/v1", lines[2])
            assert found
            assert main(["train", "-c", str(run / "config.yaml"), "train.steps=4", "--resume", "auto"]) == 0
            while step_of(found[0]) != 4:
                time.sleep(0.2)
            assert "step 4" in server.stdout.readline()
        finally:
            server.terminate()


def step_of(url: str) -> int:
    with urllib.request.urlopen(f"{url}/models/run") as answer:
        return int(json.load(answer)["gptworks"]["step"])
