"""What FleetX and PaddleNLP have in common: names, orders, and a network with a fixed GELU and epsilon.

Matrices are [in, out]. QKV is three tensors, or one (`fuse_attention_qkv`) whose columns are ordered as our rows are.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch

from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.checkpoint.rules import Rule, Table, block_rules
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

WORDS = "gpt.embeddings.word_embeddings.weight"
POSITIONS = "gpt.embeddings.position_embeddings.weight"
BLOCK = "gpt.decoder.layers.{i}"
NORM = "gpt.decoder.norm"
HEADS = ("lm_head.decoder.weight", "lm_head.weight")  # PaddleNLP names the tied head as well: before 2.6, and since
# Both call F.gelu(..., approximate=True) and LayerNorm(epsilon=1e-5), whatever their settings say.
FIXED: dict[str, object] = {"gelu": "tanh", "layernorm_eps": 1e-5, "tied": True}


def _table(qkv: str | tuple[str, ...]) -> Table:
    modules: dict[str, Any] = {
        "ln1": f"{BLOCK}.norm1",
        "attn.qkv": qkv,
        "attn.out": f"{BLOCK}.self_attn.out_proj",
        "ln2": f"{BLOCK}.norm2",
        "mlp.up": f"{BLOCK}.linear1",
        "mlp.down": f"{BLOCK}.linear2",
    }
    return Table(
        "GPT of PaddlePaddle",
        [
            Rule("wte.weight", (WORDS,)),
            Rule("wpe.weight", (POSITIONS,)),
            *block_rules(modules, transposed=("attn.qkv", "attn.out", "mlp.up", "mlp.down")),
            Rule("ln_f.weight", (f"{NORM}.weight",)),
            Rule("ln_f.bias", (f"{NORM}.bias",)),
        ],
    )


FUSED = _table(f"{BLOCK}.self_attn.qkv_proj")
SEPARATE = _table(tuple(f"{BLOCK}.self_attn.{letter}_proj" for letter in "qkv"))


def table_of(names: Iterable[str]) -> tuple[Table, str]:
    """With its QKV in words."""
    if any(name.endswith(".self_attn.qkv_proj.weight") for name in names):
        return FUSED, "fused, head by head"
    return SEPARATE, "q, k and v apart"


def plain_name(name: str) -> str:
    """The name that the tensor has in a model of one process.

    >>> plain_name("_layers.3.norm1.weight"), plain_name("shared_layers.embed.word_embeddings.weight")
    ('gpt.decoder.layers.2.norm1.weight', 'gpt.embeddings.word_embeddings.weight')
    """
    name = name.removeprefix("_layers.")
    if name.startswith("shared_layers.embed."):
        return name.replace("shared_layers.embed.", "gpt.embeddings.", 1)
    # Interleaved stages number their layers from the first of each chunk: "5.1." is layer 6.
    numbered = re.fullmatch(r"(\d{1,6})\.(?:(\d{1,6})\.)?(.+)", name)
    if numbered is None:
        return name if name.startswith(("gpt.", "lm_head.")) else f"gpt.{name}"
    layer, rest = int(numbered[1]) + int(numbered[2] or 0), numbered[3]
    if rest.removeprefix("embed.").startswith(("word_embeddings.", "position_embeddings.")):
        return f"gpt.embeddings.{rest.removeprefix('embed.')}"
    if rest.removeprefix("norm.") in ("weight", "bias"):
        return f"{NORM}.{rest.removeprefix('norm.')}"
    return f"{BLOCK.replace('{i}', str(layer - 1))}.{rest}"


def same(one: LazyTensor, other: LazyTensor) -> bool:
    return one.shape == other.shape and torch.equal(one.read(), other.read())


def without_head(tensors: LazyTensors, where: str) -> dict[str, LazyTensor]:
    """The head is the word embedding, always."""
    others = dict(tensors)
    for name in HEADS:
        head = others.pop(name, None)
        if head is not None and WORDS in others and not same(head, others[WORDS]):
            raise CheckpointError(
                f"{where}: '{name}' is not the word embedding, to which Paddle's GPT ties its head. It belongs to "
                "another model, or was edited."
            )
    return others


def require_same_network(model: ModelConfig, system: str) -> None:
    for key, value in FIXED.items():
        if getattr(model, key) != value:
            raise CheckpointError(
                f"model.{key} is {getattr(model, key)}, and {system}'s GPT computes with {value} whatever is asked of "
                f"it: the weights would give other logits there. To write them nevertheless: -o model.{key}={value}."
            )
