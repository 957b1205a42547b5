"""The real Paddle and PaddleNLP load what we write, and compute the same. See `make test-interop`."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import fleetx, paddlenlp
from gptworks.checkpoint.systems.contract import SplitSpec, Weights
from gptworks.config.schema import ModelConfig

pytestmark = pytest.mark.interop

FIXTURES = Path(__file__).parents[1] / "fixtures/weights/paddle"
MODEL = ModelConfig(num_layers=4, hidden_size=16, num_heads=4, vocab_size=32, max_positions=16, ffn_size=24)

# All run in Paddle's environment, with the fixtures' folder on the path: a folder and a file for the result are given.
START = """
import sys
import zlib  # before Paddle, which brings another one
import numpy as np
import paddle
from paddlenlp.transformers import GPTConfig, GPTForCausalLM, GPTLMHeadModel, GPTModel

folder, out, tokens = sys.argv[1], sys.argv[2], np.load(sys.argv[3])
"""
CONFIG = """
config = GPTConfig(vocab_size=32, hidden_size=16, num_hidden_layers=4, num_attention_heads=4, intermediate_size=24,
                   max_position_embeddings=16, fuse_attention_qkv=True)
"""
FROM_PRETRAINED = """
model = GPTLMHeadModel.from_pretrained(folder)
model.eval()
bare = GPTModel.from_pretrained(folder)
bare.eval()
hidden = bare(paddle.to_tensor(tokens))
logits = paddle.matmul(hidden, bare.embeddings.word_embeddings.weight, transpose_y=True)
np.savez(out, logits=model(paddle.to_tensor(tokens)).numpy(), bare=logits.numpy(), eos=model.config.eos_token_id,
         heads=model.config.num_attention_heads)
"""
LOAD = """
model = GPTForCausalLM(config)
model.eval()
state = paddle.load(folder + "/model.pdparams")
assert all(isinstance(value, paddle.Tensor) for value in state.values())
missing, unexpected = model.set_state_dict({**state, "lm_head.weight": state["gpt.embeddings.word_embeddings.weight"]})
assert not missing and not unexpected, (missing, unexpected)
meta = paddle.load(folder + "/meta_state.pdopt")
np.savez(out, logits=model(paddle.to_tensor(tokens)).numpy(), step=meta["global_step"])
"""
STAGES = """
from real_pipeline import logits, stages

made = stages(config, 2)
for number, stage in enumerate(made):
    loaded = paddle.load(f"{folder}/mp_00_sharding_00_pp_{number:02d}/model.pdparams")
    assert set(loaded) == set(stage.state_dict()), set(loaded) ^ set(stage.state_dict())
    stage.set_state_dict(loaded)
np.savez(out, logits=logits(made, tokens))
"""
SHARDS = """
# PaddleNLP's own split of the whole state, beside ours.
whole = paddle.load(folder + "/whole/model.pdparams", return_numpy=True)
config.tensor_parallel_degree = 2
for rank in range(2):
    config.tensor_parallel_rank = rank
    actions = GPTForCausalLM._get_tensor_parallel_mappings(config, is_split=True)
    ours = paddle.load(f"{folder}/shards/mp_{rank:02d}_sharding_00_pp_00/model.pdparams", return_numpy=True)
    assert set(ours) == {"_layers." + name for name in whole}
    cut = 0
    for name, array in whole.items():
        action = next((each for ending, each in actions.items() if name.endswith(ending)), None)
        expected = array if action is None else action(array)
        cut += action is not None
        found = ours["_layers." + name]
        assert found.shape == expected.shape and (found == expected).all(), name
    assert cut == 1 + 4 * 6, cut  # words; QKV and the first linear with their biases, two more matrices
np.savez(out, ok=True)
"""
DTYPES = """
import json

found = {name: [str(value.dtype), value.astype("float32").numpy().tolist()]
         for name, value in paddle.load(folder + "/x.pdparams").items()}
