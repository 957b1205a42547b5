"""One optimizer step: accumulation, clipping, dropout and what happens when a number is not finite."""

import math
import signal

import pytest
import torch
from torch import Tensor

from gptworks.config.derive import Layout
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, ScalerConfig
from gptworks.data.loader import IGNORED, Batch
from gptworks.errors import DataError
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.parallel.parts import SingleStage
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.run_folder import Interrupts
from gptworks.train.step import StepReport, backward, train_step, update

CPU = World(torch.device("cpu"))


def tiny(**changes: object) -> GPT:
    shape = {"num_layers": 2, "hidden_size": 24, "num_heads": 3, "vocab_size": 50, "max_positions": 16, **changes}
    cfg = ModelConfig.model_validate(shape)
    return build_gpt(cfg, CPU, torch.float32, FreshWeights(InitConfig(std=0.2), cfg.num_layers, seed=1)).train()


def batch_of(rows: int, *, masked: bool = True) -> Batch:
    """Documents end at different places, so each row scores another number of tokens."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 50, (rows, 13), generator=generator)
    labels = tokens[:, 1:].clone()
    if masked:
        for row in range(rows):
            labels[row, : 1 + (7 * row) % 11] = IGNORED
    return Batch(tokens[:, :-1], labels, None, None, torch.arange(100, 100 + rows))


def cut(batch: Batch, size: int) -> list[Batch]:
    parts = range(0, len(batch.tokens), size)
    return [
        Batch(batch.tokens[i : i + size], batch.labels[i : i + size], None, None, batch.sample_ids[i : i + size])
        for i in parts
    ]


def do_step(
    model: GPT,
    batches: list[Batch],
    *,
    clip: float = 0.0,
    step: int = 1,
    seed: int = 1,
    lr: float = 0.1,
    world: World = CPU,
) -> StepReport:
    """Plain SGD in disguise: with betas 0 and a huge epsilon the update is the gradient times lr / eps."""
    cfg = OptimConfig(lr=lr, beta1=0.0, beta2=0.0, eps=1e3, weight_decay=0.0)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    return train_step(
        SingleStage(model, world), optim.build(model, cfg), batches, world, scaler, clip=clip, seed=seed, step=step
    )


def update_of(model: GPT, before: GPT) -> dict[str, Tensor]:
    after = dict(model.named_parameters())
    return {name: (after[name] - p).detach() for name, p in before.named_parameters()}


@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_accumulation_equals_one_large_batch(micro: int) -> None:
    batch = batch_of(12)
    parts = cut(batch, micro)
    counts = [part.num_scored for part in parts]
    assert len(set(counts)) > 1, "equal counts would not tell a mean of means from the mean"
    one, many = tiny(), tiny()
    whole = do_step(one, [batch], lr=1000.0)
    split = do_step(many, parts, lr=1000.0)
    assert split.loss == pytest.approx(whole.loss, rel=1e-6)
    assert split.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    assert split.sample_ids == whole.sample_ids == list(range(100, 112))
    wanted = update_of(one, tiny())
    for name, got in update_of(many, tiny()).items():
        error = (got - wanted[name]).abs().max()
        assert error <= 2e-5 * wanted[name].abs().max(), name


def test_the_loss_is_the_mean_over_scored_tokens() -> None:
    model, batch = tiny(), batch_of(6)
    with torch.no_grad():
        logits = model(batch.tokens).double()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    scored = batch.labels.flatten() != IGNORED
    report = do_step(model, cut(batch, 2))
    assert report.loss == pytest.approx(losses[scored].mean().item(), rel=1e-6)
    assert scored.sum() < batch.tokens.numel()


@pytest.mark.parametrize("clip", [0.0, 0.01, 1e9])
def test_clipping_bounds_the_update_and_reports_the_norm_before(clip: float) -> None:
    free, clipped = tiny(), tiny()
    unclipped = do_step(free, [batch_of(4)], lr=1000.0)
    report = do_step(clipped, [batch_of(4)], clip=clip, lr=1000.0)
    assert report.grad_norm == unclipped.grad_norm > 0.1
    factor = min(1.0, clip / report.grad_norm) if clip else 1.0
    wanted = update_of(free, tiny())
    for name, got in update_of(clipped, tiny()).items():
        torch.testing.assert_close(got, wanted[name] * factor, rtol=5e-3, atol=1e-6, msg=name)


def test_gradients_do_not_stay() -> None:
    model = tiny()
    do_step(model, [batch_of(2)])
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_scored_is_refused_and_changes_nothing() -> None:
    model, batch = tiny(), batch_of(2)
    nothing = Batch(batch.tokens, torch.full_like(batch.labels, IGNORED), None, None, batch.sample_ids)
    with pytest.raises(DataError, match=r"step 1: no token of samples \[100, 101\] is scored"):
        do_step(model, [nothing])
    assert all(change.abs().max() == 0 for change in update_of(model, tiny()).values())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_told_by_the_step_that_it_came_in(number: signal.Signals | None) -> None:
    model, batch = tiny(), batch_of(2)
    optimizer, scaler = optim.build(model, OptimConfig()), LossScaler(ScalerConfig(), enabled=False)
    with Interrupts() as interrupts:
        if number is not None:
            model.loss_sum.register_forward_hook(lambda *_: signal.raise_signal(number))
        gradients = backward(SingleStage(model), [batch], CPU, scaler, seed=1, step=1, interrupts=interrupts)
        report = update(optimizer, gradients, scaler, clip=1.0)
    assert report.updated
    assert report.signal == (number.name if number else None)


# Dropout


def test_dropout_depends_on_seed_step_micro_batch_and_data_rank_alone() -> None:
    def loss(**where: object) -> float:
        model = tiny(dropout_embed=0.3, dropout_hidden=0.3, dropout_attention=0.3)
        torch.rand(int(torch.randint(1, 9, ())))  # what was drawn before does not matter
        return do_step(model, where.pop("batches", [batch_of(4)]), **where).loss  # type: ignore[arg-type]

    usual = loss()
    assert loss() == usual
    assert loss(step=2) != usual
    assert loss(seed=2) != usual
    assert loss(world=World(CPU.device, Layout(dp=2), rank=1)) != usual
    twice = loss(batches=[batch_of(4), batch_of(4)])
    assert twice != usual, "the second micro-batch repeats the dropout of the first"


# Not finite


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing(bad: float) -> None:
    batch = batch_of(4)
    model, before = tiny(), tiny()
    cfg = OptimConfig(lr=0.1)
    optimizer, scaler = optim.build(model, cfg), LossScaler(ScalerConfig(), enabled=False)
    first = train_step(SingleStage(model), optimizer, [batch], CPU, scaler, clip=1.0, seed=1, step=1)
    assert first.updated
    with torch.no_grad():
        model.wpe.weight[3, 0] = bad
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: t.clone() for name, t in optim.moments(model, optimizer).items()}
    report = train_step(SingleStage(model), optimizer, cut(batch, 2), CPU, scaler, clip=1.0, seed=1, step=2)
    assert not report.updated
    assert not math.isfinite(report.loss)
    assert report.sample_ids == [100, 101, 102, 103]
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), weights[name], rtol=0, atol=0, equal_nan=True, msg=name)
        assert parameter.grad is None
    for name, moment in optim.moments(model, optimizer).items():
        assert torch.equal(moment, moments[name]), name
    # and the next good step goes on as if it had not been
    with torch.no_grad():
        model.wpe.weight[3, 0] = before.wpe.weight[3, 0]
    assert train_step(SingleStage(model), optimizer, [batch], CPU, scaler, clip=1.0, seed=1, step=3).updated


def test_a_gradient_that_is_not_finite_is_noticed_when_the_loss_is() -> None:
    """A huge but finite loss whose gradient overflows."""
    model = tiny(tied=False)
    with torch.no_grad():
        model.ln_f.weight.fill_(1e20)
        model.head.weight.mul_(1e16)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    report = do_step(model, [batch_of(2, masked=False)])
    assert math.isfinite(report.loss) and not math.isfinite(report.grad_norm) and not report.updated
    assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))
