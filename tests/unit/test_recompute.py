"""Recomputation: the same gradients to the bit, fewer kept tensors, and a word when it saves nothing."""

import pytest
import torch
from torch import Tensor

from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel import recompute
from gptworks.parallel.build import FreshWeights, build_gpt

CPU = World(torch.device("cpu"))
MODES = ["full", "full_attn", "core_attn"]


def model_with(mode: str, *, attention: str = "math", dropout: float = 0.1, **changes: float) -> GPT:
    cfg = ModelConfig.model_validate(
        {
            "num_layers": 2,
            "hidden_size": 32,
            "num_heads": 4,
            "vocab_size": 50,
            "max_positions": 64,
            "attention": attention,
            "dropout_embed": dropout,
            "dropout_hidden": dropout,
            "dropout_attention": dropout,
            **changes,
        }
    )
    return build_gpt(cfg, CPU, torch.float32, FreshWeights(InitConfig(std=0.2), 2, seed=1), recompute_mode=mode).train()


def batch(num_tokens: int = 64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 50, (2, num_tokens + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_and_gradients(model: GPT, **masks: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = batch()
    torch.manual_seed(9)
    loss = model(tokens, labels=labels, **masks)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def saved_bytes(model: GPT) -> int:
    """Bytes of all that autograd keeps for the backward pass, each storage once, parameters left out."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses from being used again

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens, labels = batch()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, labels=labels)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "segments"])
@pytest.mark.parametrize("attention", ["auto", "math"])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_bit_equal_with_dropout(mode: str, attention: str, masked: bool) -> None:
    masks = {"segments": (torch.arange(64) // 20).expand(2, -1)} if masked else {}
    loss, gradients = loss_and_gradients(model_with(mode, attention=attention), **masks)
    expected, wanted = loss_and_gradients(model_with("none", attention=attention), **masks)
    without_dropout, _ = loss_and_gradients(model_with("none", attention=attention, dropout=0.0), **masks)
    assert torch.equal(loss, expected)
    assert not torch.equal(loss, without_dropout), "dropout does nothing here, so its repetition is not tested"
    assert set(gradients) == set(wanted) == {name for name, _ in model_with("none").named_parameters()}
    for name, gradient in gradients.items():
        assert torch.equal(gradient, wanted[name]), name


@pytest.mark.parametrize("mode", MODES)
def test_names_of_parameters_stay(mode: str) -> None:
    names = [name for name, _ in model_with("none").named_parameters()]
    assert [name for name, _ in model_with(mode).named_parameters()] == names


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_generation_with_a_cache_still_works(mode: str) -> None:
    model, plain, (tokens, _) = model_with(mode).eval(), model_with("none").eval(), batch(8)
    cache = model.new_cache(2, 8)
    logits = torch.cat([model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)], 1)
    torch.testing.assert_close(logits, plain(tokens), rtol=0, atol=1e-5)


def test_kept_bytes_fall_from_mode_to_mode() -> None:
    kept = {mode: saved_bytes(model_with(mode)) for mode in ["none", *MODES]}
    assert 0 < kept["full"] < kept["full_attn"] < kept["core_attn"] < kept["none"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("attention", ["auto", "math"])
def test_the_user_is_told_exactly_when_core_attn_saves_nothing(attention: str, dropout: float) -> None:
    none, core = (
        saved_bytes(model_with(mode, attention=attention, dropout_attention=dropout)) for mode in ("none", "core_attn")
    )
    matrices = 2 * 2 * 4 * 64 * 64 * 4  # layers, rows, heads, T, T, bytes
    note = recompute.note("core_attn", attention, dropout, "cpu")
    if note is None:
        assert none - core >= matrices
    else:  # all the fused kernel keeps beyond its inputs is one number per head and token
        assert none - core <= matrices / 64
        assert "core_attn saves nothing" in note and "full_attn" in note and "model.attention: math" in note


def test_other_modes_have_nothing_to_tell() -> None:
    assert recompute.note("core_attn", "auto", 0.1, "cuda"), "on a GPU the fused kernel has dropout, too"
    for mode in ("none", "full", "full_attn"):
        assert recompute.note(mode, "auto", 0.0, "cpu") is None
