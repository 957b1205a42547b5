"""nanoGPT's ckpt.pt: GPT-2's names with plain [out, in] matrices, and `model_args` beside them.

Its GELU is the exact one. Checkpoints of before June 2023 were trained with the tanh form, which nothing in them tells:
-o model.gelu=tanh.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import (
    Table,
    conflicts_with,
    infer_model,
    match,
    other_head,
    split,
    zero_biases,
)
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config, unknown_classes
from gptworks.checkpoint.systems.openai_names import openai_rules
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

NAME = "nanogpt"
TITLE = "nanoGPT checkpoint"
CUTS = False
SUFFIX = ".pt"
TOLERANCE = EXACT

TABLE = Table(TITLE, openai_rules())
_FILE = "ckpt.pt"
_MASK = r"\.attn\.bias$"
_EPSILON = 1e-5  # written into its code


def recognise(path: Path) -> bool:
    file = _file(path)
    if not torch_file.is_torch_file(file):
        return False
    try:
        content = torch_file.read(file).content
    except CheckpointError:
        return file.name == _FILE
    return isinstance(content, dict) and "model" in content and "model_args" in content


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    file = _file(path)
    file_content = torch_file.read(file)
    content = file_content.content if isinstance(file_content.content, dict) else {}
    model_args, state = content.get("model_args"), content.get("model")
    if not isinstance(model_args, dict) or not isinstance(state, dict):
        raise CheckpointError(f"{file}: no checkpoint of nanoGPT; needed: a dictionary with 'model' and 'model_args'.")
    # torch.compile puts its own name before all others.
    tensors = {
        re.sub(r"^(module\.|_orig_mod\.)+", "", str(name)): each
        for name, each in state.items()
        if isinstance(each, LazyTensor)
    }
    numbers = _numbers(model_args, content.get("gptworks"))
    known = {"gelu": "erf", "layernorm_eps": _EPSILON, **numbers}
    values = infer_model(TABLE, [tensors], known, overrides, str(file))
    _require_layers(model_args, values, file)
    model = model_config(values, str(file))
    remarks = unknown_classes(file_content.unknown)
    if model_args.get("bias") is False:
        tensors |= zero_biases(TABLE, tensors, model)
        remarks.append("trained without biases (bias=False): biases of zero, which compute the same")
    matched = match(TABLE, [tensors], model, ignored=_MASK)
    if model.tied and (problem := other_head(TABLE, [tensors])):
        matched.misshapen.insert(0, problem)
    step = content.get("iter_num")
    about = {"step": step} if type(step) is int else {}
    return Opened(
        path,
        NAME,
        model,
        matched,
        about=about | {"gelu": model.gelu},
        files=[file],
        tokenizer=file.parent,
        remarks=remarks,
        conflicts=conflicts_with(numbers, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    """Writes what nanoGPT's sample.py and train.py (init_from=resume) read. The optimizer starts without moments."""
    model = weights.model
    if not model.tied:
        raise CheckpointError("model.tied is false: nanoGPT has no head of its own. Nothing was written.")
    if model.ffn_size != 4 * model.hidden_size:
        raise CheckpointError(
            f"model.ffn_size is {model.ffn_size}: nanoGPT has only 4 x hidden_size ({4 * model.hidden_size}). "
            "Nothing was written."
        )
    theirs = split(TABLE, weights.tensors, model)
    content = {
        "model": {**theirs, "lm_head.weight": theirs["transformer.wte.weight"]},
        "model_args": {
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_embd": model.hidden_size,
            "block_size": model.max_positions,
            "bias": True,
            "vocab_size": model.vocab_size,
            "dropout": model.dropout_hidden,
        },
        "optimizer": _fresh_optimizer(theirs.values()),
        "iter_num": weights.step,
        "best_val_loss": float("inf"),
        "config": {},
        # What nanoGPT cannot say and does not do: so that nothing is lost on the way back.
        "gptworks": {"gelu": model.gelu, "layernorm_eps": model.layernorm_eps},
    }
    torch_file.write(path, content)
    weights.notes.extend(_differences(model))
    return [path]


def _differences(model: ModelConfig) -> list[str]:
    """What nanoGPT itself would compute otherwise; reading the file with gptworks keeps to the model."""
    differences = []
    if model.gelu != "erf":
        differences.append(
            f"the GELU of this model is the {model.gelu} form; nanoGPT has the exact one, and differs a little"
        )
    if model.layernorm_eps != _EPSILON:
        differences.append(f"model.layernorm_eps is {model.layernorm_eps:g}; nanoGPT has {_EPSILON:g}")
    return differences


def _fresh_optimizer(tensors: Iterable[LazyTensor]) -> dict[str, Any]:
    """The state of AdamW before its first step, in nanoGPT's two groups: matrices decay, vectors do not."""
    tensors = list(tensors)
    decayed = sum(len(each.shape) > 1 for each in tensors)
    groups = []
    for decay, numbers in ((0.1, range(decayed)), (0.0, range(decayed, len(tensors)))):
        settings = {"lr": 6e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": decay, "amsgrad": False}
        settings |= {"foreach": None, "maximize": False, "capturable": False, "differentiable": False, "fused": None}
        groups.append({**settings, "params": list(numbers)})
    return {"state": {}, "param_groups": groups}


def _file(path: Path) -> Path:
    return path / _FILE if path.is_dir() else path


def _numbers(model_args: Mapping[Any, Any], ours: object) -> dict[str, object]:
    """What the file says of what no shape tells."""
    numbers: dict[str, object] = {}
    if isinstance(ours, dict):
        numbers |= {key: ours[key] for key in ("gelu", "layernorm_eps") if key in ours}
    if model_args.get("n_head") is not None:
        numbers["num_heads"] = model_args["n_head"]
    if model_args.get("dropout") is not None:
        numbers |= dict.fromkeys(("dropout_embed", "dropout_hidden", "dropout_attention"), model_args["dropout"])
    return numbers


def _require_layers(model_args: Mapping[Any, Any], values: Mapping[str, object], file: Path) -> None:
    layers = model_args.get("n_layer")
    if type(layers) is int and layers != values["num_layers"]:
        raise CheckpointError(
            f"{file}: has {values['num_layers']} layers, and its model_args say n_layer {layers}. It is not whole."
        )
