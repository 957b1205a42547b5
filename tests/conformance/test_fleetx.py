"""FleetX on a single card: what its document promises, in our own words. Rows of the conformance list: S0-..."""

from pathlib import Path

import pytest
import torch

from gptworks.cli.main import main
from gptworks.config import Layout, load, solve_batch
from gptworks.errors import ConfigError
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.train import schedule

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


@pytest.mark.parametrize(("name", "width", "recompute"), [("345m", 1024, "none"), ("1.3b", 2048, "full")])
def test_s0_01_the_recipes_of_one_card_run(
    name: str, width: int, recompute: str, small_store: Path, tmp_path: Path
) -> None:
    """That they are what FleetX's files mean: test_run_fleetx."""
    recipe = load(FOLDER / f"{name}.yaml")
    shape = (recipe.model.num_layers, recipe.model.hidden_size, recipe.model.num_heads, recipe.model.vocab_size)
    assert shape == (24, width, 16, 50304)
    assert (recipe.precision.compute, recipe.train.recompute) == ("fp16", recompute)
    small = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=512", "train.steps=2"]
    small += ["model.ffn_size=128", "data.seq_len=16", f"data.path={small_store}", "run.device=cpu"]
    out = tmp_path / "run"
    assert main(["train", "-c", str(FOLDER / f"{name}.yaml"), "--out", str(out), *small]) == 0
    assert (out / "metrics.jsonl").read_text(encoding="utf-8").count('"loss"') == 2


def test_s0_03_overrides_change_single_keys_and_the_last_one_counts(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "-o",
        "model.hidden_size=64",
        "-o",
        "model.hidden_size=128",
        "model.num_layers=3",
        "-o",
        "data.split=8,1,1",
    ]
    assert main(["config", "show", "-c", str(FOLDER / "345m.yaml"), *words]) == 0
    shown = capsys.readouterr().out
    assert "hidden_size: 128" in shown and "num_layers: 3" in shown and "num_heads: 16" in shown
    config = load(FOLDER / "345m.yaml", overrides=["data.split=8,1,1", "model.ffn_size="])
    assert config.data.split == (8.0, 1.0, 1.0) and config.model.ffn_size == 4 * 1024


BATCH = {"batch.global_size": 16, "batch.micro_size": 2, "batch.accumulation": 4}


@pytest.mark.parametrize("layout", [["parallel.dp=2"], ["parallel.fsdp=2"]])
@pytest.mark.parametrize("missing", [None, *BATCH])
def test_s0_04_any_one_of_the_batch_sizes_may_be_missing(missing: str | None, layout: list[str]) -> None:
    given = [f"{key}={value}" for key, value in BATCH.items() if key != missing]
    config = load(overrides=[*given, *layout])
    plan = solve_batch(config.batch, Layout.from_config(config.parallel).data_parallel)
    assert (plan.global_size, plan.micro_size, plan.accumulation, plan.data_parallel) == (16, 2, 4, 2)


@pytest.mark.parametrize(
    ("overrides", "numbers"),
    [
        (["batch.global_size=16", "batch.micro_size=2", "batch.accumulation=4"], "16 is not 2 x 4 x 1 = 8"),
        (
            ["batch.global_size=16", "batch.micro_size=3"],
            "16 is not a multiple of micro_size x data-parallel (3 x 1) = 3",
        ),
        (
            ["batch.global_size=16", "batch.accumulation=5", "parallel.dp=2"],
            "16 is not a multiple of accumulation x data-parallel (5 x 2) = 10",
        ),
        (["batch.global_size=7", "parallel.dp=2", "parallel.fsdp=2"], "7 is not a multiple of data-parallel = 4"),
    ],
)
def test_s0_04_a_contradiction_is_refused_with_the_numbers(overrides: list[str], numbers: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=overrides)
    (problem,) = caught.value.problems
    assert problem.startswith(f"batch.global_size: {numbers}; needs batch.global_size = batch.micro_size x ")


def test_s0_04_batch_sizes_from_the_command_line(small_store: Path, run_cli) -> None:
    model = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=512"]
    options = [*model, "model.max_positions=32", f"data.path={small_store}", "train.steps=3", "run.device=cpu"]
    done = run_cli("train", "--dry-run", *options, "batch.global_size=8", "batch.micro_size=2")
    assert "batch            8 = 2 micro-batch x 4 accumulation x 1 data-parallel" in done.stdout.splitlines()
    failed = run_cli("train", "--dry-run", *options, "batch.global_size=8", "batch.micro_size=3", expect=2)
    assert "8 is not a multiple of micro_size x data-parallel (3 x 1) = 3" in failed.stderr


