"""AdamW: who is decayed, clipping by the global norm, and moments that travel by name."""

import itertools

import pytest
import torch
from torch import Tensor

from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train import optim


def tiny(**changes: object) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 40, "max_positions": 16, **changes}
    cfg = ModelConfig.model_validate(shape)
    weights = FreshWeights(InitConfig(std=0.3), cfg.num_layers, seed=1)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights)


def backward(model: GPT, seed: int = 0) -> None:
    tokens = torch.randint(0, 40, (2, 13), generator=torch.Generator().manual_seed(seed))
    model(tokens[:, :-1], labels=tokens[:, 1:]).backward()


def gradients(model: GPT) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# Decay

BLOCK_MATRICES = {
    f"blocks.{i}.{name}.weight" for i in range(2) for name in ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
}
EMBEDDINGS = {"wte.weight", "wpe.weight"}


@pytest.mark.parametrize(
    ("decay_params", "tied", "decayed"),
    [
        ("weights", True, BLOCK_MATRICES | EMBEDDINGS),
        ("weights", False, BLOCK_MATRICES | EMBEDDINGS | {"head.weight"}),
        ("matrices", True, BLOCK_MATRICES),
        ("matrices", False, BLOCK_MATRICES | {"head.weight"}),
    ],
)
def test_who_is_decayed(decay_params: str, tied: bool, decayed: set[str]) -> None:
    """Seen on the weights: with no gradient, AdamW does nothing but decay."""
    model = tiny(tied=tied)
    cfg = OptimConfig.model_validate({"weight_decay": 0.5, "decay_params": decay_params, "lr": 0.1})
    optimizer = optim.build(model, cfg)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0  # biases are 0 at the start, and 0 decays to 0
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in decayed else 1.0
        torch.testing.assert_close(parameter.detach(), (before[name] + 1.0) * factor, msg=name)
    assert decayed < set(before)


def test_all_may_be_decayed() -> None:
    optimizer = optim.build(tiny(), OptimConfig(decay_params="all", weight_decay=0.3))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3]
    assert len(optimizer.param_groups[0]["params"]) == len(list(tiny().parameters()))


def test_updates_equal_plain_adamw() -> None:
    """Ten updates of the fused kernel, with rates that change, against the formula applied one tensor at a time."""
    model = tiny()
    cfg = OptimConfig(weight_decay=0.1, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = optim.build(model, cfg)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    first = {name: torch.zeros_like(w) for name, w in weights.items()}
    second = {name: torch.zeros_like(w) for name, w in weights.items()}
    for step in range(1, 11):
        lr = 0.01 / step
        optim.set_lr(optimizer, lr)
        optimizer.zero_grad()
        backward(model, seed=step)
        for name, gradient in gradients(model).items():
            first[name] = 0.8 * first[name] + 0.2 * gradient
            second[name] = 0.9 * second[name] + 0.1 * gradient.double() ** 2
            update = first[name] / (1 - 0.8**step) / ((second[name] / (1 - 0.9**step)).sqrt() + 1e-6)
            decay = 0.1 if optim.is_decayed(name, cfg) else 0.0
            weights[name] = weights[name] * (1 - lr * decay) - lr * update
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-4, atol=1e-5, msg=name)


# Clipping


@pytest.mark.parametrize("share", [0.1, 0.9])
def test_norm_and_clipping_equal_torch(share: float) -> None:
    model, other = tiny(), tiny()
    backward(model)
    backward(other)
    norm = optim.global_norm(model.parameters())
    limit = share * norm.item()
    expected = torch.nn.utils.clip_grad_norm_(other.parameters(), limit)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    optim.scale_gradients(model.parameters(), limit / norm.item())
    for (name, mine), theirs in zip(gradients(model).items(), gradients(other).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=0, msg=name)
    assert optim.global_norm(model.parameters()).item() == pytest.approx(limit, rel=1e-5)


def test_a_tied_weight_counts_once() -> None:
    model = tiny()
    backward(model)
    total = sum(gradient.double().square().sum().item() for gradient in gradients(model).values())
    assert optim.global_norm(model.parameters()).item() == pytest.approx(total**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_one_bad_value_makes_the_norm_not_finite(bad: float) -> None:
    model = tiny()
    backward(model)
    model.ln_f.bias.grad[3] = bad
    assert not torch.isfinite(optim.global_norm(model.parameters()))


# Moments


def stepped(model: GPT, optimizer: torch.optim.AdamW, seeds: range) -> list[Tensor]:
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def test_moments_round_trip_to_the_bit() -> None:
    cfg = OptimConfig(lr=0.01)
    model = tiny()
    optimizer = optim.build(model, cfg)
    stepped(model, optimizer, range(3))
    saved = {name: tensor.clone() for name, tensor in optim.moments(model, optimizer).items()}
    names = [name for name, _ in model.named_parameters()]
    assert set(saved) == {f"{moment}.{name}" for moment, name in itertools.product(("exp_avg", "exp_avg_sq"), names)}
    assert all(tensor.abs().sum() > 0 for tensor in saved.values())

    again = tiny()
    again.load_state_dict(model.state_dict())
    fresh = optim.build(again, cfg)
    optim.set_moments(again, fresh, saved, updates=3)
    expected = stepped(model, optimizer, range(3, 6))
    for got, wanted in zip(stepped(again, fresh, range(3, 6)), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("lost", ["moments", "count"])
def test_a_round_trip_needs_both_moments_and_count(lost: str) -> None:
    """The control of the test above: it would notice."""
    cfg = OptimConfig(lr=0.01)
    model = tiny()
    optimizer = optim.build(model, cfg)
    stepped(model, optimizer, range(3))
    again = tiny()
    again.load_state_dict(model.state_dict())
    fresh = optim.build(again, cfg)
    saved = {name: tensor.clone() for name, tensor in optim.moments(model, optimizer).items()}
    if lost == "count":
        optim.set_moments(again, fresh, saved, updates=1)
    pairs = zip(stepped(again, fresh, range(3, 4)), stepped(model, optimizer, range(3, 4)), strict=True)
    assert not all(torch.equal(one, other) for one, other in pairs)


def test_before_the_first_update_moments_are_zero() -> None:
    model = tiny()
    optimizer = optim.build(model, OptimConfig())
    saved = optim.moments(model, optimizer)
    assert saved and all(tensor.abs().max() == 0 for tensor in saved.values())
    again = tiny()
    fresh = optim.build(again, OptimConfig())
    optim.set_moments(again, fresh, saved, updates=0)
    for got, wanted in zip(stepped(again, fresh, range(2)), stepped(model, optimizer, range(2)), strict=True):
        assert torch.equal(got, wanted)


def test_updates_are_torchs_to_the_bit_and_hooks_are_called_once() -> None:
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(5, 7, generator=generator), torch.randn(7, generator=generator)]
    ours, torchs = ([torch.nn.Parameter(value.clone()) for value in start] for _ in range(2))
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizers = [optim.AdamW(ours, **settings), torch.optim.AdamW(torchs, **settings)]
    seen = []
    optimizers[0].register_step_post_hook(lambda *_: seen.append(1))
    for _ in range(3):
        gradients = [torch.randn(value.shape, generator=generator) for value in start]
        for parameters, optimizer in zip([ours, torchs], optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, torchs, strict=True))
    assert not torch.equal(ours[0], start[0]) and len(seen) == 3
