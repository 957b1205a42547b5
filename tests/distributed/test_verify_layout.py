"""gptworks verify --layout: a right layout passes; one collective left out is caught, with the tensor it spoils."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gptworks.cli.main import main
from gptworks.config.derive import Layout, solve_batch, with_layout
from gptworks.config.load import load
from gptworks.config.schema import RunConfig
from gptworks.errors import ConfigError, UsageError, VerificationError
from gptworks.model import init
from gptworks.parallel import build, collectives, tensor
from gptworks.parallel.pipeline import Pipeline
from gptworks.plan import machine
from gptworks.plan.workload import LayoutChoice
from gptworks.verify import measure, reference, scaled_model
from gptworks.verify.layout import Result, judge, plan, record

Compare = Callable[..., Result]
TINY = ["num_layers=2", "hidden_size=32", "num_heads=4", "vocab_size=301", "max_positions=16"]


def configured(*overrides: str) -> RunConfig:
    shape = [f"model.{one}" for one in TINY]
    usual = ["batch.global_size=8", "batch.micro_size=2", "optim.lr=3e-3", "run.device=cpu", "run.threads=1"]
    return load(overrides=[*shape, *usual, *overrides])


@pytest.fixture
def compared(run_layout: Callable[..., list[Any]], tmp_path: Path) -> Compare:
    """compared("tp2", ..., broken=lambda: ...): both sides, with forked ranks. `broken` is called in each of them."""

    def compare(name: str, *overrides: str, broken: Callable[[], None] = lambda: None) -> Result:
        comparison = plan(configured(*overrides), Layout.parse(name), steps=2, shrink="auto")
        one = record(comparison, tmp_path)

        def side(world: Any) -> measure.LayoutResults:
            broken()
            return measure.compare(comparison.many, world, 2, tmp_path, synthetic=comparison.synthetic)

        found = run_layout(comparison.layout, side)[0]
        found.write(tmp_path / "found.json")
        return judge(comparison, tmp_path, one, measure.LayoutResults.read(tmp_path / "found.json"))

    return compare


@pytest.mark.slow
def test_tp2_pp2_equals_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command, with its launcher."""
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "model: {num_layers: 3, hidden_size: 32, num_heads: 4, vocab_size: 301, max_positions: 16}\n"
        "batch: {global_size: 4, micro_size: 1}\nrun: {threads: 1}\n"
    )
    assert main(["verify", "-c", str(recipe), "--layout", "tp2.pp2", "--steps", "2", "--json", "optim.lr=3e-3"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and found["layout"] == "pp2.tp2" and found["first_divergence"] is None
    names = [row["what"] for row in found["compared"]]
    assert names[:2] == ["weights at step 0", "gradients of the first update"]
    assert {"loss, step 2", "gradient norm, step 2", "held-out loss"} <= set(names)
    assert found["compared"][0]["one"] == "40 tensors" and found["compared"][0]["difference"] == 0.0
    assert any("random tokens (data.path is not set)" in note for note in found["notes"])


def test_fsdp2_equals_one_process_on_the_users_own_data(compared: Compare, small_store: Path) -> None:
    result = compared("fsdp2", f"data.path={small_store}", "model.vocab_size=512", "data.mask_eod=true")
    assert result.is_equal and result.verdict == "fsdp2 equals one process."
    assert f"data of {small_store}" in result.comparison.notes[1]
    assert result.rows[-1].what == "held-out loss"
    assert "weights at step 0" in result.text()
    result.require_equal()


def leave_out(where: Any, name: str, instead: Callable[..., Any]) -> Callable[[], None]:
    return lambda: setattr(where, name, instead)


def other_weights(name: str, shape: torch.Size, *rest: Any) -> torch.Tensor:
    whole = init.draw(name, shape, *rest)
    return whole + 1e-6 if name == "blocks.1.mlp.up.weight" else whole


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "broken", "tensor_named", "said"),
    [
        (
            "tp2",
            leave_out(tensor, "finish_gradients", lambda *_: None),
            "wpe.weight",
            # Norms and whole biases. Clipping, whose norm is wrong now, must not make the others look wrong.
            "14 of the other 27 tensors diverge too.\nThe loss of step 1 agrees: it is the backward pass",
        ),
        (
            "pp2",
            leave_out(Pipeline, "sum_tied_gradients", lambda _: None),
            "wte.weight",
            "The loss of step 1 agrees: it is the backward pass",
        ),
        (
            "tp2",
            leave_out(collectives, "sum_to_split_tokens", lambda x, ranks: x.chunk(ranks.size, 1)[ranks.rank]),
            "wte.weight",
            "The loss of step 1 differs too: look at the forward pass",
        ),
        (
            "dp2",
            leave_out(build, "draw", other_weights),
            "blocks.1.mlp.up.weight",
            "(weights at step 0)",
        ),
    ],
    ids=["gradients of norms not summed", "tied gradients not summed", "products not summed", "other weights"],
)
def test_a_mistake_is_caught_and_its_tensor_named(
    layout: str, broken: Callable[[], None], tensor_named: str, said: str, compared: Compare
) -> None:
    result = compared(layout, broken=broken)
    assert not result.is_equal
    assert result.first_divergence == tensor_named
    with pytest.raises(VerificationError) as caught:
        result.require_equal()
    text = str(caught.value)
    assert f"{layout} is not equal to one process" in text
    assert f"First tensor that diverges, in the order of the model: {tensor_named} (" in text
    assert said in text


