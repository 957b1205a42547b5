"""Megatron core: `decoder.layers.0.self_attention.linear_qkv.weight`, in folders as Megatron-LM always had them.

Matrices are [out, in], QKV is ours, also where heads share keys and values. A gate and what it lets through are one
matrix, the gate first, on every tensor-parallel rank. Written are the names of its local layers; those of Transformer
Engine, where a norm is part of the matrix after it, are read as well.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gptworks import architecture
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Rule, Table, block_rules
from gptworks.checkpoint.systems import (
    megatron_core_kinds,
    megatron_folder,
    megatron_folder_writing,
    megatron_settings,
)
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights
from gptworks.config.schema import ModelConfig

NAME = "megatron-core"
TITLE = "Megatron core checkpoint of --ckpt-format torch"
CUTS = True
SUFFIX = ""
TOLERANCE = EXACT

_LAYERS = "decoder.layers."
_INNER = _LAYERS + "{i}.mlp.linear_fc1"
_HALVES = ("[gate]", "[up]")  # of that matrix, as we call them while it is cut


def _table(modules: Mapping[str, str]) -> Table:
    return Table(
        TITLE,
        [
            Rule("wte.weight", ("embedding.word_embeddings.weight",)),
            Rule("wpe.weight", ("embedding.position_embeddings.weight",)),
            *block_rules(
                {
                    "ln1": _LAYERS + "{i}.input_layernorm",
                    "attn.qkv": _LAYERS + "{i}.self_attention.linear_qkv",
                    "attn.q_norm": _LAYERS + "{i}.self_attention.q_layernorm",
                    "attn.k_norm": _LAYERS + "{i}.self_attention.k_layernorm",
                    "attn.out": _LAYERS + "{i}.self_attention.linear_proj",
                    "ln2": _LAYERS + "{i}.pre_mlp_layernorm",
                    **modules,
                    "mlp.down": _LAYERS + "{i}.mlp.linear_fc2",
                }
            ),
            Rule("ln_f.weight", ("decoder.final_layernorm.weight",)),
            Rule("ln_f.bias", ("decoder.final_layernorm.bias",)),
            Rule("head.weight", ("output_layer.weight",)),
        ],
        known={**architecture.LLAMA, "rope_scaling": ("linear", "llama3")},
    )


_TABLES = {
    "gelu": _table({"mlp.up": _INNER}),
    "swiglu": _table({"mlp.gate": _INNER + _HALVES[0], "mlp.up": _INNER + _HALVES[1]}),
}
_INSIDE = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
_LINEAR = re.compile(r"(.*\.linear_(?:qkv|proj|fc1|fc2)\.)weight")


def recognise(path: Path) -> bool:
    return megatron_folder.recognise(path, _is_mine)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    loaded = megatron_folder.load(path, _canonical)
    kind = megatron_core_kinds.read(loaded.settings or {}, str(path))
    if not kind:
        megatron_settings.require_gpt2(loaded, _TABLES["gelu"])
    if kind.get("mlp") == "swiglu":
        loaded = replace(loaded, tensors=[_halved(shard) for shard in loaded.tensors])
    table = _TABLES[str(kind.get("mlp", "gelu"))]
    return megatron_settings.open_with(loaded, NAME, table, kind, overrides, {})


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    model: ModelConfig = weights.model
    table = _TABLES[model.mlp]
    table.require(model)
    settings = {"transformer_impl": "local", "use_legacy_models": False, "ckpt_format": "torch"}
    settings |= megatron_core_kinds.write(model, cut.tp)
    return megatron_folder_writing.write(path, weights, cut, table, _LAYERS, _with_extra_state, settings)


def _is_mine(name: str) -> bool:
    return ".linear_qkv." in name or re.match(r"(module\.)*embedding\.word_embeddings\.", name) is not None


def _canonical(name: str) -> str | None:
    name = re.sub(r"^(module\.)+", "", name)
    if name.endswith("_extra_state"):
        return None
    for theirs, local in _INSIDE.items():
        name = name.replace(theirs, local)
    return name


def _halved(shard: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    halved: dict[str, LazyTensor] = {}
    for name, stored in shard.items():
        inner = re.fullmatch(r"(.*\.mlp\.linear_fc1)\.(weight|bias)", name)
        if inner is None or not stored.shape or stored.shape[0] % 2:
            halved[name] = stored
            continue
        half = stored.shape[0] // 2
        for number, called in enumerate(_HALVES):
            halved[f"{inner[1]}{called}.{inner[2]}"] = _rows(stored, number * half, half)
    return halved


def _rows(stored: LazyTensor, begin: int, count: int) -> LazyTensor:
    shape = torch.Size([count, *stored.shape[1:]])
    return LazyTensor(shape, stored.dtype, lambda: stored.read()[begin : begin + count])


def _joined(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The gate and what it lets through as one matrix again."""
    joined: dict[str, LazyTensor] = {}
    for name, stored in tensors.items():
        if _HALVES[0] in name:
            other = tensors[name.replace(*_HALVES)]
            joined[name.replace(_HALVES[0], "")] = _beside(stored, other)
        elif _HALVES[1] not in name:
            joined[name] = stored
    return joined


def _beside(first: LazyTensor, second: LazyTensor) -> LazyTensor:
    shape = torch.Size([first.shape[0] + second.shape[0], *first.shape[1:]])
    return LazyTensor(shape, first.dtype, lambda: torch.cat([first.read(), second.read()]))


def _with_extra_state(tensors: dict[str, LazyTensor], tied: bool) -> dict[str, Any]:
    """The tensors with the extra state that Megatron core's matrices ask for. It is None outside of fp8, and loading is
    strict about it."""
    state: dict[str, Any] = {}
    for name, stored in _joined(tensors).items():
        state[name] = stored
        if linear := _LINEAR.fullmatch(name):
            state[f"{linear[1]}_extra_state"] = None
    if "decoder.final_layernorm.weight" in tensors:
        state["output_layer._extra_state"] = None
    return state
