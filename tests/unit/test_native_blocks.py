"""Blocks by the C++ function: the loss and every gradient of gpt.py, for all kinds that it knows; others are left to
torch, and the run says so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks import cpu
from gptworks.config import from_dict
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.masks import within_window
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train import block_library, native_blocks
from gptworks.train.loop import train

REASON = block_library.loaded(native_blocks.compute_a_little)[1]
needs_function = pytest.mark.skipif(bool(REASON), reason=f"no C++ function: {REASON}")

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
}


def model_of(kind: dict[str, Any], *, native: bool) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 40, "max_positions": T, **kind}
    cfg = ModelConfig.model_validate(shape)
    weights = FreshWeights(InitConfig(std=0.2), cfg.num_layers, seed=1)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).train()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # fresh ones are ones and zeros, which hide what is done with them
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    if native:
        native_blocks.use_in(model)
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


def compare(kind: dict[str, Any], times: int = 1, **keywords: Tensor) -> None:
    wanted_loss, wanted = gradients(model_of(kind, native=False), times, **keywords)
    loss, found = gradients(model_of(kind, native=True), times, **keywords)
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
def test_a_number_that_is_none_is_seen() -> None:
    """The bad step of a run is found by its loss and by the norm of its gradients."""
    model = model_of({}, native=True)
    with torch.no_grad():
        model.blocks["0"].attn.qkv.weight[0, 0] = torch.nan  # type: ignore[union-attr, index, operator]
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
        ({"precision": {"compute": "bf16"}}, "precision.compute: bf16 (known: fp32)"),
        ({"train": {"recompute": "full"}}, "train.recompute: full (known: none)"),
    ],
)
def test_a_run_that_cannot_use_it_says_why(
    changes: dict[str, Any], reason: str, small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(run_of(small_store, tmp_path / "run", **changes))
    assert f"blocks: torch, because of {reason}" in capsys.readouterr().out


def test_a_type_that_is_no_gain_here_is_told_before_the_first_step(
    small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "product_speed", lambda kind: 0.4)
    train(run_of(small_store, tmp_path / "run", precision={"compute": "bf16"}))
    told = capsys.readouterr().out
    assert "note:  precision.compute: bf16: its products are 0.4x as fast" in told.partition("step 1")[0]
