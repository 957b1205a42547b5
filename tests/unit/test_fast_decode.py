"""Steps of generation in C++, and models whose matrices are kept in fewer bits."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks import child_process, cpu, names
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import UsageError
from gptworks.generate import fast_decode
from gptworks.generate.engine import continue_tokens
from gptworks.generate.fast_decode import MAX_ROWS, Decoder
from gptworks.launch.world import World
from gptworks.model import GPT, inference
from gptworks.model.inference import StoredEmbedding, StoredMatrix, store_weights
from gptworks.parallel.build import FreshWeights, build_gpt

needs_compiler = pytest.mark.skipif(fast_decode.why_not() is not None, reason=f"no fast steps: {fast_decode.why_not()}")
CONFIG = ModelConfig(num_layers=2, hidden_size=48, num_heads=4, vocab_size=301, max_positions=64)
PROMPTS = [[5, 9, 200, 31], [77, 4, 18, 250, 3, 300]]
GREEDY = GenerateConfig(strategy="greedy", max_new_tokens=12)


def model_of(cfg: ModelConfig = CONFIG) -> GPT:
    weights = FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=3)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


def tokens_of(model: GPT, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [found[0].tokens for found in continue_tokens(model, prompts, GREEDY)]


def stepped(model: GPT, tokens_BT: torch.Tensor, read_first: int, decoder: Decoder | None) -> torch.Tensor:
    """The logits after each further token, [T, B, V], through the cache."""
    cache = model.new_cache(len(tokens_BT), tokens_BT.shape[1])
    model(tokens_BT[:, :read_first], cache=cache, last_only=True)
    found = []
    for place in range(read_first, tokens_BT.shape[1]):
        one_B1 = tokens_BT[:, place : place + 1].contiguous()
        found.append(decoder(one_B1, cache) if decoder else model(one_B1, cache=cache, last_only=True))
    return torch.stack(found)


@needs_compiler
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@torch.no_grad()
def test_steps_equal_those_of_the_model(rows: int, kind: str) -> None:
    model = model_of()
    store_weights(model, kind)
    tokens = torch.randint(0, CONFIG.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(rows))
    expected = stepped(model, tokens, 5, None)
    decoder = Decoder.of(model)
    assert decoder is not None
    found = stepped(model, tokens, 5, decoder)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_compiler
@pytest.mark.parametrize(
    "shape",
    [
        {"tied": False},
        {"gelu": "erf"},
        {"gelu": "sigmoid"},
        {"layernorm_eps": 0.1},
        {"hidden_size": 20, "num_heads": 5, "ffn_size": 27, "vocab_size": 3},  # nothing is a multiple of 8
        {"num_layers": 1, "hidden_size": 8, "num_heads": 1, "ffn_size": 1, "vocab_size": 1},
    ],
)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@torch.no_grad()
def test_every_shape_of_model(shape: dict[str, Any], kind: str) -> None:
    cfg = ModelConfig(**(CONFIG.model_dump(exclude={"ffn_size"}) | shape))
    model = model_of(cfg)
    store_weights(model, kind)
    tokens = torch.randint(0, cfg.vocab_size, (3, 9), generator=torch.Generator().manual_seed(1))
    decoder = Decoder.of(model)
    assert decoder is not None
    expected, found = stepped(model, tokens, 1, None), stepped(model, tokens, 1, decoder)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_compiler
@pytest.mark.parametrize("rows", [1, 3, 9])
@torch.no_grad()
def test_two_threads_and_matrices_of_several_chunks(rows: int) -> None:
    cfg = ModelConfig(num_layers=2, hidden_size=520, num_heads=4, vocab_size=301, max_positions=16)
    weights = FreshWeights(InitConfig(std=0.02), cfg.num_layers, seed=3)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()
    tokens = torch.randint(0, cfg.vocab_size, (rows, 12), generator=torch.Generator().manual_seed(1))
    decoder, threads = Decoder.of(model), torch.get_num_threads()
    assert decoder is not None
    torch.set_num_threads(2)
    try:
        found = stepped(model, tokens, 2, decoder)
    finally:
        torch.set_num_threads(threads)
    expected = stepped(model, tokens, 2, None)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_compiler
@torch.no_grad()
def test_the_caches_are_left_alike() -> None:
    model = model_of()
    decoder = Decoder.of(model)
    assert decoder is not None
    caches = [model.new_cache(2, 9) for _ in range(2)]
    for cache in caches:
        cache.counts_B = torch.tensor([2, 4])  # rows of different lengths
        model(torch.tensor([[1, 2, 0, 0], [3, 4, 5, 6]]), cache=cache, last_only=True)
        cache.used = 4
    theirs = model(torch.tensor([[7], [8]]), cache=caches[0], last_only=True)
    ours = decoder(torch.tensor([[7], [8]]), caches[1])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert caches[0].lengths_B.tolist() == caches[1].lengths_B.tolist() == [3, 5]
    assert caches[0].used == caches[1].used
    for name in ("keys_LBNSH", "values_LBNSH"):
        torch.testing.assert_close(getattr(caches[1], name), getattr(caches[0], name), atol=1e-5, rtol=1e-5)


@needs_compiler
def test_what_it_does_not_know_is_left_to_the_model() -> None:
    assert Decoder.of(model_of()) is not None
    assert Decoder.of(model_of().train()) is None
    half = model_of()
    half.compute_dtype = torch.bfloat16
    assert Decoder.of(half) is None
    other = model_of()
    other.head = torch.nn.Linear(48, 301, bias=False)  # type: ignore[assignment]
    assert Decoder.of(other) is None
    stage = model_of()
    del stage.blocks["1"]
    assert Decoder.of(stage) is None
    for cast in (torch.nn.Module.half, torch.nn.Module.bfloat16, torch.nn.Module.double):
        assert Decoder.of(cast(model_of())) is None  # type: ignore[operator]
    hooked = model_of()
    hooked.blocks["0"].register_forward_hook(lambda *_: None)
    assert Decoder.of(hooked) is None
    other = model_of()
    other.blocks["1"].ln2 = torch.nn.Identity()
    assert Decoder.of(other) is None
    model = model_of()
    cache, decoder = model.new_cache(2, 4), Decoder.of(model)
    assert decoder is not None
    assert decoder.suits(torch.zeros(2, 1, dtype=torch.long), cache)
    assert not decoder.suits(torch.zeros(2, 2, dtype=torch.long), cache)
    assert not decoder.suits(torch.zeros(MAX_ROWS + 1, 1, dtype=torch.long), cache)
    cache.used = 4
    assert not decoder.suits(torch.zeros(2, 1, dtype=torch.long), cache), "full"
    cache = model.new_cache(2, 100)
    cache.used = CONFIG.max_positions
    assert not decoder.suits(torch.zeros(2, 1, dtype=torch.long), cache), "no position is left"


@needs_compiler
def test_generation_goes_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps = model_of(), []
    real = Decoder.__call__
    monkeypatch.setattr(Decoder, "__call__", lambda self, *given: steps.append(len(given[0])) or real(self, *given))
    with_it = tokens_of(model)
    assert steps == [2] * 11  # the prompts are read in one go and give the first of 12 tokens
    monkeypatch.setattr(fast_decode, "why_not", lambda: "switched off")
    steps.clear()
    assert tokens_of(model) == with_it
    assert not steps


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("kind", "width", "closeness"), [("bf16", 2, 0.02), ("int8", 1, 0.03)])
@torch.no_grad()
def test_kept_weights_take_less_and_predict_nearly_the_same(
    tied: bool, kind: str, width: int, closeness: float
) -> None:
    cfg = CONFIG.model_copy(update={"tied": tied})
    model, kept = model_of(cfg), model_of(cfg)
    store_weights(kept, kind)
    assert isinstance(kept.wte, StoredEmbedding)
    matrices = {m.values.data_ptr(): m for m in kept.modules() if isinstance(m, StoredMatrix)}
    assert len(matrices) == 4 * 2 + (1 if tied else 2)
    assert all(m.values.element_size() == width for m in matrices.values())
    tokens = torch.tensor([PROMPTS[1]])
    exact, near = model(tokens), kept(tokens)
    assert 0 < (near - exact).abs().max() < closeness * exact.abs().max()
    loss, near_loss = model.loss(tokens), kept.loss(tokens)
    assert abs(near_loss - loss) < closeness * loss


def test_int8_rows_of_zeros_stay_zero() -> None:
    matrix = StoredMatrix(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), "int8")
    assert matrix.rows(slice(None)).tolist() == [[0.0, 0.0], pytest.approx([1.0, -2.0], abs=2 / 127)]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"weights: got 'int4'; needs one of fp32, bf16, int8"):
        store_weights(model_of(), "int4")


def _why_not(home: Path, **env: str) -> str:
    code = "from gptworks.generate import fast_decode; print(fast_decode.why_not())"
    environment = {**os.environ, names.HOME: str(home), **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the library has been built. Copy it to write to it."""
    home = tmp_path_factory.mktemp("built")
    assert _why_not(home) == "None"
    return home


