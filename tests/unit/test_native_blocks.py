"""Blocks by the C++ function: the loss and every gradient of gpt.py, for all kinds that it knows; others are left to
torch, and the run says so."""

import ctypes
import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks import cpu
from gptworks.compilers import cxx_compilers
from gptworks.config import from_dict
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.generate import kernel_library
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.loss import IGNORED, LinearCrossEntropy
from gptworks.model.masks import within_window
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train import (
    block_library,
    memory,
    native_blocks,
    native_loss,
    native_product,
    native_update,
    setup,
    speed,
)
from gptworks.train.loop import train
from gptworks.train.native_loss import NativeLoss

FUNCTIONS, REASON = block_library.loaded(native_blocks.compute_a_little)
needs_function = pytest.mark.skipif(bool(REASON), reason=f"no C++ function: {REASON}")
needs_bf16 = pytest.mark.skipif(not (FUNCTIONS and FUNCTIONS.knows_bf16), reason="no products of bf16 of our own here")
SGEMM = block_library.torchs_sgemm()
PRODUCTS = {"own": None} | ({"torchs": SGEMM} if SGEMM else {})  # what matrices are multiplied with

T = 70  # more than one group of queries
LLAMA = {"norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none", "num_kv_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "untied": {"tied": False},
    "erf": {"gelu": "erf"},
    "sigmoid": {"gelu": "sigmoid"},
    "no-bias": {"bias": "none"},
    "llama": LLAMA,
    "qwen2": {**LLAMA, "bias": "qkv", "num_kv_heads": 1},
    "swiglu-with-bias": {"mlp": "swiglu"},
    "wide-heads": {**LLAMA, "head_size": 20},
    "large-heads": {"head_size": 72},  # more vectors than are summed side by side, and a part of one
    "window": {**LLAMA, "sliding_window": 9},
    "no-positions": {"positions": "none", "norm": "rmsnorm"},
    # Matrices that are larger than what is multiplied at a time, in all directions, and end within it.
    "large": {"hidden_size": 140, "ffn_size": 604, "vocab_size": 1203},
}


def model_of(kind: dict[str, Any], *, native: bool, is_narrow: bool = False, sgemm: int | None = None) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 40, "max_positions": T, **kind}
    cfg = ModelConfig.model_validate(shape)
    weights = FreshWeights(InitConfig(std=0.2 * (48 / cfg.hidden_size) ** 0.5), cfg.num_layers, seed=1)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # fresh ones are ones and zeros, which hide what is done with them
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if native:
        assert FUNCTIONS is not None
        native_blocks.replace_in(model, dataclasses.replace(FUNCTIONS, sgemm=sgemm), is_narrow=is_narrow)
    return model


def documents() -> dict[str, Tensor]:
    segments = torch.zeros(3, T, dtype=torch.long)
    segments[:, 20:] += 1
    segments[1, 21:] += 1
    segments[2, 66:] += 1
    return {"segments": segments}


def own_positions() -> dict[str, Tensor]:
    positions = torch.arange(T).repeat(3, 1)
    positions[1, 30:] -= 30
    return {**documents(), "positions": positions}


def gradients(model: GPT, times: int = 1, **keywords: Tensor) -> tuple[float, dict[str, Tensor]]:
    shape = (3, model.cfg.max_positions + 1)
    tokens = torch.randint(0, 40, shape, generator=torch.Generator().manual_seed(2))
    for _ in range(times):
        loss = model(tokens[:, :-1], labels=tokens[:, 1:], **keywords)
        loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(kind: dict[str, Any], times: int = 1, *, sgemm: int | None = None, **keywords: Tensor) -> None:
    wanted_loss, wanted = gradients(model_of(kind, native=False), times, **keywords)
    loss, found = gradients(model_of(kind, native=True, sgemm=sgemm), times, **keywords)
    assert loss == pytest.approx(wanted_loss, rel=1e-6)
    assert list(found) == list(wanted)
    for name, gradient in found.items():
        assert (gradient - wanted[name]).abs().max() <= 1e-5 * wanted[name].abs().max(), name


@needs_function
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [dict, documents, own_positions])
def test_loss_and_gradients_are_those_of_torch(kind: str, given: Any) -> None:
    compare(KINDS[kind], **given())


@needs_function
@pytest.mark.parametrize("kind", ["gpt2", "llama", "large"])
@pytest.mark.parametrize("products", PRODUCTS)
def test_whoever_multiplies(kind: str, products: str) -> None:
    compare(KINDS[kind], sgemm=PRODUCTS[products])


