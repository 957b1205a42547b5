"""Every recipe loads, and trains the model its name says."""

from pathlib import Path

import pytest

from gptworks.config import Layout, load, solve_batch
from gptworks.plan import sizes

RECIPES = Path(__file__).resolve().parents[2] / "recipes"

PARAMETERS = {
    "1.3b.yaml": 1_313_722_368,
    "345m.yaml": 354_871_296,
    "gpt2-124m.yaml": 124_439_808,
    "lambada-copy.yaml": 30_044_544,
    "quickstart.yaml": 1_334_016,  # (4096 + 128) 128 + 4 (12 x 128^2 + 13 x 128) + 2 x 128
    "tiny.yaml": 1_334_016,
    "wikitext.yaml": 30_044_544,  # (50257 + 256) 384 + 6 (12 x 384^2 + 13 x 384) + 2 x 384
}


def test_every_recipe_is_counted_here() -> None:
    assert sorted(path.name for path in RECIPES.iterdir() if path.is_file()) == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_every_recipe(name: str) -> None:
    assert sizes.num_parameters(load(RECIPES / name).model) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_recipe_says_what_to_read_and_when_to_end(name: str) -> None:
    config = load(RECIPES / name)
    assert config.data.path
    assert any(config.train.ends().values())
    assert Layout.from_config(config.parallel).world_size == 1
    assert solve_batch(config.batch, 1).global_size == config.batch.global_size


def test_345m_has_the_numbers_of_the_fleetx_file() -> None:
    config = load(RECIPES / "345m.yaml")
    optim, train, scaler = config.optim, config.train, config.precision.scaler
    assert (optim.lr, optim.min_lr, optim.warmup_steps, optim.decay_steps) == (5e-5, 1e-5, 3600, 360_000)
    assert (optim.weight_decay, optim.beta1, optim.beta2, optim.eps, optim.clip) == (0.01, 0.9, 0.999, 1e-8, 1.0)
    assert (optim.warmup_from, optim.cosine_clock, optim.decay_params) == (1, "after_warmup", "weights")
    assert (train.steps, train.seed, train.log_every, train.log_style) == (500_000, 1024, 1, "fleetx")
    assert (config.precision.compute, scaler.init, scaler.growth, scaler.backoff) == ("fp16", 32768, 2.0, 0.5)
    assert (scaler.window, scaler.hysteresis) == (1000, 2)
    assert (config.evaluate.every, config.evaluate.batches, config.checkpoint.every) == (500, 10, 1000)
    assert (config.batch.global_size, config.data.split, config.data.seq_len) == (8, (949.0, 50.0, 1.0), 1024)
    assert config.init.residual_scale == "none"
    model = config.model
    assert (model.dropout_embed, model.dropout_hidden, model.dropout_attention) == (0.1, 0.1, 0.1)


def test_1_3b_is_345m_with_a_wider_model_that_recomputes() -> None:
    small, large = load(RECIPES / "345m.yaml"), load(RECIPES / "1.3b.yaml")
    assert large.model == small.model.model_copy(update={"hidden_size": 2048, "ffn_size": 8192, "head_size": 128})
    assert (small.train.recompute, large.train.recompute) == ("none", "full")
    assert large.optim == small.optim and large.precision == small.precision
