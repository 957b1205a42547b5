"""Every instruction set computes the same: those that fuse products into sums bit for bit, the portable one nearly."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_fast_decode import CLOSENESS, FAMILIES, SIZES, WIDE, model_of, read_rows

from gptworks.config.schema import ModelConfig
from gptworks.generate import fast_decode, kernel_library
from gptworks.generate.fast_decode import Decoder
from gptworks.model import GPT
from gptworks.model.inference import WEIGHTS, store_weights

BY_NAME = {each.name: each for each in kernel_library.INSTRUCTION_SETS}
CROSS_COMPILER, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")
MODELS = {
    "gpt": WIDE,
    "qwen3": ModelConfig(**(WIDE.model_dump(include=set(SIZES)) | FAMILIES["qwen3"])),
}
TOKENS = torch.randint(0, WIDE.vocab_size, (2, 21), generator=torch.Generator().manual_seed(1))


def stored(family: str, kind: str) -> GPT:
    model = model_of(MODELS[family], std=0.1)
    store_weights(model, kind)
    return model


def functions_of(name: str) -> kernel_library.Functions:
    if BY_NAME[name] not in kernel_library.possible():
        pytest.skip(f"this processor has no {name}")
    compilers = kernel_library.cxx_compilers()
    if not compilers:
        pytest.skip("no C++ compiler here")
    functions = kernel_library.opened(compilers[0], BY_NAME[name], fast_decode.read_a_little)
    assert functions.instructions == name
    return functions


def logits_of(name: str, model: GPT, chunk: int) -> torch.Tensor:
    return read_rows(Decoder(model, functions_of(name)), model, TOKENS, chunk)


@pytest.mark.slow  # each instruction set is built
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_avx2_gives_the_bits_of_avx512(family: str, kind: str) -> None:
    model = stored(family, kind)
    assert torch.equal(logits_of("avx2", model, 21), logits_of("avx512", model, 1))


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_vnni_gives_the_bits_of_avx512(family: str, kind: str) -> None:
    model = stored(family, kind)
    assert torch.equal(logits_of("avx512-vnni", model, 21), logits_of("avx512", model, 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["avx512-vnni", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_each_equals_the_model_and_is_independent_of_the_batch(name: str, kind: str) -> None:
    model = stored("gpt", kind)
    found, expected = logits_of(name, model, 21), model(TOKENS)
    assert (found - expected).abs().max() <= CLOSENESS[kind] * expected.abs().max()
    for chunk in (1, 2, 5):
        assert torch.equal(logits_of(name, model, chunk), found), chunk


def emulated(folder: Path, decoder: Decoder, chunk: int) -> torch.Tensor:
    """The logits of all TOKENS by the library for NEON, in an emulator: the model is handed over in a file."""
    program = folder / "neon"
    if not program.exists():
        source = Path(__file__).with_name("read_emulated.cpp")
        flags = ["-O2", "-std=c++17", "-ffp-contract=off", "-fopenmp", "-static", f"-I{kernel_library.SOURCES}"]
        subprocess.run([str(CROSS_COMPILER), *flags, str(source), "-o", str(program)], check=True, capture_output=True)
    tensors = {t.data_ptr(): t for t in decoder._kept}
    rows, length = TOKENS.shape
    with (folder / "model").open("wb") as file:
        file.write(bytes(decoder._model))
        file.write(bytes(decoder._layers))
        file.write(torch.tensor([rows, length, chunk, len(tensors)]).numpy().tobytes())
        file.write(TOKENS.numpy().tobytes())
        for address, tensor in tensors.items():
            raw = ctypes.string_at(address, tensor.nbytes)
            file.write(torch.tensor([address, len(raw)]).numpy().tobytes() + raw)
    done = subprocess.run([str(EMULATOR), str(program), str(folder / "model")], check=True, capture_output=True)
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(rows, length, -1)


@pytest.mark.slow
@pytest.mark.skipif(CROSS_COMPILER is None, reason="no aarch64-linux-gnu-g++ (Debian: g++-aarch64-linux-gnu)")
@pytest.mark.skipif(EMULATOR is None, reason="no qemu-aarch64 (Debian: qemu-user)")
@pytest.mark.parametrize("kind", WEIGHTS)
@torch.no_grad()
def test_neon_equals_the_model_and_is_independent_of_the_batch(kind: str, tmp_path: Path) -> None:
    for family in MODELS:
        model = stored(family, kind)
        decoder, expected = Decoder(model), model(TOKENS)
        found = emulated(tmp_path, decoder, 21)
        assert (found - expected).abs().max() <= CLOSENESS[kind] * expected.abs().max()
        assert torch.equal(emulated(tmp_path, decoder, 1), found)
        if decoder.instructions in ("avx512-vnni", "avx512", "avx2"):
            assert torch.equal(found, read_rows(decoder, model, TOKENS, 21)), "NEON gives other bits"
