"""What begins a text: in config.json and generation_config.json of every folder that is written, and in run.py."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import gptworks
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.data.prepare import PrepareJob, prepare
from gptworks.data.store import Store
from gptworks.errors import DataError
from gptworks.export.folder import export
from gptworks.model import GPT
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.special_tokens import SpecialTokens
from gptworks.train.loop import train

BOS, EOS = 512, 511
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAMA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 513, "max_positions": 32,
    "norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def source(small_tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As of Llama 3: a token that begins a text, another that ends it, and tokenizer_config.json asks for the first."""
    folder = tmp_path_factory.mktemp("llama")
    small_tokenizer.save(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<|begin|>"])
    backend.save(str(folder / "tokenizer.json"))
    said = json.loads((folder / "tokenizer_config.json").read_text())
    said |= {"bos_token": "<|begin|>", "add_bos_token": True, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    torch.manual_seed(1)
    cfg = ModelConfig(**LLAMA)
    parameters = {name: 6 * each.detach() for name, each in GPT(cfg).named_parameters() if each.ndim == 2}
    model = GPT(cfg)
    model.load_state_dict(parameters, strict=False)
    huggingface.save(folder, cfg, dict(model.named_parameters()), eod_id=EOS, bos_id=BOS)
    return folder


def ids_in(folder: Path, name: str = "config.json") -> tuple[int | None, int | None]:
    said = json.loads((folder / name).read_text())
    return said["bos_token_id"], said["eos_token_id"]


def test_the_tokenizer_knows_it(source: Path, small_tokenizer: Tokenizer) -> None:
    tokenizer = Tokenizer.from_pretrained(source)
    assert (tokenizer.bos_id, tokenizer.eod_id) == (BOS, EOS) and tokenizer.encode_prompt("x")[0] == BOS
    assert small_tokenizer.bos_id is None


def test_of_a_folder_that_is_converted_saved_or_exported(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "hf", "hf")
    PretrainedGPT.from_pretrained(source).save_pretrained(tmp_path / "saved")
    export(source, "hf", tmp_path / "exported")
    convert(source, tmp_path / "model.gguf", "gguf")
    convert(tmp_path / "model.gguf", tmp_path / "back", "hf")
    for name in ("hf", "saved", "exported", "back"):
        assert ids_in(tmp_path / name) == (BOS, EOS), name
    assert ids_in(tmp_path / "exported", "generation_config.json") == (BOS, EOS)
    roles = json.loads((tmp_path / "exported" / "special_tokens_map.json").read_text())
    assert (roles["bos_token"], roles["eos_token"]) == ("<|begin|>", "<|endoftext|>")


def test_of_the_portable_folder_of_a_run(source: Path, corpus_file: Path, tmp_path: Path) -> None:
    """The prepared data say it; the run needs no folder of the tokenizer."""
    of_source = Tokenizer.from_pretrained(source)
    prepare(PrepareJob([str(corpus_file)], tmp_path / "store", of_source, append_eod=True))
    cfg = from_dict(
        {
            "model": LLAMA,
            "data": {"path": str(tmp_path / "store"), "seq_len": 16},
            "batch": {"global_size": 1},
            "train": {"steps": 1},
            "run": {"out": str(tmp_path / "run"), "device": "cpu"},
        }
    )
    run = train(cfg).folder
    assert ids_in(run / "checkpoints" / "step-00000001" / "portable") == (BOS, EOS)
    of_run = Tokenizer.from_pretrained(run)
    assert of_run.encode_prompt("x") == of_source.encode_prompt("x") == [BOS, *of_source.encode("x")]
    assert of_run.special.chat_template == TEMPLATE


@pytest.mark.parametrize("special", [{"bos_token": 1}, {"adds_bos": "yes"}, {"first": "x"}, ["bos_token"]])
def test_a_sidecar_that_says_something_else(special: object, small_store: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx", ".json", ".tokenizer.json"):
        (tmp_path / f"x{suffix}").write_bytes(small_store.with_name(small_store.name + suffix).read_bytes())
    sidecar = json.loads((tmp_path / "x.json").read_text())
    assert Store(tmp_path / "x").sidecar is not None and "special" not in sidecar  # GPT-2's own are not repeated
    (tmp_path / "x.json").write_text(json.dumps({**sidecar, "special": special}))
    with pytest.raises(DataError, match=r"x\.json: not a store's sidecar \(special"):
        Store(tmp_path / "x")


def test_without_one_the_end_of_a_document_begins_it(small_tokenizer: Tokenizer, tmp_path: Path) -> None:
    cfg = ModelConfig(**{**LLAMA, "vocab_size": 512})
    model = PretrainedGPT(cfg)
    model.tokenizer = small_tokenizer
    model.save_pretrained(tmp_path)
    assert ids_in(tmp_path) == (EOS, EOS)


@pytest.mark.parametrize(
    "to", ["onnx", pytest.param("hf", marks=pytest.mark.slow), pytest.param("torch", marks=pytest.mark.slow)]
)
def test_run_py_begins_a_text_with_it(to: str, source: Path, tmp_path: Path) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnx")
    export(source, to, tmp_path / "out")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "out" / "run.py"), "the cat", "8"], capture_output=True, text=True, check=True
    )
    model = PretrainedGPT.from_pretrained(source)
    (wanted,) = gptworks.generate(model, "the cat", strategy="greedy", max_new_tokens=8, return_full_text=True)
    assert done.stdout.rstrip("\n") == wanted.rstrip("\n")
    other = PretrainedGPT.from_pretrained(source)  # a negative control: without it the text is another
    assert other.tokenizer is not None
    other.tokenizer.special = SpecialTokens()
    (bare,) = gptworks.generate(other, "the cat", strategy="greedy", max_new_tokens=8, return_full_text=True)
    assert bare != wanted
