"""MindFormers GPT2: what its document promises, in our own words. Rows of the conformance list: S4-..."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from gptworks.config import presets
from gptworks.config.schema import ModelConfig
from gptworks.plan import sizes

# The document's names and rounded sizes, our preset, and the exact count with the tied head counted once.
SIZES = [
    ("small, 124M", "gpt2", 124_439_808, 124e6),
    ("medium, 355M", "gpt2-medium", 354_823_168, 355e6),
    ("large, 774M", "gpt2-large", 774_030_080, 774e6),
    ("xl, 1.5B", "gpt2-xl", 1_557_611_200, 1.5e9),
    ("13B", "13B", 12_848_384_000, 13e9),
]
# Counts of the other systems' shapes, from the same table.
OTHERS = [
    ("345M", 354_871_296),
    ("1.3B", 1_313_722_368),
    ("6.7B", 6_654_402_560),
    ("175B", 174_603_264_000),
]


@pytest.mark.parametrize(("name", "preset", "count", "rounded"), SIZES)
def test_s4_09_parameter_counts_of_the_documents_sizes(name: str, preset: str, count: int, rounded: float) -> None:
    assert sizes.num_parameters(presets.model_config(preset)) == count
    assert count == pytest.approx(rounded, rel=0.04)


@pytest.mark.parametrize("name", ["124M", "355M", "774M", "1.5B"])
def test_s4_09_sizes_are_known_by_the_documents_names(name: str) -> None:
    preset = {size.split(", ")[-1]: preset for size, preset, _, _ in SIZES}[name]
    assert presets.find(name) == presets.find(preset)


@pytest.mark.parametrize(("preset", "count"), OTHERS)
def test_s4_09_parameter_counts_of_the_other_systems_sizes(preset: str, count: int) -> None:
    assert sizes.num_parameters(presets.model_config(preset)) == count


@pytest.mark.parametrize(
    ("layers", "hidden", "vocab", "positions", "count"),
    [
        (64, 8192, 50257, 1024, 51_966_533_632),  # MindFormers 52B
        (12, 768, 51200, 2048, 125_950_464),
        (16, 1536, 51200, 2048, 535_096_320),
        (24, 2304, 51200, 2048, 1_652_230_656),
        (16, 3072, 51200, 2048, 1_976_162_304),
        (32, 3072, 51200, 2048, 3_788_740_608),
    ],
)
def test_s4_09_parameter_counts_of_shapes_without_a_name(layers, hidden, vocab, positions, count: int) -> None:
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=hidden // 64, vocab_size=vocab, max_positions=positions
    )
    assert sizes.num_parameters(model) == count


@pytest.mark.parametrize("preset", ["gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"])
def test_s4_09_counts_equal_transformers(preset: str) -> None:
    shape = presets.model_config(preset)
    config = GPT2Config(
        vocab_size=shape.vocab_size,
        n_positions=shape.max_positions,
        n_embd=shape.hidden_size,
        n_layer=shape.num_layers,
        n_head=shape.num_heads,
    )
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(config)
    assert sizes.num_parameters(shape) == theirs.num_parameters()


def test_s4_09_sizes_are_listed(run_cli) -> None:
    listed = run_cli("config", "presets").stdout
    for name, preset, count, _ in SIZES:
        (line,) = [line for line in listed.splitlines() if line.split()[0] == preset]
        assert f"{count:,} parameters" in line
        assert name.split(", ")[-1] in line
