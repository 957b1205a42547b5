"""A model is there soon: nothing is loaded or drawn that its weights are then written over."""

import subprocess
import sys

import pytest
import torch

from gptworks.model.gpt import embedding

BUILD = """
import sys, torch
from gptworks.config.schema import ModelConfig
from gptworks.model import GPT
with torch.device("meta"):
    GPT(ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=9, max_positions=4))
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_a_model_is_built_without_torchs_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_an_embedding_begins_as_torchs_does() -> None:
    torch.manual_seed(1)
    expected = torch.nn.Embedding(7, 5).weight
    torch.manual_seed(1)
    assert torch.equal(embedding(7, 5).weight, expected)
