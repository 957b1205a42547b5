"""FleetX, single card: what its document says about training, by our own command. Rows S0-08 to S0-10, S0-12,
S0-13."""

import copy
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train import optim

SHAPE = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "vocab_size": 512, "max_positions": 64}


@pytest.fixture
def train(small_store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """train("run", "optim.lr=1e-3"): gptworks train with these overrides; its run folder and what it printed."""

    def command(name: str, *overrides: str, options: tuple[str, ...] = ()) -> tuple[Path, str]:
        out = tmp_path / name
        model = [f"model.{key}={value}" for key, value in SHAPE.items()]
        given = [*model, f"data.path={small_store}", "run.device=cpu", "batch.global_size=4", "evaluate.every=0"]
        given += overrides
        assert main(["train", "--out", str(out), *options, *given]) == 0
        return out, capsys.readouterr().out

    return command


def logged(run: Path, key: str) -> dict[int, Any]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line[key] for line in lines if key in line}


def final_weights(run: Path) -> dict[str, Tensor]:
    step = (run / "latest").read_text(encoding="utf-8").strip()
    return load_file(run / "checkpoints" / step / "portable" / "model.safetensors")


# S0-08: recompute granularity full, full_attn, core_attn

DROPOUT = [f"model.dropout_{site}=0.1" for site in ("embed", "hidden", "attention")]


class KeptForBackward:
    """Counts the bytes of activations that autograd keeps, each storage once, weights left out."""

    def __init__(self) -> None:
        self.tensors: dict[int, Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, lambda tensor: tensor)

    def pack(self, tensor: Tensor) -> Tensor:
        owner = tensor if tensor._base is None else tensor._base
        if not (owner.is_leaf and owner.requires_grad):
            self.tensors.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    def __enter__(self) -> "KeptForBackward":
        self.hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.__exit__()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


def test_s0_08_three_modes_with_equal_gradients_and_less_memory(train: Any) -> None:
    kept, runs = {}, {}
    for mode in ("none", "core_attn", "full_attn", "full"):
        with KeptForBackward() as tracker:
            runs[mode], printed = train(
                mode, "train.steps=3", "train.log_every=1", "model.attention=math", f"train.recompute={mode}", *DROPOUT
            )
        kept[mode] = tracker.num_bytes
        assert "saves nothing" not in printed
    assert 0 < kept["full"] < kept["full_attn"] < kept["core_attn"] < kept["none"]

    undropped, _ = train("undropped", "train.steps=3", "train.log_every=1", "model.attention=math")
    assert logged(undropped, "loss") != logged(runs["none"], "loss"), "no dropout to be repeated"
    weights = final_weights(runs["none"])
    for mode in ("core_attn", "full_attn", "full"):
        for key in ("loss", "grad_norm"):
            assert logged(runs[mode], key) == logged(runs["none"], key)
        other = final_weights(runs[mode])
        assert all(torch.equal(tensor, other[name]) for name, tensor in weights.items())


def test_s0_08_with_flash_attention_core_attn_saves_nothing_and_says_so(train: Any) -> None:
    _, printed = train("run", "train.steps=1", "train.recompute=core_attn")
    assert "train.recompute: core_attn saves nothing here" in printed
    assert "full_attn or full" in printed


# S0-09: fused_linear, tensor_fusion


def test_s0_09_the_fused_optimizer_updates_as_the_plain_one_does() -> None:
    part = build_gpt(
        ModelConfig(**SHAPE), World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), 2, seed=1)
    )
    settings = OptimConfig(lr=1e-2, weight_decay=0.1)
    fused = optim.build(part, settings)
    assert all(group["fused"] for group in fused.param_groups)
    twin = copy.deepcopy(part)
    plain = torch.optim.AdamW(
        [
            {"params": [p for n, p in twin.named_parameters() if optim.is_decayed(n, settings) is decayed], **more}
            for decayed, more in ((True, {"weight_decay": 0.1}), (False, {"weight_decay": 0.0}))
        ],
        lr=1e-2,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        foreach=False,
    )
    before = part.wte.weight.detach().clone()
    for step in range(3):
        for model, optimizer in ((part, fused), (twin, plain)):
            draws = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draws)
            optimizer.step()
    assert not torch.allclose(part.wte.weight, before, atol=1e-3)
    for (name, one), (_, other) in zip(part.named_parameters(), twin.named_parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-6, rtol=1e-5, msg=name)