np.savez(out, found=json.dumps(found))
"""


@pytest.fixture(scope="module")
def paddle_python() -> str:
    python = os.environ.get("GPTWORKS_PADDLE_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_PADDLE_PYTHON is not set: the Python of an environment with paddlepaddle and paddlenlp")
    return python


def run(python: str, script: str, folder: Path, tmp_path: Path, tokens: Tensor) -> dict[str, np.ndarray]:
    np.save(tmp_path / "tokens.npy", tokens.numpy())
    environment = os.environ | {"PYTHONPATH": str(FIXTURES), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [python, "-c", START + script, str(folder), str(tmp_path / "out.npz"), str(tmp_path / "tokens.npy")]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "out.npz") as found:
        return dict(found)


def ours() -> Weights:
    torch.manual_seed(3)
    tensors = {name: torch.randn(shape).mul(0.3) for name, shape in our_shapes(MODEL).items()}
    return Weights(MODEL, {name: in_memory(tensor) for name, tensor in tensors.items()}, eod_id=31, step=12)


TOKENS = conversion_check.sample_tokens(MODEL)


def expected() -> np.ndarray:
    return conversion_check.logits(MODEL, ours().tensors, TOKENS).numpy()


def close(found: np.ndarray) -> None:
    needed = expected()
    assert np.abs(found - needed).max() < 1e-5 * max(1.0, np.abs(needed).max())


def test_paddlenlp_takes_the_folder(paddle_python: str, tmp_path: Path) -> None:
    folder = tmp_path / "nlp"
    folder.mkdir()
    paddlenlp.write(folder, ours())
    found = run(paddle_python, FROM_PRETRAINED, folder, tmp_path, TOKENS)
    close(found["logits"])
    close(found["bare"])
    assert (found["eos"], found["heads"]) == (31, 4)


def test_a_fused_state_is_loaded(paddle_python: str, tmp_path: Path) -> None:
    folder = tmp_path / "fleetx"
    folder.mkdir()
    fleetx.write(folder, ours())
    found = run(paddle_python, CONFIG + LOAD, folder, tmp_path, TOKENS)
    close(found["logits"])
    assert found["step"] == 12


def test_stages_are_loaded_into_paddles_own_pipeline(paddle_python: str, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    folder.mkdir()
    fleetx.write(folder, ours(), SplitSpec(tp=1, pp=2))
    close(run(paddle_python, CONFIG + STAGES, folder, tmp_path, TOKENS)["logits"])


def test_shards_are_those_that_paddlenlp_cuts(paddle_python: str, tmp_path: Path) -> None:
    for name, cut in (("whole", SplitSpec()), ("shards", SplitSpec(tp=2))):
        (tmp_path / name).mkdir()
        fleetx.write(tmp_path / name, ours(), cut)
    assert run(paddle_python, CONFIG + SHARDS, tmp_path, tmp_path, TOKENS)["ok"]


def test_types_arrive(paddle_python: str, tmp_path: Path) -> None:
    values = torch.tensor([[1.5, -2.0], [0.25, 100.0]])
    kinds = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int64": torch.int64}
    tensors = {name: in_memory(values.to(dtype)) for name, dtype in kinds.items()}
    pdparams.write(tmp_path / "x.pdparams", tensors)
    found = json.loads(str(run(paddle_python, DTYPES, tmp_path, tmp_path, TOKENS)["found"]))
    assert found == {name: [f"paddle.{name}", values.to(dtype).float().tolist()] for name, dtype in kinds.items()}


def test_the_fixtures_can_be_made_again(paddle_python: str, tmp_path: Path) -> None:
    """Fresh files of the real ones give the committed logits."""
    for script in FIXTURES.glob("*.py"):
        (tmp_path / script.name).write_text(script.read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [paddle_python, str(tmp_path / "make_paddle.py")], capture_output=True, text=True, timeout=300,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    with np.load(tmp_path / "expected.npz") as again, np.load(FIXTURES / "expected.npz") as committed:
        assert sorted(again) == sorted(committed)
        for name in committed:
            assert np.abs(again[name] - committed[name]).max() < 1e-5, name
