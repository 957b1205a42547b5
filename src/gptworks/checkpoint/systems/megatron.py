"""Megatron-LM before Megatron core: `language_model.encoder.layers.0.self_attention.query_key_value.weight`.

Matrices are [out, in]. The order of QKV changed twice, and `checkpoint_version` tells it.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import OrderUnknownError, Rule, Table, block_rules
from gptworks.checkpoint.systems import megatron_folder, megatron_folder_writing, megatron_settings
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights
from gptworks.errors import CheckpointError

NAME = "megatron"
TITLE = "Megatron-LM checkpoint, before Megatron core"
CUTS = True
SUFFIX = ""
TOLERANCE = EXACT

_LAYERS = "language_model.encoder.layers."
_HEAD = "language_model.output_layer.weight"
_HEAD_COPY = "word_embeddings_for_head.weight"  # of a tied head, on the last of several stages


def _table(order: str) -> Table:
    return Table(
        TITLE,
        [
            Rule("wte.weight", ("language_model.embedding.word_embeddings.weight",)),
            Rule("wpe.weight", ("language_model.embedding.position_embeddings.weight",)),
            *block_rules(
                {
                    "ln1": _LAYERS + "{i}.input_layernorm",
                    "attn.qkv": _LAYERS + "{i}.self_attention.query_key_value",
                    "attn.out": _LAYERS + "{i}.self_attention.dense",
                    "ln2": _LAYERS + "{i}.post_attention_layernorm",
                    "mlp.up": _LAYERS + "{i}.mlp.dense_h_to_4h",
                    "mlp.down": _LAYERS + "{i}.mlp.dense_4h_to_h",
                },
                order=order,
            ),
            Rule("ln_f.weight", ("language_model.encoder.final_layernorm.weight",)),
            Rule("ln_f.bias", ("language_model.encoder.final_layernorm.bias",)),
            Rule("head.weight", (_HEAD,)),
        ],
    )


QKV_VERSION = "qkv_version"  # in what the user states
TABLES = {order: _table(order) for order in ("3ad", "ad3", "a3d")}
_ORDERS = {"3ad": "q|k|v, head, size", "ad3": "head, size, q|k|v", "a3d": "head, q|k|v, size"}


def recognise(path: Path) -> bool:
    return megatron_folder.recognise(path, _is_mine)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    loaded = megatron_folder.load(path, _canonical)
    numbers = {name: value for name, value in overrides.items() if name != QKV_VERSION}
    version, remarks = _version(loaded, overrides.get(QKV_VERSION))
    order = _order(version, str(path))
    stated = "not stated, so 0" if remarks else str(version)
    about = {"checkpoint_version": stated, "order_of_qkv": _ORDERS[order]}
    megatron_settings.require_gpt2(loaded, TABLES[order])
    opened = megatron_settings.open_with(loaded, NAME, TABLES[order], {}, numbers, about)
    opened.remarks.extend(remarks)
    return opened


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    return megatron_folder_writing.write(path, weights, cut, TABLES["a3d"], _LAYERS, _nested, {})


def _is_mine(name: str) -> bool:
    return "language_model." in name or ".query_key_value." in name


def _canonical(name: str) -> str | None:
    """The encoder was called transformer, and its attention plainly attention, until 2021."""
    name = re.sub(r"^(module\.)+", "", name)
    if name.endswith("_extra_state"):
        return None
    if name == _HEAD_COPY:
        return _HEAD
    if not name.startswith("language_model."):
        name = f"language_model.{name}"
    name = name.replace("language_model.transformer.", "language_model.encoder.", 1)
    return re.sub(r"(\.layers\.\d+)\.attention\.", r"\1.self_attention.", name)


def _version(loaded: megatron_folder.Loaded, stated: object) -> tuple[object, list[str]]:
    if loaded.version is not None:
        if stated is not None and stated != loaded.version:
            raise CheckpointError(
                f"{loaded.path}: its checkpoint_version is {str(loaded.version)[:40]}, and -o {QKV_VERSION}={stated} "
                "says otherwise. Leave the option out."
            )
        return loaded.version, []
    if stated is not None:
        return stated, []
    if loaded.is_bare:
        raise OrderUnknownError(
            f"{loaded.path}: tensors alone, without the checkpoint_version that Megatron saves beside them, on which "
            f"the order of QKV hangs. State it: -o {QKV_VERSION}=0 (the oldest: {_ORDERS['3ad']}), "
            f"-o {QKV_VERSION}=1 ({_ORDERS['ad3']}) or -o {QKV_VERSION}=3 (2 and later: {_ORDERS['a3d']}). A wrong one "
            "loads and computes nonsense."
        )
    return 0, [
        f"no checkpoint_version is in it: read as version 0 ({_ORDERS['3ad']}), as Megatron itself does; "
        f"-o {QKV_VERSION}=N states another"
    ]


def _order(version: object, where: str) -> str:
    if isinstance(version, int | float) and (version in (0, 1) or version >= 2):
        return "3ad" if version == 0 else "ad3" if version == 1 else "a3d"
    raise CheckpointError(
        f"{where}: checkpoint_version is {str(version)[:40]}; 0, 1 and those from 2 on are known, and the order of "
        "QKV hangs on it."
    )


def _nested(tensors: dict[str, LazyTensor], tied: bool) -> dict[str, Any]:
    """As Megatron saves it: dictionaries down to the encoder, dotted names inside."""
    language: dict[str, dict[str, Any]] = {}
    for name, stored in tensors.items():
        section, rest = name.removeprefix("language_model.").split(".", 1)
        if section == "embedding":
            module, kind = rest.split(".")
            language.setdefault(section, {})[module] = {kind: stored}
        else:
            language.setdefault(section, {})[rest] = stored
    head = language.pop("output_layer") if tied and "output_layer" in language else None
    return {"language_model": language, **({"word_embeddings_for_head": head} if head else {})}
