"""Hugging Face GPT-2 folders as they occur: complete, sharded, old, from the hub, damaged, hostile."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface, huggingface_families
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import CheckpointError
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt

CFG = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=40, max_positions=12)
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def fresh(cfg: ModelConfig = CFG) -> GPT:
    weights = FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=5)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


def write(folder: Path, model: GPT) -> None:
    huggingface.save(folder, model.cfg, dict(model.named_parameters()), eod_id=39)


@pytest.fixture(scope="module")
def model() -> GPT:
    return fresh()


@pytest.fixture(scope="module")
def logits(model: GPT) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS)


@pytest.fixture
def folder(model: GPT, tmp_path: Path) -> Path:
    write(tmp_path / "hf", model)
    return tmp_path / "hf"


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


def store(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    return PretrainedGPT.from_pretrained(folder)(TOKENS)


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        PretrainedGPT.from_pretrained(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


# What is meant to work


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False},
        {"gelu": "erf", "ffn_size": 24},
        {"gelu": "sigmoid", "layernorm_eps": 1e-3, "dropout_embed": 0.2, "dropout_hidden": 0.3},
    ],
)
def test_a_folder_gives_the_model_back(changes: dict[str, Any], tmp_path: Path) -> None:
    model = fresh(CFG.model_copy(update=changes))
    write(tmp_path, model)
    again = PretrainedGPT.from_pretrained(tmp_path)
    assert again.cfg == model.cfg
    assert not again.training
    for name, parameter in model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


def test_shards(folder: Path, logits: torch.Tensor) -> None:
    tensors = tensors_of(folder)
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, its_names in shards.items():
        safetensors.torch.save_file({name: tensors[name] for name in its_names}, folder / file)
    weight_map = {name: file for file, its_names in shards.items() for name in its_names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits_of(folder), logits)

    (folder / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors is missing" in refused(folder)


@pytest.mark.parametrize("index", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_of_shards(index: str, folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: not an index of shards" in refused(folder)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "before 2020"])
def test_pytorch_model_bin(zipped: bool, folder: Path, logits: torch.Tensor) -> None:
    torch.save(tensors_of(folder), folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    (folder / "model.safetensors").unlink()
    assert torch.equal(logits_of(folder), logits)


def test_safetensors_are_preferred_to_a_pickle(folder: Path, logits: torch.Tensor) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"never looked at")
    assert torch.equal(logits_of(folder), logits)


def test_files_from_the_hub_have_no_prefix_and_carry_masks(folder: Path, logits: torch.Tensor) -> None:
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors_of(folder).items()}
    for layer in range(CFG.num_layers):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 12, 12).tril()
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    store(folder, old)
    assert torch.equal(logits_of(folder), logits)


def test_a_tied_head_may_be_written_out(folder: Path, logits: torch.Tensor) -> None:
    tensors = tensors_of(folder)
    store(folder, tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()})
    assert torch.equal(logits_of(folder), logits)


def test_half_precision_weights_become_fp32(folder: Path, logits: torch.Tensor) -> None:
    store(folder, {name: tensor.half() for name, tensor in tensors_of(folder).items()})
    found = PretrainedGPT.from_pretrained(folder)
    assert {parameter.dtype for parameter in found.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.allclose(found(TOKENS), logits, atol=2e-2)


def test_what_transformers_writes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=12, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3
    )
    torch.manual_seed(0)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert torch.allclose(logits_of(tmp_path), expected, atol=1e-5 * float(expected.abs().max()))


# What is refused, and in which words


def test_missing_and_unexpected_tensors(folder: Path) -> None:
    tensors = tensors_of(folder)
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    store(folder, tensors)
    assert "1 missing: 'transformer.h.1.mlp.c_fc.weight'" in refused(folder)

    write(folder, fresh())
    store(folder, tensors_of(folder) | {"transformer.h.2.ln_1.weight": torch.ones(16), "score.weight": torch.ones(2)})
    assert re.search(r"2 that have no place in the model: '(score|transformer\.h\.2).*, '", refused(folder))


@pytest.mark.parametrize(
    ("name", "shape", "needed"),
    [
        ("transformer.wte.weight", (41, 16), [40, 16]),
        ("transformer.wpe.weight", (8, 16), [12, 16]),
        ("transformer.h.0.attn.c_attn.weight", (16, 50), [16, 48]),
        ("transformer.h.0.attn.c_attn.bias", (47,), [48]),
        ("transformer.h.1.mlp.c_fc.weight", (64, 16), [16, 64]),
        ("transformer.h.1.mlp.c_fc.weight", (16,), [16, 64]),
        ("transformer.ln_f.weight", (1, 16), [16]),
    ],
)
def test_a_tensor_of_another_shape(name: str, shape: tuple[int, ...], needed: list[int], folder: Path) -> None:
    store(folder, tensors_of(folder) | {name: torch.zeros(shape)})
    assert f"'{name}' has shape {list(shape)}, needed {needed}" in refused(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"model_type": "bert"}, "model_type is 'bert', needed one of 'gpt2', 'llama', 'mistral', 'qwen2', 'qwen3'"),
        ({"model_type": None}, "model_type is None"),
        ({"activation_function": "relu"}, "activation_function 'relu', needed one of"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is set"),
        ({"add_cross_attention": True}, "add_cross_attention is set"),
        ({"scale_attn_weights": False}, "scale_attn_weights is off"),
        ({"n_head": 3}, "num_heads: 3 does not divide"),
        ({"n_layer": "two"}, "num_layers: got 'two'"),
        ({"n_embd": -16}, "hidden_size: got -16"),
        ({"attn_pdrop": 2}, "dropout_attention: got 2"),
    ],
)
def test_a_config_that_is_not_ours(values: dict[str, Any], said: str, folder: Path) -> None:
    edit_config(folder, **values)
    message = refused(folder)
    assert said in message
    assert str(folder / "config.json") in message


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_damaged_config(text: str, folder: Path) -> None:
    (folder / "config.json").write_text(text)
    assert "config.json" in refused(folder)


def test_missing_files(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(folder)
    (folder / "config.json").unlink()
    assert "no checkpoint here" in refused(folder)
    with pytest.raises(CheckpointError, match="no such folder"):
        PretrainedGPT.from_pretrained(folder / "nowhere")


@given(st.data())
def test_damaged_safetensors_give_no_other_error(
    model: GPT, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged-safetensors"
    if not folder.is_dir():
        write(folder, model)
        (folder / "good").write_bytes((folder / "model.safetensors").read_bytes())
    good = (folder / "good").read_bytes()
    header = int.from_bytes(good[:8], "little") + 8
    start = data.draw(st.integers(0, header - 1), label="start")
    cut = data.draw(st.integers(0, 8), label="cut")
    bad = good[:start] + data.draw(st.binary(max_size=8), label="inserted") + good[start + cut :]
    if data.draw(st.booleans(), label="truncated"):
        bad = bad[: data.draw(st.integers(0, len(bad)), label="length")]
    (folder / "model.safetensors").write_bytes(bad)
    try:
        PretrainedGPT.from_pretrained(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)


# A pickle from elsewhere


class Calls:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_malicious_pickle_is_not_run(zipped: bool, folder: Path, tmp_path: Path) -> None:
    marker, armed = tmp_path / "marker", tmp_path / "armed"
    torch.save({"w": Calls(f"touch {armed}")}, tmp_path / "x.bin", _use_new_zipfile_serialization=zipped)
    torch.load(tmp_path / "x.bin", weights_only=False)
    assert armed.exists(), "the payload does nothing, so refusing it proves nothing"

    (folder / "model.safetensors").unlink()
    hostile = {**tensors_of_model(), "extra": Calls(f"touch {marker}")}
    torch.save(hostile, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "Refused, and nothing was called" in refused(folder)
    assert not marker.exists()


def tensors_of_model() -> dict[str, torch.Tensor]:
    rules = huggingface_families.GPT2.table.at(fresh().cfg)
    return {rules[name].theirs[0]: p.detach() for name, p in fresh().named_parameters()}


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 cut off", b"\x80\x02}q\x00", b"text"])
def test_a_damaged_pickle(data: bytes, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(data)
    assert re.search(r"pytorch_model\.bin: (cannot be read|begins with)", refused(folder))


def test_a_pickle_of_something_else(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.zeros(2)], folder / "pytorch_model.bin")
    assert "holds a list, needed a dictionary of tensors" in refused(folder)
