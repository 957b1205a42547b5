"""Shapes by name, and the closed forms over them: parameters, FLOPs, bytes of a checkpoint."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from gptworks.checkpoint.systems import huggingface
from gptworks.config import load, presets
from gptworks.config.schema import ModelConfig
from gptworks.errors import ConfigError
from gptworks.model import GPT
from gptworks.plan import sizes

# OpenAI's four are what Hugging Face counts in the published checkpoints; GPT-3's are worked out by hand from
# V h + S h + L (12 h^2 + 13 h) + 2 h. Llama's kind: the sums of the published safetensors; stories15m: its file has 28
# bytes of header, these in fp32 and two tables of 256 x 24 angles, 60,816,028 bytes in all.
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
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "tinyllama-1.1b": 1_100_048_384,
    "stories15m": 15_191_712,
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


@pytest.mark.parametrize("name", [name for name in PARAMETERS if presets.model_config(name).norm == "rmsnorm"])
def test_transformers_counts_the_same(name: str, tmp_path: Path) -> None:
    config = presets.model_config(name)
    huggingface.write_config(tmp_path, config, eod_id=None)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == PARAMETERS[name]
    assert huggingface.read_config(tmp_path) == config


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
