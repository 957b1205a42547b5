"""llm.c's .bin: files made by its recipe are read, and ours are the same bytes."""

import random
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from gptworks.checkpoint import conversion_check
from gptworks.checkpoint.convert import convert
from gptworks.checkpoint.inspect import inspect
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, llmc, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.cli.main import main
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "llmc"
MODEL = ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=48, max_positions=16)


def hf_folder(folder: Path, model: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(3)
    weights = {name: (torch.randn(shape) * 0.1).to(dtype) for name, shape in our_shapes(model).items()}
    huggingface.save(folder, model, weights, eod_id=None)
    return folder


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_logits_of_transformers(name: str) -> None:
    opened = registry.open_any(FIXTURES / f"{name}.bin").require_whole()
    assert (opened.system, opened.model) == ("llmc", MODEL)
    assert {each.dtype for each in opened.tensors.values()} == {
        getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[name])
    }
    expected = np.load(FIXTURES / "expected.npz")
    found = conversion_check.logits(opened.model, opened.tensors, torch.from_numpy(expected["tokens"]))
    wanted = torch.from_numpy(expected["logits"])
    assert (found - wanted).abs().max() <= 1e-5 * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_what_is_written_is_the_same_bytes(name: str, tmp_path: Path) -> None:
    opened = registry.open_any(FIXTURES / f"{name}.bin")
    llmc.write(tmp_path / "x.bin", Weights(opened.model, opened.tensors))
    assert (tmp_path / "x.bin").read_bytes() == (FIXTURES / f"{name}.bin").read_bytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [100, 128, 129])
def test_there_and_back_to_the_bit(dtype: torch.dtype, vocab_size: int, tmp_path: Path) -> None:
    """The padding of the vocabulary is nobody else's matter."""
    source = hf_folder(tmp_path / "hf", MODEL.model_copy(update={"vocab_size": vocab_size}), dtype)
    done = convert(source, tmp_path / "model_00000300.bin", "llmc", verify=True)
    assert done.certificate is not None and done.certificate["tensors"]["different"] == 0
    back = convert(tmp_path / "model_00000300.bin", tmp_path / "back", "hf", verify=True)
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert back.source.model.vocab_size == vocab_size and back.source.about["step"] == 300
    rows = -(-vocab_size // 128) * 128
    assert back.source.about.get("vocabulary") == (f"{rows} rows in the file" if rows != vocab_size else None)


def test_fp16_is_widened_and_that_is_said(tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", MODEL, torch.float16)
    done = convert(source, tmp_path / "x.bin", "llmc", verify=True)
    assert done.certificate is not None and done.certificate["tensors"]["different"] == 0
    assert done.notes == ["llm.c keeps all tensors in fp32 or all in bf16: fp32 was written, which holds them all"]
    assert inspect(tmp_path / "x.bin").as_dict()["dtype"] == ["float32"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tied": False}, "model.tied is false"),
        ({"gelu": "erf"}, "model.gelu is erf, and llm.c computes with tanh"),
        ({"layernorm_eps": 1e-6}, "Write it so all the same with -o model.layernorm_eps=1e-05"),
        ({"ffn_size": 32}, "model.ffn_size is 32, and llm.c computes with 64"),
    ],
)
def test_models_llm_c_does_not_know(change: dict[str, object], message: str, tmp_path: Path) -> None:
    source = hf_folder(tmp_path / "hf", MODEL.model_copy(update=change))
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "x.bin", "llmc")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["hf"]


def test_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name is also that of a format of datasets: what SRC is decides."""
    out = str(tmp_path / "hf")
    assert main(["convert", str(FIXTURES / "fp32.bin"), out, "--to", "hf", "--from", "llmc", "--verify"]) == 0
    assert "28 of 28 tensors equal to the bit" in capsys.readouterr().out
    assert main(["convert", out, str(tmp_path / "x.bin"), "--to", "llmc"]) == 0
    assert (tmp_path / "x.bin").read_bytes() == (FIXTURES / "fp32.bin").read_bytes()
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "x.bin")]) == 0
    assert "x.bin: llmc (llm.c weights)\nmodel: 2 layers of 16, 2 heads" in capsys.readouterr().out


def opened_and_read(path: Path) -> None:
    for each in llmc.open(path, {}).require_whole().tensors.values():
        each.read().sum()


@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        (0, 20240327, "needed 20240326"),
        (1, 1, "version 1 of llm.c's weights, needed 3"),
        (1, 5, "its header announces"),  # half as wide
        (2, 17, "its header announces"),
        (3, 0, "its header has"),
        (3, 129, "its header has"),
        (4, 2**31 - 1, "its header announces"),
        (4, -2, "its header has"),
        (5, 3, "num_heads"),
        (6, 2**31 - 1, "its header announces"),
        (7, 0, "0 rows of the word embedding"),
    ],
)
def test_headers_that_are_wrong(place: int, number: int, message: str, tmp_path: Path) -> None:
    data = bytearray((FIXTURES / "fp32.bin").read_bytes())
    struct.pack_into("<i", data, 4 * place, number)
    (tmp_path / "x.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        opened_and_read(tmp_path / "x.bin")


@pytest.mark.parametrize("count", [60, pytest.param(300, marks=pytest.mark.slow)])
def test_bad_bytes_are_refused_or_read(count: int, tmp_path: Path) -> None:
    whole, rng = (FIXTURES / "fp32.bin").read_bytes(), random.Random(0)
    path = tmp_path / "x.bin"
    refused = 0
    tracemalloc.start()
    for number in range(count):
        data = bytearray(whole)
        if number % 3:
            data[rng.randrange(36)] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        tracemalloc.reset_peak()
        try:
            opened_and_read(path)
        except CheckpointError:
            refused += 1
        assert tracemalloc.get_traced_memory()[1] < 5e6
    tracemalloc.stop()
    assert count / 2 < refused < count


def test_what_is_not_one_of_its_files(tmp_path: Path) -> None:
    assert not llmc.recognise(tmp_path)
    assert not llmc.recognise(tmp_path / "absent")
    (tmp_path / "data.bin").write_bytes(struct.pack("<i", 20240520) + bytes(1020))  # its datasets
    assert not llmc.recognise(tmp_path / "data.bin")
    for name, message in (("absent", "no such file"), (".", "cannot be read"), ("data.bin", "not weights of llm.c")):
        with pytest.raises(CheckpointError, match=message):
            llmc.open(tmp_path / name, {})
    with pytest.raises(CheckpointError, match="float64"):
        tensors = {
            name: in_memory(torch.zeros(shape, dtype=torch.float64)) for name, shape in our_shapes(MODEL).items()
        }
        llmc.write(tmp_path / "x.bin", Weights(MODEL, tensors))