@needs_compiler
def test_it_is_built_once_and_kept(built: Path) -> None:
    (library,) = (built / "kernels").iterdir()
    before = library.stat().st_mtime_ns
    assert _why_not(built) == "None"
    assert library.stat().st_mtime_ns == before


@needs_compiler
def test_a_damaged_library_is_built_anew(built: Path, tmp_path: Path) -> None:
    (library,) = Path(shutil.copytree(built, tmp_path / "home") / "kernels").iterdir()
    whole = library.read_bytes()
    library.write_bytes(b"not a library")
    assert _why_not(tmp_path / "home") == "None"
    assert len(library.read_bytes()) == len(whole)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert _why_not(tmp_path, **{fast_decode.OFF: "off"}) == f"{fast_decode.OFF}=off"
    assert not (tmp_path / "kernels").exists()


def test_without_a_compiler_torch_multiplies(tmp_path: Path) -> None:
    assert _why_not(tmp_path, PATH="", CXX="") == "no C++ compiler found (g++)"


def test_a_compiler_that_fails_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of luck >&2\nexit 1\n")
    broken.chmod(0o755)
    assert _why_not(tmp_path, PATH="", CXX=str(broken)) == f"{broken}: out of luck"


def test_all_kinds_are_listed_once() -> None:
    import argparse

    from gptworks.cli import options

    parser = argparse.ArgumentParser()
    options.add_weights_option(parser)
    (action,) = [a for a in parser._actions if a.dest == "weights"]
    assert tuple(action.choices or ()) == inference.WEIGHTS


@needs_compiler
@pytest.mark.skipif(not child_process.POSSIBLE, reason="it is tried in a forked child")
def test_a_function_that_dies_on_this_processor_is_refused_and_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """-march=native for a processor that advertises what it has not: the first instruction of it is the last."""
    source = tmp_path / "fast_decode.cpp"
    source.write_text('extern "C" void gptworks_decode(const void*, const void*) { __builtin_trap(); }')
    monkeypatch.setattr(fast_decode, "_SOURCE", source)
    compiler = fast_decode.cxx_compilers()[0]
    monkeypatch.setattr(fast_decode, "cxx_compilers", lambda: [compiler])
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path))
    loaded = fast_decode._loaded.__wrapped__
    assert loaded() == (None, f"{compiler}: what it builds dies of SIGILL on {cpu.name()}")
    assert [file.suffix for file in (tmp_path / "kernels").iterdir()] == [".refused"]
    monkeypatch.setattr(child_process, "run", lambda *_: pytest.fail("it was built again"))
    assert "dies of SIGILL" in loaded()[1]