@needs_bf16
@pytest.mark.parametrize("kind", ["gpt2", "llama", "large"])
def test_products_of_bf16_are_as_exact_as_bf16_by_torch(kind: str) -> None:
    exact_loss, exact = gradients(model_of(KINDS[kind], native=False))
    torchs = model_of(KINDS[kind], native=False)
    torchs.compute_dtype = torch.bfloat16
    losses, errors = [], []
    for model in (model_of(KINDS[kind], native=True, is_narrow=True), torchs):
        loss, found = gradients(model)
        losses.append(abs(loss - exact_loss) / exact_loss)
        errors.append({name: float((found[name] - exact[name]).norm() / exact[name].norm()) for name in exact})
    ours, theirs = errors
    assert 0 < losses[0] <= 1e-3
    assert all(0 < ours[name] <= max(1.2 * theirs[name], 0.02) for name in exact), (ours, theirs)


@needs_function
def test_more_queries_of_a_long_row_are_multiplied_at_a_time() -> None:
    compare({"max_positions": 150})


@needs_function
def test_gradients_of_micro_batches_are_added() -> None:
    compare({}, times=2)


@needs_function
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(LLAMA)
    finally:
        torch.set_num_threads(before)


@needs_function
def test_a_window_in_one_document_needs_no_dense_mask() -> None:
    block = model_of(KINDS["window"], native=True).blocks["0"]
    block.forward.original = None  # type: ignore[union-attr]  # torch's block would be asked for it
    turns = (torch.ones(T, 12), torch.zeros(T, 12))
    assert block(torch.ones(1, T, 48), within_window(T, 9, torch.device("cpu")), turns, None).shape == (1, T, 48)


@needs_function
def test_one_row_of_positions_is_for_all_rows() -> None:
    compare(LLAMA, positions=torch.arange(T)[None])


@needs_function
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_segments_of_another_number_of_rows_are_refused_as_by_torch(kind: str) -> None:
    for native in (False, True):
        with pytest.raises(RuntimeError):
            gradients(model_of(KINDS[kind], native=native), segments=documents()["segments"][:2])


@needs_function
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_weights_of_another_type_go_to_torch(dtype: torch.dtype) -> None:
    plain, native = (model_of({}, native=native).to(dtype) for native in (False, True))
    assert gradients(plain)[0] == gradients(native)[0]


@needs_function
def test_backward_is_gone_through_once() -> None:
    model = model_of({}, native=True)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    loss = model(tokens, labels=tokens)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward was called twice"):
        loss.backward()


@needs_function
def test_structures_are_those_of_the_library() -> None:
    """Their fields are written twice: in C++ and here."""
    assert FUNCTIONS is not None
    structures = (native_blocks._Block, native_blocks._Gradients, native_loss._HeadLoss, native_update._Update)
    for number, structure in enumerate((*structures, native_product._Product)):
        assert FUNCTIONS.size_of(number) == ctypes.sizeof(structure), structure