LLAMA = [f"model.{word}" for word in ("norm=rmsnorm", "positions=rope", "mlp=swiglu", "bias=none", "qk_norm=true")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_heads", "tensor_named"),
    [
        (2, "blocks.0.attn.q_norm.weight"),  # of which each rank has seen its own heads
        pytest.param(1, "blocks.0.attn.qkv.weight", marks=pytest.mark.slow),  # of which both have a copy of some rows
    ],
)
def test_a_block_of_llama_and_a_mistake_in_it(compared: Compare, kv_heads: int, tensor_named: str) -> None:
    settings = [*LLAMA, f"model.num_kv_heads={kv_heads}", "parallel.sequence=false"]
    assert compared("tp2", *settings).is_equal
    wrong = compared("tp2", *settings, broken=leave_out(tensor, "finish_gradients", lambda *_: None))
    assert not wrong.is_equal and wrong.first_divergence == tensor_named


# Numbers that are not finite


def test_a_comparison_of_nothing_is_refused(compared: Compare) -> None:
    with pytest.raises(
        VerificationError, match=r"no finite step in 2 .* lower precision\.scaler\.init or raise --steps"
    ):
        compared("dp2", "precision.compute=fp16", "precision.scaler.init=1e30")


def test_what_is_not_finite_never_counts_as_equal(tmp_path: Path) -> None:
    """A step that overflows on both sides is left out, and said; on one side it is a difference."""
    comparison = plan(configured(), Layout(dp=2), steps=2, shrink="auto")
    named, kinds = [("wte.weight", torch.ones(2))], (measure.WEIGHTS, measure.GRADIENTS)
    for kind in kinds:
        reference.write(tmp_path, kind, named)
    tensors = {kind: reference.compare(tmp_path, kind, named, tied=False) for kind in kinds}

    def judged(one: float, *ranks: float, held_out: float | None = None) -> Result:
        numbers = [measure.Numbers([1.0, 1.0], [norm, 1.0], held_out) for norm in (one, *ranks)]
        return judge(comparison, tmp_path, numbers[0], measure.LayoutResults(numbers[1:], tensors))

    both = judged(math.nan, math.inf, math.nan)
    assert both.is_equal and "gradient norm, step 1: not finite on either side" in both.text()
    assert [row.what for row in both.rows[2:]] == ["loss, step 1", "loss, step 2", "gradient norm, step 2"]
    for one in ((1.0, 1.0, math.nan), (1.0, math.inf, 1.0), (math.nan, math.nan, 1.0), (math.inf, 1.0, 1.0)):
        assert not judged(*one).is_equal
    assert not judged(1.0, 1.0, held_out=math.nan).is_equal


# The scaled model


def test_the_scaled_model_is_cut_as_the_model_is() -> None:
    overrides = ["model.max_positions=2048", "model.num_layers=97", "batch.global_size=1536", "batch.micro_size=4"]
    cfg = load(preset="175B", overrides=[*overrides, "init.checkpoint=", "model.vocab_size=50257"])
    layout = Layout(pp=4, tp=8, dp=2)
    choice = LayoutChoice(with_layout(cfg.parallel, layout), solve_batch(cfg.batch, 2))
    small, smaller = scaled_model.scale_down(cfg, choice)
    batch = smaller.batch
    assert (small.model.num_heads, small.model.hidden_size, small.model.ffn_size) == (16, 256, 1024)
    assert small.model.num_layers == 5, "97 layers on 4 stages are uneven, and so are 5"
    assert small.model.vocab_size == 50257 and small.data.seq_len == small.model.max_positions == 64
    assert (batch.global_size, batch.micro_size, batch.accumulation) == (32, 2, 8)


