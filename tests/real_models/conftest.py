"""Where the models and the peers are. `make real-models` fetches the one and installs the other."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from real_model_places import MODELS, needed

from gptworks.checkpoint.convert import convert


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return needed(MODELS / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def stories() -> Path:
    return needed(MODELS / "stories15M" / "model.bin")


@pytest.fixture(scope="session")
def smollm2_folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The numbers of the GGUF in fp32, as a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("smollm2") / "hf"
    convert(smollm2, folder, "hf", verify=True)
    return folder


@pytest.fixture(scope="session")
def peer() -> Callable[..., Any]:
    """Runs a program in the environment of the peers; its last line is JSON."""
    python = os.environ.get("GPTWORKS_PEERS_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_PEERS_PYTHON is not set: a Python with llama-cpp-python, gguf, accelerate and lm_eval")

    def run(program: str, *args: object) -> Any:
        done = subprocess.run(
            [python, "-c", program, *map(str, args)],
            capture_output=True,
            text=True,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
