"""The fast product of a few rows, and models whose matrices are kept in fewer bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from gptworks import names
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import UsageError
from gptworks.generate.engine import continue_tokens
from gptworks.model import GPT, fast_linear, inference
from gptworks.model.inference import StoredEmbedding, StoredLinear, StoredMatrix, predictor, store_weights
from gptworks.parallel.apply import FreshWeights, build
from gptworks.parallel.launch import World

needs_compiler = pytest.mark.skipif(
    fast_linear.why_not() is not None, reason=f"no fast product: {fast_linear.why_not()}"
)
CONFIG = ModelConfig(num_layers=2, hidden_size=48, num_heads=4, vocab_size=301, max_positions=64)
PROMPTS = [[5, 9, 200, 31], [77, 4, 18, 250, 3, 300]]
GREEDY = GenerateConfig(strategy="greedy", max_new_tokens=12)


def model_of(cfg: ModelConfig = CONFIG) -> GPT:
    weights = FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=3)
    return build(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


def tokens_of(model: GPT, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [found[0].tokens for found in continue_tokens(model, prompts, GREEDY)]


@needs_compiler
@pytest.mark.parametrize("rows", range(1, 10))
@pytest.mark.parametrize(("outputs", "depth"), [(1, 1), (2, 8), (5, 19), (64, 48), (7, 31), (301, 40)])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@torch.no_grad()
def test_products_equal_torch(rows: int, outputs: int, depth: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(rows * 1000 + outputs)
    matrix = StoredMatrix(torch.randn(outputs, depth, generator=generator), kind)
    x, bias = torch.randn(rows, depth, generator=generator), torch.randn(outputs, generator=generator)
    for b in (bias, None):
        expected = F.linear(x.double(), matrix.rows(slice(None)).double(), None if b is None else b.double())
        found = fast_linear.linear(x, matrix.values, matrix.scale, b)
        assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max().item())


@needs_compiler
@torch.no_grad()
def test_more_dimensions_and_a_view_as_input() -> None:
    weight, x = torch.randn(6, 8), torch.randn(8, 2, 3).permute(1, 2, 0)
    found = fast_linear.linear(x, weight, None, None)
    assert found.shape == (2, 3, 6)
    torch.testing.assert_close(found, F.linear(x, weight))


@needs_compiler
def test_it_is_used_for_few_rows_in_fp32_without_gradients_only() -> None:
    weight = torch.randn(4, 8)
    few, many = torch.randn(fast_linear.MAX_ROWS, 8), torch.randn(fast_linear.MAX_ROWS + 1, 8)
    assert not fast_linear.suits(few, weight)
    with torch.no_grad():
        assert fast_linear.suits(few, weight)
        assert not fast_linear.suits(many, weight)
        assert not fast_linear.suits(few.bfloat16(), weight)
        assert not fast_linear.suits(few, torch.randn(8, 4).T)


@needs_compiler
def test_generation_goes_through_it_and_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = model_of(), []
    before = {name: (type(module), id(module)) for name, module in model.named_modules()}
    real = fast_linear.linear
    monkeypatch.setattr(fast_linear, "linear", lambda x, *rest: calls.append(x.shape) or real(x, *rest))
    with_it = tokens_of(model)
    # Prompts are read in one go, then both rows take 11 steps through 4 matrices in 2 blocks, and the head each time.
    assert calls.count(torch.Size([2, 1, 48])) == 11 * 2 * 3
    assert {name: (type(module), id(module)) for name, module in model.named_modules()} == before
    monkeypatch.setattr(fast_linear, "why_not", lambda: "switched off")
    calls.clear()
    assert tokens_of(model) == with_it
    assert not calls


@needs_compiler
def test_the_twin_shares_the_weights() -> None:
    model = model_of()
    twin = predictor(model)
    assert {p.data_ptr() for p in twin.parameters()} <= {p.data_ptr() for p in model.parameters()}
    assert isinstance(twin.head, StoredLinear)
    assert twin.head.weight.data_ptr() == model.wte.weight.data_ptr()


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


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@torch.no_grad()
def test_one_row_at_a_time_equals_many_rows(kind: str) -> None:
    """The fast product and torch's, through the cache and without it."""
    model = model_of()
    store_weights(model, kind)
    model = predictor(model)
    cache = model.new_cache(1, 16)
    steps = [model(torch.tensor([[token]]), cache=cache, last_only=True) for token in PROMPTS[1]]
    whole = model(torch.tensor([PROMPTS[1] * 4]))[0, : len(PROMPTS[1])]  # more rows than the fast product takes
    assert len(PROMPTS[1]) * 4 > fast_linear.MAX_ROWS
    assert (torch.cat(steps) - whole).abs().max() <= 1e-5 * max(1.0, whole.abs().max().item())


def test_int8_rows_of_zeros_stay_zero() -> None:
    matrix = StoredMatrix(torch.tensor([[0.0, 0.0], [1.0, -2.0]]), "int8")
    assert matrix.rows(slice(None)).tolist() == [[0.0, 0.0], pytest.approx([1.0, -2.0], abs=2 / 127)]


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(UsageError, match=r"weights: got 'int4'; needs one of fp32, bf16, int8"):
        store_weights(model_of(), "int4")


def _why_not(home: Path, **env: str) -> str:
    code = "from gptworks.model import fast_linear; print(fast_linear.why_not())"
    environment = {**os.environ, names.HOME: str(home), **env}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_compiler
def test_it_is_built_once_and_kept(tmp_path: Path) -> None:
    assert _why_not(tmp_path) == "None"
    (library,) = (tmp_path / "kernels").iterdir()
    built = library.stat().st_mtime_ns
    assert _why_not(tmp_path) == "None"
    assert library.stat().st_mtime_ns == built


@needs_compiler
def test_a_damaged_library_is_not_used(tmp_path: Path) -> None:
    assert _why_not(tmp_path) == "None"
    (library,) = (tmp_path / "kernels").iterdir()
    library.write_bytes(b"not a library")
    assert str(library) in _why_not(tmp_path)


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    assert _why_not(tmp_path, **{fast_linear.OFF: "off"}) == f"{fast_linear.OFF}=off"
    assert not (tmp_path / "kernels").exists()


def test_without_a_compiler_torch_multiplies(tmp_path: Path) -> None:
    assert _why_not(tmp_path, PATH="", CXX="") == "no C++ compiler (g++ or clang++) found"


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
