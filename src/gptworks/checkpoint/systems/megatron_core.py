"""Megatron core: `decoder.layers.0.self_attention.linear_qkv.weight`, in folders as Megatron-LM always had them.

Matrices are [out, in], QKV is ours. Written are the names of its local layers; those of Transformer Engine, where a
LayerNorm is part of the matrix after it, are read as well.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.checkpoint.rules import Rule, Table, block_rules
from gptworks.checkpoint.stored import Stored
from gptworks.checkpoint.systems import megatron_folder
from gptworks.checkpoint.systems.contract import EXACT, Cut, Opened, Weights

NAME = "megatron-core"
TITLE = "Megatron core checkpoint of --ckpt-format torch"
CUTS = True
SUFFIX = ""
TOLERANCE = EXACT

_LAYERS = "decoder.layers."
TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("embedding.word_embeddings.weight",)),
        Rule("wpe.weight", ("embedding.position_embeddings.weight",)),
        *block_rules(
            {
                "ln1": _LAYERS + "{i}.input_layernorm",
                "attn.qkv": _LAYERS + "{i}.self_attention.linear_qkv",
                "attn.out": _LAYERS + "{i}.self_attention.linear_proj",
                "ln2": _LAYERS + "{i}.pre_mlp_layernorm",
                "mlp.up": _LAYERS + "{i}.mlp.linear_fc1",
                "mlp.down": _LAYERS + "{i}.mlp.linear_fc2",
            }
        ),
        Rule("ln_f.weight", ("decoder.final_layernorm.weight",)),
        Rule("ln_f.bias", ("decoder.final_layernorm.bias",)),
        Rule("head.weight", ("output_layer.weight",)),
    ],
)
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_LINEAR = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2)\.)weight")


def recognise(path: Path) -> bool:
    return megatron_folder.recognise(path, _is_mine)


def open(path: Path, given: Mapping[str, object]) -> Opened:
    return megatron_folder.open_with(megatron_folder.load(path, _canonical), NAME, TABLE, given, {})


def write(path: Path, weights: Weights, cut: Cut = Cut()) -> list[Path]:  # noqa: B008
    settings = {"transformer_impl": "local", "use_legacy_models": False, "ckpt_format": "torch"}
    return megatron_folder.write(path, weights, cut, TABLE, _LAYERS, _with_extra_state, settings)


def _is_mine(name: str) -> bool:
    return ".linear_qkv." in name or re.match(r"(module\.)*embedding\.word_embeddings\.", name) is not None


def _canonical(name: str) -> str | None:
    name = re.sub(r"^(module\.)+", "", name)
    if name.endswith("_extra_state"):
        return None
    for theirs, local in _INSIDE.items():
        name = name.replace(theirs, local)
    return name


def _with_extra_state(tensors: dict[str, Stored], tied: bool) -> dict[str, Any]:
    """Its matrices ask for a state besides their weights, which is None outside of fp8. Loading is strict about it."""
    found: dict[str, Any] = {}
    for name, stored in tensors.items():
        found[name] = stored
        if linear := _LINEAR.fullmatch(name):
            found[f"{linear[1]}_extra_state"] = None
    if "decoder.final_layernorm.weight" in tensors:
        found["output_layer._extra_state"] = None
    return found
