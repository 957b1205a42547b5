"""Dynamic loss scaling by the rules of Paddle and Megatron, and training in low precision with fp32 weights."""

import pytest
import torch

from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, ScalerConfig
from gptworks.data.loader import Batch
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build
from gptworks.train import optim
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.step import StepReport, train_step

CPU = World(torch.device("cpu"))


def scales(cfg: ScalerConfig, steps: str) -> list[float]:
    """The scale after each step; '+' is a good one, '-' one that overflowed."""
    scaler = LossScaler(cfg, enabled=True)
    found = []
    for step in steps:
        scaler.update(step == "+")
        found.append(scaler.scale)
    return found


# The rules

PADDLE = ScalerConfig(init=32768.0, growth=2.0, window=1000, backoff=0.5, hysteresis=2)


def test_paddle_halves_after_two_bad_steps_in_a_row() -> None:
    assert scales(PADDLE, "-") == [32768]
    assert scales(PADDLE, "--") == [32768, 16384]
    assert scales(PADDLE, "-+-+-+") == [32768] * 6
    assert scales(PADDLE, "----") == [32768, 16384, 16384, 8192]
    assert scales(PADDLE, "--+-") == [32768, 16384, 16384, 16384]


def test_paddle_static_graph_shrinks_to_eight_tenths() -> None:
    static = PADDLE.model_copy(update={"backoff": 0.8})
    assert scales(static, "--")[-1] == pytest.approx(0.8 * 32768)


def test_paddle_doubles_after_a_thousand_good_steps_in_a_row() -> None:
    assert scales(PADDLE, "+" * 2000)[998:1001] == [32768, 65536, 65536]
    assert scales(PADDLE, "+" * 2000)[-1] == 131072
    assert scales(PADDLE, "+" * 999 + "-" + "+" * 999)[-1] == 32768


def test_megatron_refills_its_hysteresis_only_when_the_scale_grows() -> None:
    megatron = ScalerConfig(init=64.0, window=3, backoff=0.5, hysteresis=2, refill="growth")
    # The first bad step is forgiven; a good one in between does not restore that; afterwards each one shrinks it.
    assert scales(megatron, "-+-") == [64.0, 64.0, 32.0]
    assert scales(megatron, "---") == [64.0, 32.0, 16.0]
    assert scales(megatron, "--+++-") == [64.0, 32.0, 32.0, 32.0, 64.0, 64.0]
    paddle = megatron.model_copy(update={"refill": "good_step"})
    assert scales(paddle, "-+-") == [64.0, 64.0, 64.0]
    assert scales(paddle, "---") == [64.0, 32.0, 32.0]


def test_megatron_start_and_floor() -> None:
    """From 2^32, two bad steps for each halving here, never below 1, and up again from there."""
    megatron = ScalerConfig(init=2.0**32, growth=2.0, window=1000, backoff=0.5, hysteresis=2, floor=1.0)
    assert scales(megatron, "--") == [2.0**32, 2.0**31]
    assert scales(megatron, "--" * 32)[-2:] == [2.0, 1.0]
    assert scales(megatron, "--" * 40)[-1] == 1.0
    assert scales(megatron, "--" * 40 + "+" * 1000)[-2:] == [1.0, 2.0]


def test_mindspore_halves_at_each_overflow() -> None:
    assert scales(ScalerConfig(init=8.0, hysteresis=1), "-+--") == [4, 4, 2, 1]


def test_a_floor_is_not_undershot_by_a_large_step() -> None:
    assert scales(ScalerConfig(init=10.0, backoff=0.1, floor=4.0), "--") == [4.0, 4.0]


def test_state_goes_on_where_it_was() -> None:
    cfg = ScalerConfig(init=16.0, window=3, hysteresis=2)
    for steps in ("++", "-", "--", "+++"):
        scaler, again = LossScaler(cfg, enabled=True), LossScaler(cfg, enabled=True)
        for step in steps:
            scaler.update(step == "+")
        again.restore(scaler.state())
        for step in "+--+++--":
            scaler.update(step == "+")
            again.update(step == "+")
            assert again.scale == scaler.scale


def test_switched_off_it_is_one_and_stays_so() -> None:
    scaler = LossScaler(ScalerConfig(init=1024.0, hysteresis=1, window=1), enabled=False)
    assert scaler.scale == 1.0
    scaler.restore({"scale": 64.0, "good_steps": 0, "bad_steps": 0})
    for finite in (True, False):
        scaler.update(finite)
        assert scaler.scale == 1.0


