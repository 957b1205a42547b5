"""Logits of weights that are still in files, one block in memory at a time."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gptworks import cpu
from gptworks.checkpoint.stored import StoredTensors
from gptworks.config.schema import ModelConfig
from gptworks.model.gpt import Block, normalize
from gptworks.tokenizer import Tokenizer

# Plain words, so that any trained model of English has a loss below chance on them.
ENGLISH = (
    "The city was founded in the nineteenth century near the mouth of the river. Most of the people who live there "
    "work in the port or in one of the small towns along the coast, and in the summer many visitors come from the "
    "north of the country to see the old houses and the museum."
)
_ROWS = 4096  # of the vocabulary, at once


@torch.no_grad()
def logits(model: ModelConfig, tensors: StoredTensors, tokens_BT: Tensor) -> Tensor:
    """[B, T, V] in fp32, whatever the weights are stored in."""
    cpu.require(torch.float32)

    def wide(name: str) -> Tensor:
        return tensors[name].read().float()

    positions = torch.arange(tokens_BT.shape[1])
    x_BTD = tensors["wte.weight"].read()[tokens_BT].float() + tensors["wpe.weight"].read()[positions].float()
    for layer in range(model.num_layers):
        with torch.device("meta"):
            block = Block(model)
        block.load_state_dict({name: wide(f"blocks.{layer}.{name}") for name in block.state_dict()}, assign=True)
        x_BTD = block.eval()(x_BTD, None, None)
    x_BTD = normalize(x_BTD, wide("ln_f.weight"), wide("ln_f.bias"), model.layernorm_eps)
    head = tensors["wte.weight" if model.tied else "head.weight"].read()
    return torch.cat([F.linear(x_BTD, rows.float()) for rows in head.split(_ROWS)], dim=-1)


def sample_tokens(model: ModelConfig) -> Tensor:
    """Two rows spread over the vocabulary, the same ones every time."""
    length = min(32, model.max_positions)
    return (torch.arange(2 * length) * 7919 + 13).remainder(model.vocab_size).view(2, length)


def english_loss(model: ModelConfig, tensors: StoredTensors, tokenizer: Tokenizer) -> float:
    """Nats per token of a plain English text, for people to judge.

    It proves nothing about the source: a small model with a wrong number of heads, or QKV in a wrong order, has hardly
    another loss, sometimes a lower one (docs/decisions/0003).
    """
    ids = torch.tensor([tokenizer.encode(ENGLISH)[: model.max_positions]])
    found = logits(model, tensors, ids)[:, :-1, : tokenizer.vocab_size]
    return float(F.cross_entropy(found.flatten(0, 1), ids[:, 1:].flatten()))


def chance(vocab_size: int) -> float:
    return math.log(vocab_size)