# Dynamo asks every tensor whether it has a gradient and hides the answer's warning only from the screen.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_s0_09_compiled_blocks_give_the_same_losses(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler's graphs without its C++, whose building takes most of a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr("gptworks.train.run.can_compile", lambda device: True)
    torch._dynamo.utils.counters.clear()
    losses = {}
    for on in ("false", "true"):
        run, _ = train(on, "train.steps=3", "train.log_every=1", f"train.compile={on}")
        losses[on] = list(logged(run, "loss").values())
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 1, "nothing was compiled"
    assert losses["true"] == pytest.approx(losses["false"], abs=5e-6)


# S0-10: AdamW, cosine with warmup_rate, global-norm clip

# "learning rate" of global steps 1 to 9 in the document's log.
DOCUMENT_RATES = [
    "5.55556e-09",
    "8.33333e-09",
    "1.11111e-08",
    "1.38889e-08",
    "1.66667e-08",
    "1.94444e-08",
    "2.22222e-08",
    "2.50000e-08",
    "2.77778e-08",
]
DOCUMENT_OPTIMIZER = [
    "optim.weight_decay=0.01",
    "optim.beta1=0.9",
    "optim.beta2=0.999",
    "optim.eps=1.0e-8",
    "optim.decay_steps=360000",
    "optim.warmup_steps=3600",  # warmup_rate 0.01
    "optim.lr=1.0e-5",
    "optim.min_lr=5.0e-5",
    "optim.allow_rising_lr=true",
    "optim.clip=1.0",
]


def test_s0_10_learning_rates_equal_the_documents_log(train: Any) -> None:
    run, printed = train("run", "train.steps=9", "train.log_every=1", "train.log_style=fleetx", *DOCUMENT_OPTIMIZER)
    found = re.findall(r"global step (\d+), .*learning rate: (\S+)", printed)
    assert found == [(str(step), rate) for step, rate in enumerate(DOCUMENT_RATES, 1)]
    # The rate an update was made with is the one before: Paddle moves its schedule on and then logs.
    assert logged(run, "lr") == pytest.approx({step: 1e-5 * step / 3600 for step in range(1, 10)}, rel=1e-12)


def test_s0_10_gradients_are_clipped_by_the_global_norm(train: Any) -> None:
    """Adam hides the length of a gradient, so look at its first moment: (1 - beta1) x the clipped gradient."""
    from gptworks.checkpoint.formats import dcp
    from gptworks.checkpoint.pretrained import PretrainedGPT

    found = {}
    for clip in (0.0, 0.05):
        run, _ = train(f"clip-{clip}", "train.steps=1", "train.log_every=1", f"optim.clip={clip}")
        names = [(name, p.shape) for name, p in PretrainedGPT.from_pretrained(run).named_parameters()]
        moments = {f"optim.exp_avg.{name}": torch.empty(shape) for name, shape in names}
        dcp.load_into(run / "checkpoints" / "step-00000001" / "state", moments)
        found[clip] = math.sqrt(sum(tensor.double().square().sum().item() for tensor in moments.values())) / 0.1
        assert logged(run, "grad_norm")[1] > 1.0
    assert found[0.0] == pytest.approx(logged(run, "grad_norm")[1], rel=1e-4)
    assert found[0.05] == pytest.approx(0.05, rel=1e-4)


# S0-12: max_steps, num_train_epochs, accumulate_steps, logging_freq, eval_freq, eval_iters


def planned_steps(printed: str) -> int:
    return int(re.search(r"^steps +([\d,]+)", printed, re.M)[1].replace(",", ""))  # type: ignore[index]