@pytest.mark.slow  # each is built
@needs_function
@pytest.mark.parametrize("name", ["avx512", "avx2", "portable"])
@pytest.mark.parametrize("kind", ["llama", "large"])
def test_all_instruction_sets(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instructions = next(each for each in kernel_library.INSTRUCTION_SETS if each.name == name)
    if instructions not in kernel_library.possible():
        pytest.skip(f"this processor has no {name}")
    opened = block_library._opened(cxx_compilers()[0], instructions, native_blocks.compute_a_little)
    assert opened.instructions == name
    monkeypatch.setitem(globals(), "FUNCTIONS", opened)
    compare(KINDS[kind])


@needs_function
def test_a_compiler_that_does_not_know_bf16_builds_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def library_of(source: Any, compiler: Any, instructions: Any, flags: tuple[str, ...], trial: Any) -> Path:
        asked.append("-mavx512bf16" in flags)
        if asked[-1]:
            raise subprocess.CalledProcessError(1, compiler)
        return Path("built")

    instructions = next(each for each in kernel_library.INSTRUCTION_SETS if each.name == "avx512")
    monkeypatch.setattr(cpu, "flags", lambda: ["avx512_bf16"])
    monkeypatch.setattr(block_library, "library_of", library_of)
    monkeypatch.setattr(block_library, "_open", lambda path, instructions: str(path))
    assert block_library._opened("g++", instructions, native_blocks.compute_a_little) == "built"
    assert asked == [True, False]


@needs_function
@pytest.mark.parametrize("shape", [(7, 5, 3), (200, 301, 601), (1, 1, 1), (13, 0, 4)])
@pytest.mark.parametrize("is_narrow", [False, pytest.param(True, marks=needs_bf16)])
def test_products_alone(shape: tuple[int, int, int], is_narrow: bool) -> None:
    assert FUNCTIONS is not None
    rows, depth, columns = shape
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(rows, depth, generator=generator), torch.randn(depth, columns, generator=generator)
    c = native_product.multiplier(dataclasses.replace(FUNCTIONS, sgemm=None), is_narrow=is_narrow)(a, b)
    a, b = (each.bfloat16().double() if is_narrow else each.double() for each in (a, b))
    torch.testing.assert_close(c.double(), a @ b, rtol=1e-5, atol=5e-5)


@needs_function
def test_what_it_does_not_know_goes_to_torch() -> None:
    """A dense mask of documents that return, and a cache."""
    plain, native = model_of({}, native=False).eval(), model_of({}, native=True).eval()
    tokens = torch.arange(2 * T).view(2, T) % 40
    segments = torch.arange(T).repeat(2, 1) % 3
    for keywords in ({"segments": segments}, {"cache": None}):
        made = [
            model(tokens, **({"cache": model.new_cache(2, T)} if "cache" in keywords else keywords))
            for model in (plain, native)
        ]
        assert torch.equal(*made)


@needs_function
@pytest.mark.parametrize("bits", [0x7FC00000, 0x7FFFFFFF, 0x7FC00001, -1])
def test_a_number_that_is_none_is_seen(bits: int) -> None:
    """The bad step of a run is found by its loss and by the norm of its gradients."""
    model = model_of({}, native=True)
    nan = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    with torch.no_grad():
        model.blocks["0"].attn.qkv.weight[0, 0] = nan  # type: ignore[union-attr, index, operator]
    loss, found = gradients(model)
    assert loss != loss and all(gradient.isnan().any() for gradient in found.values())


@needs_function
def test_a_weight_that_was_changed_since_is_refused() -> None:
    model = model_of({}, native=True)
    loss = model(torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long))
    with torch.no_grad():
        model.blocks["1"].mlp.up.weight.mul_(2)  # type: ignore[union-attr, operator]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The head and its loss


def loss_of(native: bool, labels: Tensor, words: int = 90) -> tuple[Tensor, list[Tensor], Tensor | None]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(*labels.shape, 24, generator=generator).requires_grad_()
    weight = torch.randn(words, 24, generator=generator).requires_grad_()
    module = LinearCrossEntropy()
    module.of_samples.wanted = True
    if native:
        assert FUNCTIONS is not None
        module.forward = NativeLoss(module, FUNCTIONS, is_narrow=False)  # type: ignore[method-assign]
    loss = module(x, weight, labels)
    (loss * 0.5).backward()
    return loss, [each.grad for each in (x, weight) if each.grad is not None], module.of_samples.means_B


@needs_function
@pytest.mark.parametrize("elements", [1, 1000, 10**7])  # a row at a time, some rows, all
def test_tokens_that_are_not_scored_and_rows_at_a_time(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_loss, "CHUNK_ELEMENTS", elements)
    labels = torch.randint(0, 90, (5, 7), generator=torch.Generator().manual_seed(2))
    labels[0], labels[1, 3:] = IGNORED, IGNORED
    wanted, wanted_grads, wanted_samples = loss_of(False, labels)
    loss, grads, samples = loss_of(True, labels)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(samples, wanted_samples)
    for one, other in zip(grads, wanted_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@needs_function
def test_labels_of_another_whole_number() -> None:
    labels = torch.arange(12).view(3, 4)
    assert loss_of(True, labels.int())[0] == loss_of(True, labels)[0]


@needs_function
@pytest.mark.parametrize("label", [-1, 90])
def test_a_label_that_is_no_word_is_refused(label: int) -> None:
    with pytest.raises(IndexError, match=f"a label is {label}; needed: 0 to 89, or -100"):
        loss_of(True, torch.full((1, 2), label))


@needs_function
def test_without_gradients_there_are_losses_alone() -> None:
    model = model_of({}, native=True)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        loss = model(tokens, labels=tokens)
    assert not loss.requires_grad and loss == pytest.approx(model(tokens, labels=tokens).item(), rel=1e-6)


# In a run


def run_of(store: Path, out: Path, **changes: dict[str, Any]) -> Any:
    model = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16}
    settings = {"data": {"path": str(store)}, "train": {"steps": 3}, "run": {"out": str(out), "device": "cpu"}}
    merged = {
        name: {**({"model": model} | settings).get(name, {}), **changes.get(name, {})}
        for name in {"model", *settings, *changes}
    }
    return from_dict(merged)


