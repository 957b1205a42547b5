"""Shapes by name, and the closed forms over them: parameters, FLOPs, bytes of a checkpoint."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gptworks.config import load, presets
from gptworks.config.schema import ModelConfig
from gptworks.errors import ConfigError
from gptworks.model import GPT
from gptworks.plan import sizes

# OpenAI's four are what Hugging Face counts in the published checkpoints; the rest is worked out by hand from
# V h + S h + L (12 h^2 + 13 h) + 2 h.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "117M": 124_475_904,
    "345M": 354_871_296,
    "1.3B": 1_313_722_368,
    "2.7B": 2_649_052_160,
    "6.7B": 6_654_402_560,
    "13B": 12_848_384_000,
    "175B": 174_603_264_000,
    "tiny": 7_242_624,
    "tiny-4k": 1_334_016,
}


def test_all_presets_are_counted_here() -> None:
    assert presets.names() == list(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_every_preset(name: str) -> None:
    config = presets.model_config(name)
    with torch.device("meta"):
        model = GPT(config)
    assert sizes.num_parameters(config) == PARAMETERS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("124M", "gpt2"),
        ("355M", "gpt2-medium"),
        ("774M", "gpt2-large"),
        ("1.5B", "gpt2-xl"),
        ("gpt2-small", "gpt2"),
        ("345m", "345M"),
        ("GPT2-XL", "gpt2-xl"),
    ],
)
def test_other_names(alias: str, name: str) -> None:
    assert presets.find(alias) == presets.find(name)


def test_unknown_preset_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        load(preset="gpt5")
    assert caught.value.problems[0].startswith("'gpt5' is not known. Did you mean gpt2? Presets: gpt2, ")
    assert all(name in caught.value.problems[0] for name in [*presets.names(), *presets.aliases()])


def test_what_find_gives_back_is_a_copy() -> None:
    presets.find("tiny")["num_layers"] = 99
    assert presets.find("tiny")["num_layers"] == 4


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_with_another_ffn_size_and_an_untied_head(tied: bool) -> None:
    config = ModelConfig(
        num_layers=3, hidden_size=48, num_heads=4, ffn_size=100, vocab_size=77, max_positions=20, tied=tied
    )
    with torch.device("meta"):
        model = GPT(config)
    assert sizes.num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_flops_are_what_torch_counts() -> None:
    length, rows = 32, 3
    config = ModelConfig(
        num_layers=2, hidden_size=64, num_heads=4, ffn_size=200, vocab_size=300, max_positions=length, attention="math"
    )
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(rows, length, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    counted = {str(name).partition("aten.")[2]: flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = next(flops for name, flops in counted.items() if name.startswith("bmm"))
    # The counter takes attention over the whole square; we count the half that causal attention needs.
    expected = (counter.get_total_flops() - attention / 2) / (rows * length)
    assert sizes.flops_per_token(config, length) == expected


def test_checkpoint_holds_weights_two_moments_and_the_portable_copy() -> None:
    config = presets.model_config("tiny-4k")
    weights = 4 * PARAMETERS["tiny-4k"]
    assert sizes.checkpoint_bytes(config, portable=False) == 3 * weights
    assert sizes.checkpoint_bytes(config, portable=True) == 4 * weights


def test_presets_are_listed_with_their_counts(run_cli) -> None:
    lines = run_cli("config", "presets").stdout.splitlines()
    assert [line.split()[0] for line in lines] == list(PARAMETERS)
    assert [line.split()[1] for line in lines] == [f"{count:,}" for count in PARAMETERS.values()]
    assert lines[0].endswith("also 124M, gpt2-small")
