"""Block types of GGUF: what llama.cpp's quantizer wrote is read to the bit as the package `gguf` reads it."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from gptworks.checkpoint.formats import ggml_blocks, gguf_file
from gptworks.checkpoint.lazy_tensor import in_memory
from gptworks.errors import CheckpointError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "weights" / "gguf"
TENSOR = "blk.0.ffn_up.weight"
TYPES = ("f16", "bf16", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
NUMBERS = {name: number for number, name in ggml_blocks.NAMES.items()}


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / "blocks.npz"))


@pytest.mark.parametrize("name", TYPES)
def test_read_to_the_bit(name: str, expected: dict[str, np.ndarray]) -> None:
    file = gguf_file.read(FIXTURES / f"blocks_{name}.gguf")
    assert ggml_blocks.NAMES[file.types[TENSOR]] == name
    found = file.tensors[TENSOR].read().float().numpy()
    assert np.array_equal(found.view(np.uint32), expected[name].view(np.uint32))
    # And it is about what was quantised.
    assert np.abs(found - expected["values"]).max() <= 0.08 * np.abs(expected["values"]).max()


@pytest.mark.parametrize("name", ["q4_0", "q8_0"])
def test_written_to_the_bit(name: str, expected: dict[str, np.ndarray], tmp_path: Path) -> None:
    """The bytes are those of llama.cpp's quantizer."""
    values = torch.from_numpy(expected["values"])
    found = ggml_blocks.quantised(values, NUMBERS[name]).view(np.uint8).reshape(len(values), -1)
    assert np.array_equal(found, expected[f"{name} bytes"])
    gguf_file.write(tmp_path / "x", {}, {TENSOR: in_memory(values)}, {TENSOR: NUMBERS[name]})
    again = gguf_file.read(tmp_path / "x").tensors[TENSOR].read()
    assert np.array_equal(again.numpy(), expected[name])


@pytest.mark.parametrize("name", [name for name in TYPES if name.startswith("q")])
def test_bad_bytes_are_refused_or_read(name: str, tmp_path: Path) -> None:
    whole = (FIXTURES / f"blocks_{name}.gguf").read_bytes()
    rng = random.Random(name)
    path = tmp_path / "x.gguf"
    for _ in range(40):
        data = bytearray(whole)
        at = rng.randrange(len(data))
        data[at : at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, rng.randbytes(4)])
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            for tensor in gguf_file.read(path).tensors.values():
                assert tensor.read().shape == tensor.shape
        except CheckpointError:
            pass


def test_rows_that_are_no_whole_blocks(tmp_path: Path) -> None:
    whole = (FIXTURES / "blocks_q6_k.gguf").read_bytes()
    at = whole.index(TENSOR.encode()) + len(TENSOR) + 4
    (tmp_path / "x.gguf").write_bytes(whole[:at] + (160).to_bytes(8, "little") + whole[at + 8 :])
    with pytest.raises(CheckpointError, match=r"is q6_k with rows that are not a multiple of 256"):
        gguf_file.read(tmp_path / "x.gguf")