@needs_function
def test_a_run_uses_it_and_says_so(small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(run_of(small_store, tmp_path / "run"))
    assert "blocks: a C++ function (" in capsys.readouterr().out


def test_who_asks_for_torchs_compiler_gets_it(small_store: Path, tmp_path: Path) -> None:
    run = run_of(small_store, tmp_path / "run", train={"compile": True})
    assert native_blocks.why_not(run.model, run.train, "fp32") == "train.compile"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": {"dropout_hidden": 0.1}}, "model.dropout_hidden: 0.1 (known: 0)"),
        ({"model": {"qk_norm": True}, "checkpoint": {"portable": False}}, "model.qk_norm: True (known: False)"),
        ({"precision": {"compute": "fp16"}}, "precision.compute: fp16 (known here: fp32"),
        ({"train": {"recompute": "full"}}, "train.recompute: full (known: none)"),
    ],
)
def test_a_run_that_cannot_use_it_says_why(
    changes: dict[str, Any], reason: str, small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_of(small_store, tmp_path / "run", **changes))
    assert f"blocks: torch, because of {reason}" in capsys.readouterr().out


def test_bf16_is_left_to_torch_where_it_has_faster_products(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(small_store, tmp_path / "run", precision={"compute": "bf16"})
    if FUNCTIONS is not None:
        lesser = dataclasses.replace(FUNCTIONS, knows_bf16=False)
        monkeypatch.setattr(block_library, "loaded", lambda trial: (lesser, ""))
    assert native_blocks.why_not(run.model, run.train, "bf16") == "precision.compute: bf16 (known here: fp32)"


@needs_bf16
def test_a_run_in_bf16_says_so_and_learns_what_one_in_fp32_learns(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {}
    for kind in ("fp32", "bf16"):
        settings = {"precision": {"compute": kind}, "train": {"steps": 20}, "optim": {"lr": 0.01}}
        train(run_of(small_store, tmp_path / kind, **settings))
        lines = (tmp_path / kind / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        curves[kind] = [record["loss"] for record in map(json.loads, lines) if "loss" in record]
    output = capsys.readouterr().out
    assert "products of bf16); GPTWORKS_KERNELS=off leaves them to torch" in output
    assert "its products are" not in output  # those of torch would be, which are not used
    assert len(curves["fp32"]) > 1 and curves["fp32"] != curves["bf16"]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=3e-3)
    assert curves["fp32"][-1] < curves["fp32"][0] - 0.1


@needs_bf16
def test_memory_of_bf16_is_predicted_as_that_of_fp32(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations are fp32 with products of our own, and bf16 with those of torch."""

    def needed(kind: str) -> int:
        run = run_of(small_store, tmp_path / "run", precision={"compute": kind})
        return memory.predict(run, setup.prepare(run)).needed

    ours = needed("bf16")
    assert ours == needed("fp32")
    lesser = dataclasses.replace(FUNCTIONS, knows_bf16=False)  # type: ignore[type-var]
    monkeypatch.setattr(block_library, "loaded", lambda trial: (lesser, ""))
    assert needed("bf16") != ours


def test_the_peak_is_that_of_the_products_that_are_used() -> None:
    types = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        types.append(a.dtype)
        return a @ b

    speed.find_peak(torch.device("cpu"), "bf16", multiply)
    assert types and set(types) == {torch.float32}


def test_no_library_is_built_for_a_run_that_cannot_use_it(
    small_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_library, "loaded", lambda trial: pytest.fail("it was asked for"))
    run = run_of(small_store, tmp_path / "run", model={"dropout_hidden": 0.1})
    assert "dropout_hidden" in native_blocks.why_not(run.model, run.train, "fp32")


def test_a_type_that_is_no_gain_here_is_told_before_the_first_step(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "product_speed", lambda kind: 0.4)
    if FUNCTIONS is not None:
        lesser = dataclasses.replace(FUNCTIONS, knows_bf16=False)
        monkeypatch.setattr(block_library, "loaded", lambda trial: (lesser, ""))
    train(run_of(small_store, tmp_path / "run", precision={"compute": "bf16"}))
    told = capsys.readouterr().out
    assert "note:  precision.compute: bf16: its products are 0.4x as fast" in told.partition("step 1")[0]