@pytest.mark.parametrize(
    ("preset", "tp", "heads", "kv_heads"), [("llama3-8b", 4, 16, 8), ("llama3-8b", 16, 32, 8), ("mistral-7b", 8, 16, 8)]
)
def test_groups_of_heads_of_the_scaled_model_are_cut_or_copied_as_those_of_the_model(
    preset: str, tp: int, heads: int, kv_heads: int
) -> None:
    cfg = load(preset=preset, overrides=["batch.global_size=8", "batch.micro_size=1", "data.seq_len=2048"])
    choice = LayoutChoice(with_layout(cfg.parallel, Layout(tp=tp)), solve_batch(cfg.batch, 1))
    small = scaled_model.scale_down(cfg, choice)[0].model
    assert (small.num_heads, small.num_kv_heads) == (heads, kv_heads)
    assert small.hidden_size == heads * small.head_size and small.norm == "rmsnorm"


def test_a_model_that_does_not_fit_is_shrunk_unless_asked_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load(preset="1.3B", overrides=["batch.global_size=8", "batch.micro_size=1", "run.device=cpu"])
    monkeypatch.setattr(machine, "memory_available", lambda: 4e9)
    notes = "\n".join(plan(cfg, Layout(tp=2), steps=3, shrink="auto").notes)
    assert "a smaller model is compared, cut in the same way: tp2 needs about" in notes and "4.0 GB are free" in notes
    assert "model.num_layers 24 -> 2; model.hidden_size 2048 -> 64" in notes
    assert "batch.global_size 8 -> 2" in notes
    with pytest.raises(UsageError, match=r"--full: tp2 needs about .* Leave out --full"):
        plan(cfg, Layout(tp=2), steps=3, shrink="never")
    monkeypatch.setattr(machine, "memory_available", lambda: 1e8)
    with pytest.raises(UsageError, match=r"even with a small model\. Try a smaller layout"):
        plan(cfg, Layout(tp=2), steps=3, shrink="auto")


def test_shards_of_the_layout_need_the_memory_of_one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that says nothing of a layout has zero 0; the layout that is asked for has stage 3."""
    cfg = load(preset="345M", overrides=["batch.global_size=8", "batch.micro_size=1", "run.device=cpu"])
    monkeypatch.setattr(machine, "memory_available", lambda: 20e9)
    plan(cfg, Layout(fsdp=4), steps=1, shrink="never")
    with pytest.raises(UsageError, match=r"--full: dp4 needs about"):
        plan(cfg, Layout(dp=4), steps=1, shrink="never")


def test_what_is_not_as_configured_is_said() -> None:
    settings = ["model.dropout_hidden=0.1", "train.compile=true", "precision.compute=bf16", "data.path=nowhere"]
    notes = "\n".join(plan(configured(*settings), Layout(tp=2), steps=3, shrink="auto").notes)
    assert "dropout is off" in notes and "train.compile is off" in notes
    assert "in bf16 rounding hides small mistakes" in notes and "random tokens (nowhere" in notes


# Refusals


@pytest.mark.parametrize(
    ("layout", "settings", "said"),
    [
        (Layout(tp=8), [], "8 does not divide model.num_heads (4)"),
        (Layout(pp=4), [], "4 pipeline stages, but the model has 2 layers"),
        (Layout(dp=3), [], "8 is not a multiple of micro_size x data-parallel (2 x 3) = 6"),
        (Layout(), [], "nothing to compare it with. Needed: such as tp2.pp2"),
        (
            Layout(tp=2),
            ["parallel.zero=2", "parallel.fsdp=2"],
            "parallel.zero: 2 shards over parallel.fsdp, which is 1",
        ),
    ],
)
def test_refused_before_anything_runs(layout: Layout, settings: list[str], said: str) -> None:
    with pytest.raises((ConfigError, UsageError)) as caught:
        plan(configured(*settings), layout, steps=3, shrink="auto")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "verify: nothing to verify. Needed: a dataset, run or checkpoint, or -c FILE --layout tp2.pp2"),
        (["--preset", "tiny", "--layout", "tp2.xx3"], "'xx3' is not an axis and a number"),
        (["--preset", "tiny", "--layout", "tp2", "--steps", "0"], "--steps: 0. Needed: 1 or more."),
        (["--preset", "tiny"], "--layout: 1 is one process"),
    ],
)
def test_refused_by_the_command(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert said in capsys.readouterr().err