def test_s0_12_the_end_is_given_in_steps_epochs_or_tokens(train: Any) -> None:
    def plan(*overrides: str) -> tuple[int, int]:
        _, printed = train("plan", "data.seq_len=32", *overrides, options=("--dry-run",))
        per_epoch = int(re.search(r"^samples +([\d,]+) per epoch", printed, re.M)[1].replace(",", ""))  # type: ignore[index]
        return planned_steps(printed), per_epoch

    assert plan("train.steps=500000")[0] == 500000
    steps, per_epoch = plan("train.epochs=1")
    assert steps == per_epoch // 4 and per_epoch % 4, "whole batches only"
    assert plan("train.epochs=3")[0] == 3 * per_epoch // 4
    assert plan("train.epochs=0.5")[0] == per_epoch // 8
    assert plan("train.epochs=1", "batch.global_size=8", "batch.accumulation=2")[0] == per_epoch // 8
    assert plan("train.tokens=1280")[0] == 10  # 4 samples of 32
    assert plan("train.tokens=1281")[0] == 11


def test_s0_12_an_epoch_in_steps_is_really_trained(train: Any) -> None:
    run, _ = train("run", "data.split=5,155,0", "train.epochs=2", "train.log_every=1")
    _, printed = train("plan", "data.split=5,155,0", "train.epochs=2", options=("--dry-run",))
    assert list(logged(run, "loss")) == list(range(1, planned_steps(printed) + 1))
    assert (run / "latest").read_text(encoding="utf-8").strip() == f"step-{planned_steps(printed):08d}"


def test_s0_12_accumulation_logging_and_evaluation_as_often_as_asked(train: Any) -> None:
    run, printed = train(
        "run",
        "data.seq_len=32",
        "data.split=130,30,0",
        "batch.accumulation=2",
        "train.steps=7",
        "train.log_every=3",
        "evaluate.every=2",
        "evaluate.batches=3",
    )
    assert "4 samples of 32 tokens = 2 micro-batch x 2 accumulation" in printed
    assert list(logged(run, "loss")) == [3, 6, 7]  # and the last
    assert logged(run, "tokens") == {step: step * 4 * 32 for step in (3, 6, 7)}
    assert logged(run, "held_out_tokens") == dict.fromkeys((2, 4, 6, 7), 3 * 4 * 32)


# S0-13: pure fp16 with scale_loss


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp16", "bf16"])
def test_s0_13_low_precision_trains_with_fp32_master_weights(train: Any, compute: str) -> None:
    run, printed = train(
        "run",
        f"precision.compute={compute}",
        "precision.scaler.init=32768.0",
        "train.steps=30",
        "train.log_every=1",
        "optim.lr=3e-3",
    )
    losses = logged(run, "loss")
    assert losses[1] == pytest.approx(math.log(512), abs=0.2)
    assert losses[30] < losses[1] - 0.5
    assert f"{compute} on cpu" in printed
    assert logged(run, "loss_scale") == (dict.fromkeys(range(1, 31), 32768.0) if compute == "fp16" else {})
    assert logged(run, "skipped") == {}
    weight = final_weights(run)["transformer.wte.weight"]
    low = torch.float16 if compute == "fp16" else torch.bfloat16
    assert weight.dtype == torch.float32
    assert not torch.equal(weight, weight.to(low).float()), "the saved weights are not the fp32 ones"


@pytest.mark.slow
def test_s0_13_an_overflow_is_skipped_counted_and_written_down(train: Any) -> None:
    """The scale starts far too high and is quartered after every second bad step in a row, as Paddle counts them."""
    run, printed = train(
        "run",
        "precision.compute=fp16",
        f"precision.scaler.init={2.0**30}",
        "precision.scaler.backoff=0.25",
        "precision.scaler.hysteresis=2",
        "train.steps=30",
        "train.log_every=1",
    )
    scales, skipped = logged(run, "loss_scale"), logged(run, "skipped")
    num_bad = skipped[30]
    assert num_bad >= 2 and num_bad % 2 == 0
    assert [skipped[step] for step in range(1, num_bad + 1)] == list(range(1, num_bad + 1))
    assert {skipped[step] for step in range(num_bad, 31)} == {num_bad}
    assert scales == {step: 2.0**30 * 0.25 ** (min(step - 1, num_bad) // 2) for step in range(1, 31)}
    bad = [json.loads(line) for line in (run / "nonfinite.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [entry["step"] for entry in bad] == list(range(1, num_bad + 1))
    assert [entry["sample_ids"] for entry in bad] == [list(range(4 * i, 4 * i + 4)) for i in range(num_bad)]
    assert printed.count("not finite, skipped") == num_bad
    losses = logged(run, "loss")
    assert losses[30] < losses[num_bad + 1]