def test_s0_07_every_model_key_reaches_the_model(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        "model:\n"
        "  vocab_size: 211\n"
        "  hidden_size: 48\n"
        "  num_layers: 3\n"
        "  num_heads: 6\n"
        "  ffn_size:\n"  # empty: four times the hidden size
        "  dropout_hidden: 0.15\n"
        "  dropout_attention: 0.25\n"
        "  dropout_embed: 0.35\n"
        "  max_positions: 77\n"
        "init: {std: 0.05, residual_scale: none}\n"
    )
    config = load(path)
    world = World(torch.device("cpu"))
    model = build_gpt(config.model, world, torch.float32, FreshWeights(config.init, config.model.num_layers, seed=1))

    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert shapes["wte.weight"] == (211, 48)
    assert shapes["wpe.weight"] == (77, 48)
    assert list(model.blocks) == ["0", "1", "2"]
    assert shapes["blocks.2.mlp.up.weight"] == (192, 48)
    block = model.blocks["1"]
    assert block.attn.head_size == 8
    assert (block.attn.dropout.p, block.mlp.dropout.p) == (0.15, 0.15)
    assert (block.attn.core.dropout, model.dropout.p) == (0.25, 0.35)
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and ".ln" not in f".{name}":
            assert parameter.std().item() == pytest.approx(0.05, rel=0.06), name
    assert model(torch.randint(0, 211, (2, 77))).shape == (2, 77, 211)


def test_s0_07_ffn_size_may_be_given() -> None:
    shape = ["model.hidden_size=48", "model.num_heads=6"]
    assert load(overrides=shape).model.ffn_size == 192
    assert load(overrides=[*shape, "model.ffn_size=100"]).model.ffn_size == 100


def test_s0_07_dropouts_act_in_training_only() -> None:
    shape = ["model.num_layers=1", "model.hidden_size=32", "model.num_heads=2", "model.vocab_size=50"]
    tokens = torch.arange(16)[None]
    for name in ("dropout_embed", "dropout_hidden", "dropout_attention"):
        config = load(overrides=[*shape, f"model.{name}=0.5"])
        model = build_gpt(config.model, World(torch.device("cpu")), torch.float32, FreshWeights(config.init, 1, seed=1))
        assert not torch.equal(model(tokens), model(tokens)), name
        model.eval()
        assert torch.equal(model(tokens), model(tokens)), name


# The document's numbers: warmup to 1e-5 over 3,600 steps, "decay" to 5e-5 at step 360,000.
RISING = [
    "optim.lr=1e-5",
    "optim.min_lr=5e-5",
    "optim.warmup_steps=3600",
    "optim.decay_steps=360000",
    "train.steps=500000",
]


def test_s0_11_min_lr_above_lr_is_refused(run_cli) -> None:
    done = run_cli("config", "check", *RISING, expect=2)
    assert "optim.min_lr: 5e-05 is above optim.lr (1e-05). Swap them" in done.stderr
    assert "optim.allow_rising_lr: true" in done.stderr
    load(overrides=["optim.lr=1e-5", "optim.min_lr=1e-5"])  # equal is flat, not rising
    load(overrides=[*RISING, "optim.schedule=constant"])  # min_lr is not used


def test_s0_11_a_rising_rate_may_be_allowed() -> None:
    optim = load(overrides=[*RISING, "optim.allow_rising_lr=true"]).optim
    rates = {step: schedule.lr_at(step, optim, 500_000) for step in (1, 1800, 3600, 181_800, 360_000, 400_000)}
    expected = {1: 1e-5 / 3600, 1800: 5e-6, 3600: 1e-5, 181_800: 3e-5, 360_000: 5e-5, 400_000: 5e-5}
    assert rates == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_s0_11_shipped_recipes_have_them_right(recipe: Path) -> None:
    optim = load(recipe).optim
    assert optim.min_lr <= optim.lr and not optim.allow_rising_lr


def test_s0_11_there_are_recipes() -> None:
    assert RECIPES
