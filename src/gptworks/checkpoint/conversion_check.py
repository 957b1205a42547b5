"""Logits of weights that are still in files, one module in memory at a time."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptworks import cpu
from gptworks.architecture import canonical_name
from gptworks.checkpoint.lazy_tensor import LazyTensors
from gptworks.config.schema import ModelConfig
from gptworks.model import GPT
from gptworks.tokenizer import Tokenizer

# Plain words, so that any trained model of English has a loss below chance on them.
ENGLISH = (
    "The city was founded in the nineteenth century near the mouth of the river. Most of the people who live there "
    "work in the port or in one of the small towns along the coast, and in the summer many visitors come from the "
    "north of the country to see the old houses and the museum."
)


@torch.no_grad()
def logits(model: ModelConfig, tensors: LazyTensors, tokens_BT: Tensor) -> Tensor:
    """[B, T, V] in fp32, whatever the weights are stored in: the model itself, each of whose modules reads its
    parameters before it computes and forgets them afterwards."""
    cpu.require(torch.float32)
    with torch.device("meta"):
        network = GPT(model).eval()

    def read(module: nn.Module, _: object) -> None:
        for key in dict(module.named_parameters(recurse=False)):
            name = canonical_name(f"{names[module]}.{key}", tied=model.tied)
            setattr(module, key, nn.Parameter(tensors[name].read().float(), requires_grad=False))

    def forget(module: nn.Module, *_: object) -> None:
        module.to("meta")

    names = {module: name for name, module in network.named_modules() if [*module.parameters(recurse=False)]}
    for module in names:
        module.register_forward_pre_hook(read)
        module.register_forward_hook(forget)
    logits: Tensor = network(tokens_BT)
    return logits


def sample_tokens(model: ModelConfig) -> Tensor:
    """Two rows spread over the vocabulary, the same ones every time."""
    length = min(32, model.max_positions)
    return (torch.arange(2 * length) * 7919 + 13).remainder(model.vocab_size).view(2, length)


def english_loss(model: ModelConfig, tensors: LazyTensors, tokenizer: Tokenizer) -> float:
    """Nats per token of a plain English text, for people to judge.

    It proves nothing about the source: a small model with a wrong number of heads, or QKV in a wrong order, has hardly
    another loss, sometimes a lower one (docs/decisions/0003).
    """
    ids = torch.tensor([tokenizer.encode(ENGLISH)[: model.max_positions]])
    predicted = logits(model, tensors, ids)[:, :-1, : tokenizer.vocab_size]
    return float(F.cross_entropy(predicted.flatten(0, 1), ids[:, 1:].flatten()))


def chance(vocab_size: int) -> float:
    return math.log(vocab_size)
