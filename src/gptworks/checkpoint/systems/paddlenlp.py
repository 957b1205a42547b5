"""PaddleNLP GPT: a folder (model_N of an output folder) with model_state.pdparams and model_config.json.

Version 2.6 and later call the settings config.json, and write them flat instead of inside `init_args`. Read are both;
written is model_config.json in the form that every version reads.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks import json_text
from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import conflicts_with, infer_model, match, split
from gptworks.checkpoint.systems import paddle_names
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config, unknown_classes
from gptworks.checkpoint.systems.paddle_names import FIXED
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

NAME = "paddlenlp"
TITLE = "PaddleNLP GPT folder"
CUTS = False
SUFFIX = ""
TOLERANCE = EXACT

FILE = "model_state.pdparams"
CONFIG = "model_config.json"
_CONFIGS = (CONFIG, "config.json")
_KEYS = {  # ours -> theirs: as written, and as Hugging Face calls it, which PaddleNLP takes as well
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "num_heads": ("num_attention_heads", "n_head"),
    "ffn_size": ("intermediate_size", "n_inner"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings", "n_positions"),
    "dropout_embed": ("hidden_dropout_prob",),
    "dropout_hidden": ("hidden_dropout_prob",),
    "dropout_attention": ("attention_probs_dropout_prob", "resid_pdrop"),
}


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.name == FILE
    return (path / FILE).is_file() or bool(_steps(path))


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    folder = path.parent if path.is_file() else path
    about: dict[str, Any] = {}
    if not (folder / FILE).is_file() and (steps := _steps(folder)):
        folder = steps[max(steps)]
        about = {"checkpoint": folder.name + (f", the last of {len(steps)}" if len(steps) > 1 else "")}
    read = pdparams.read(folder / FILE)
    tensors = paddle_names.without_head(_plain_names(read.tensors, folder / FILE), str(folder))
    table, about["qkv"] = paddle_names.table_of(tensors)
    settings, config = _settings(folder)
    known = {
        ours: settings[key] for ours, keys in _KEYS.items() for key in reversed(keys) if settings.get(key) is not None
    }
    model = model_config(infer_model(table, [tensors], {**FIXED, **known}, overrides, str(config or path)), str(path))
    eod_id = settings.get("eos_token_id")
    return Opened(
        path,
        NAME,
        model,
        match(table, [tensors], model),
        about=about,
        files=[folder / FILE, *([config] if config else [])],
        tokenizer=folder,
        eod_id=eod_id if type(eod_id) is int and eod_id < model.vocab_size else None,
        remarks=unknown_classes(read.unknown, folder / FILE),
        conflicts=conflicts_with(known, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    """QKV in three tensors, as PaddleNLP has it unless told otherwise; the tied head is not written twice."""
    paddle_names.require_same_network(weights.model, "PaddleNLP")
    pdparams.write(path / FILE, split(paddle_names.SEPARATE, weights.tensors, weights.model))
    settings = {"init_args": [_their_config(weights.model, weights.eod_id)], "init_class": "GPTForPretraining"}
    (path / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return [path / FILE, path / CONFIG]


def _steps(path: Path) -> dict[int, Path]:
    """model_N folders of an output folder."""
    if not path.is_dir():
        return {}
    named = ((re.fullmatch(r"model_(\d+)", folder.name), folder) for folder in path.iterdir())
    return {int(match[1]): folder for match, folder in named if match and (folder / FILE).is_file()}


def _plain_names(tensors: Mapping[str, LazyTensor], file: Path) -> dict[str, LazyTensor]:
    """A GPTModel without a task has no `gpt.` before its names."""
    renamed = {paddle_names.plain_name(name): stored for name, stored in tensors.items()}
    if len(renamed) < len(tensors):
        raise CheckpointError(f"{file}: two tensors have one name, with and without 'gpt.'. It was edited.")
    return renamed


def _settings(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Flat, whatever the version; with the file they are from."""
    path = next((folder / name for name in _CONFIGS if (folder / name).is_file()), None)
    if path is None:
        return {}, None
    try:
        content = json_text.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, needed a JSON object.")
    settings = _flat(content)
    if settings.get("normalize_before") is False or settings.get("scale_qk_coeff") not in (None, 1, 1.0):
        raise CheckpointError(
            f"{path}: normalize_before is off or scale_qk_coeff is not 1, which changes the computation and is not "
            "supported."
        )
    activation = settings.get("hidden_activation", settings.get("hidden_act", "gelu"))
    if activation != "gelu":
        raise CheckpointError(f"{path}: the activation is {activation!r}, needed 'gelu'.")
    return settings, path


def _flat(content: Any) -> dict[str, Any]:
    """GPTForPretraining's only argument was a GPTModel, written as a dictionary of its own arguments inside it."""
    if not isinstance(content, dict):
        return {}
    flat: dict[str, Any] = {}
    for argument in content.get("init_args") or []:
        flat |= _flat(argument)
    return flat | {key: value for key, value in content.items() if key != "init_args"}


def _their_config(model: ModelConfig, eod_id: int | None) -> dict[str, Any]:
    settings = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "intermediate_size": model.ffn_size,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout_hidden,
        "attention_probs_dropout_prob": model.dropout_attention,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": 16,
        "initializer_range": 0.02,
        "pad_token_id": eod_id or 0,
        "init_class": "GPTModel",
    }
    return settings if eod_id is None else settings | {"eos_token_id": eod_id, "bos_token_id": eod_id}
