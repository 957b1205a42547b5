"""llama.cpp loads the Llamas and Qwens that we write, writes our text from them, and makes our ids of a hard text."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.formats import gguf_file
from gptworks.checkpoint.systems import gguf, gguf_q4_0, gguf_vocabulary, registry
from gptworks.tokenizer import Tokenizer, splits
from gptworks.tokenizer.special_tokens import SpecialTokens

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_gguf_llama_kind import KINDS, model_of, weights_of
from test_tokenizers_of_today import HARD, learned, pieces, settings_of_pieces, without_json

assert pieces  # a fixture
pytestmark = pytest.mark.interop

GREEDY = """
import json, sys
from llama_cpp import Llama, llama_cpp
kind = llama_cpp.GGML_TYPE_F32
llama = Llama(sys.argv[1], n_ctx=64, verbose=False, type_k=kind, type_v=kind, flash_attn=False)
found = []
for token in llama.generate(json.loads(sys.argv[2]), top_k=1, temp=0.0, repeat_penalty=1.0):
    found.append(token)
    if len(found) == 24:
        break
print(json.dumps(found))
"""

IDS = """
import json, sys
from llama_cpp import Llama
llama = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(open(sys.argv[2]))
print(json.dumps([llama.tokenize(text.encode(), add_bos=True, special=True) for text in texts]))
"""


@pytest.fixture(scope="module")
def python() -> str:
    found = os.environ.get("GPTWORKS_PEERS_PYTHON")
    if not found:
        pytest.skip("GPTWORKS_PEERS_PYTHON is not set: the Python of an environment with llama-cpp-python and gguf")
    return found


def run(python: str, program: str, *args: object) -> Any:
    done = subprocess.run([python, "-c", program, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids(kind: str, python: str, tmp_path: Path) -> None:
    weights = weights_of(model_of(kind))
    gguf.write(tmp_path / "x.gguf", weights)
    ids = [5, 17, 40, 3]
    found = run(python, GREEDY, tmp_path / "x.gguf", json.dumps(ids))
    for _ in range(24):
        ids.append(int(conversion_check.logits(weights.model, weights.tensors, torch.tensor([ids]))[0, -1].argmax()))
    assert found == ids[4:]


def test_4_bits_are_loaded(python: str, tmp_path: Path) -> None:
    """llama.cpp rounds activations as well: the first token is compared."""
    gguf_q4_0.write(tmp_path / "x.gguf", weights_of(model_of("llama")))
    opened = registry.open_any(tmp_path / "x.gguf")
    ids = [5, 17, 40, 3]
    first = conversion_check.logits(opened.model, opened.tensors, torch.tensor([ids]))[0, -1].argmax()
    assert run(python, GREEDY, tmp_path / "x.gguf", json.dumps(ids))[0] == int(first)


def ids_of_llama_cpp(python: str, settings: dict[str, Any], texts: list[str], folder: Path) -> list[list[int]]:
    gguf_file.write(folder / "x.gguf", {"general.architecture": "llama", **settings}, {})
    (folder / "texts.json").write_text(json.dumps(texts))
    return run(python, IDS, folder / "x.gguf", folder / "texts.json")


@pytest.mark.parametrize("split", splits.ALL, ids=lambda split: split.name)
def test_ids_of_byte_level_vocabularies(split: splits.Split, python: str, tmp_path: Path) -> None:
    special = SpecialTokens(bos_token="<|begin_of_text|>")
    ours = Tokenizer(learned(split), name="x", eod_token="<|eot_id|>", special=special)
    texts = HARD.split("\n")
    if split.composed:  # llama.cpp does not compose characters
        texts = [text for text in texts if not text.startswith("decomposed")]
    settings = without_json(gguf_vocabulary.settings_of(ours, ours.vocab_size, None, []))
    for text, theirs in zip(texts, ids_of_llama_cpp(python, settings, texts, tmp_path), strict=True):
        assert ours.encode_prompt(text) == theirs, text


def test_ids_of_pieces(pieces: Any, python: str, tmp_path: Path) -> None:
    settings = settings_of_pieces(pieces)
    ours = gguf_vocabulary.from_settings(settings, "x")
    assert ours is not None
    plain = {key: value.tolist() if hasattr(value, "tolist") else value for key, value in settings.items()}
    texts = [text for text in HARD.split("\n") if text]
    for text, theirs in zip(texts, ids_of_llama_cpp(python, plain, texts, tmp_path), strict=True):
        assert ours.encode_prompt(text) == theirs, text