# In training


class Learner:
    """A tiny model that learns to count: token i is followed by i + 1."""

    def __init__(self, compute: str, scaler: ScalerConfig) -> None:
        cfg = ModelConfig(num_layers=2, hidden_size=32, num_heads=2, vocab_size=40, max_positions=16)
        weights = FreshWeights(InitConfig(), cfg.num_layers, seed=1)
        self.part = build(cfg, CPU, DTYPES[compute], weights).train()
        self.optimizer = optim.build(self.part, OptimConfig(lr=3e-3))
        self.scaler = LossScaler(scaler, enabled=compute == "fp16")
        self.steps = 0

    def step(self) -> StepReport:
        self.steps += 1
        generator = torch.Generator().manual_seed(self.steps)
        tokens = (torch.randint(0, 40, (8, 1), generator=generator) + torch.arange(17)) % 40
        batch = Batch(tokens[:, :-1], tokens[:, 1:], None, None, torch.arange(8))
        return train_step(self.part, self.optimizer, [batch], CPU, self.scaler, clip=1.0, seed=1, step=self.steps)


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_the_loss_falls_and_weights_stay_fp32(compute: str) -> None:
    learner = Learner(compute, ScalerConfig(init=32768.0))
    reports = [learner.step() for _ in range(40)]
    assert all(report.updated for report in reports)
    assert reports[0].loss == pytest.approx(3.69, abs=0.1)  # log 40
    assert reports[-1].loss < 1.5
    assert {p.dtype for p in learner.part.parts[0].parameters()} == {torch.float32}
    assert {t.dtype for t in optim.moments(learner.part, learner.optimizer).values()} == {torch.float32}


def test_fp32_masters_take_updates_that_fp16_would_lose() -> None:
    """An update of 1e-6 to a weight of 1.0 is below what fp16 can tell apart (1e-3)."""
    learner = Learner("fp16", ScalerConfig(init=1024.0))
    optim.set_lr(learner.optimizer, 1e-6)
    before = learner.part.parts[0].ln_f.weight.detach().clone()
    learner.step()
    change = (learner.part.parts[0].ln_f.weight.detach() - before).abs()
    assert 0 < change.max() < 2e-6
    assert torch.equal(learner.part.parts[0].ln_f.weight.half(), before.half())


def test_scaling_does_not_change_what_is_learned() -> None:
    """Losses, gradient norms and moments are those of the unscaled loss, to fp16 rounding."""
    small, large = Learner("fp16", ScalerConfig(init=8.0)), Learner("fp16", ScalerConfig(init=2.0**14))
    for _ in range(10):
        one, other = small.step(), large.step()
        assert one.loss == pytest.approx(other.loss, rel=2e-2)
        assert one.grad_norm == pytest.approx(other.grad_norm, rel=5e-2)
    # Adam's updates do not show the length of a gradient; its moments do.
    moments = optim.moments(large.part, large.optimizer)
    for name, moment in optim.moments(small.part, small.optimizer).items():
        assert (moment - moments[name]).norm() < 0.2 * moment.norm(), name


def test_an_overflow_is_skipped_and_shrinks_the_scale() -> None:
    learner = Learner("fp16", ScalerConfig(init=2.0**40, backoff=2.0**-6))
    before = [parameter.detach().clone() for parameter in learner.part.parts[0].parameters()]
    first = learner.step()
    assert not first.updated and first.loss == pytest.approx(3.69, abs=0.1)
    assert first.loss_scale == 2.0**40 and learner.scaler.scale == 2.0**34
    assert all(torch.equal(a, b) for a, b in zip(before, learner.part.parts[0].parameters(), strict=True))
    assert not learner.optimizer.state, "the moments of a skipped step are not to be had"
    reports = [learner.step() for _ in range(50)]
    bad = [report for report in reports if not report.updated]
    assert 1 <= len(bad) <= 5 and reports[-1].updated
    assert learner.scaler.scale == 2.0 ** (34 - 6 * len(bad))
    assert reports[-1].loss < 1.5


def test_without_a_scaler_an_overflow_does_not_change_the_scale() -> None:
    learner = Learner("bf16", ScalerConfig(init=2.0**20))
    report = learner.step()
    assert report.updated and report.loss_scale == 1.0
