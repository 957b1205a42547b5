"""Hugging Face: a folder of config.json, model.safetensors (or pytorch_model.bin, or shards), tokenizer files.

It is our portable checkpoint as well. What differs between GPT-2, Llama and others is in `huggingface_families.py`.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptworks import json_text
from gptworks.checkpoint.formats import safetensors_file, torch_file
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors, in_memory
from gptworks.checkpoint.rules import (
    conflicts_with,
    infer_model,
    match,
    other_head,
    settle,
    split,
)
from gptworks.checkpoint.systems import huggingface_families as families
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config, unknown_classes
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.pickle_values import brief

NAME = "hf"
TITLE = "Hugging Face folder (GPT-2, Llama, Mistral, Qwen2, Qwen3)"
CUTS = False
SUFFIX = ""
TOLERANCE = EXACT

TABLE = families.GPT2.table
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WHOLE = tuple(name.removesuffix(".index.json") for name in _INDEXES)


def recognise(path: Path) -> bool:
    if path.is_file():
        return _is_file_of_weights(path)
    try:
        kind = json_text.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
    except (OSError, ValueError, TypeError, LookupError):
        return False
    if not isinstance(kind, str):
        return False
    # A folder of another family is one too: opening it says which are known.
    return kind in families.FAMILIES or any((path / name).is_file() for name in (*_INDEXES, *_WHOLE))


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    """A folder, or a file of weights: with the config.json beside it, or with numbers from shapes and the user."""
    folder = path.parent if path.is_file() else path
    if path.is_dir() and (folder / "config.json").is_file():
        _config_in(folder)  # of another family: that is stored before a file is missed
    is_part = path.is_file() and path in _named_by_an_index(folder)
    tensors, files, remarks = _open(folder, of_shards=is_part) if path.is_dir() or is_part else _open_file(path)
    about: dict[str, Any] = {"files": len(files)} if len(files) > 1 else {}
    stored: dict[str, object] = {}
    family, eod_id, bos_id = families.GPT2, None, None
    if path.is_dir() or (folder / "config.json").is_file():
        family, theirs = _config_in(folder)
        stored = family.read(theirs, str(folder / "config.json"))
        model = read_config(folder, overrides)
        tensors = _with_prefix(tensors, family.prefix)
        ends = theirs.get("eos_token_id")
        eod_id = ends[0] if isinstance(ends, list) and ends else ends
        bos_id = theirs.get("bos_token_id")
    else:
        tensors = _with_prefix(tensors, family.prefix)
        known = {"gelu": "tanh", "layernorm_eps": 1e-5, "tied": other_head(TABLE, [tensors]) is None}
        model = model_config(infer_model(TABLE, [tensors], known, overrides, str(path)), str(path))
        about["config"] = "none beside it: GPT-2's GELU and epsilon are taken"
    matched = match(family.table, [tensors], model, ignored=family.ignored, where=str(path))
    if model.tied and (problem := other_head(family.table, [tensors])):
        matched.misshapen.insert(0, problem)
    return Opened(
        path,
        NAME,
        model,
        matched,
        about=about,
        files=files,
        tokenizer=folder,
        eod_id=eod_id if type(eod_id) is int else None,
        bos_id=bos_id if type(bos_id) is int else None,
        remarks=remarks,
        conflicts=conflicts_with(stored, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    """Spread over files of a few GB, as Hugging Face does, when it is larger."""
    theirs = split(families.family_of(weights.model).table, weights.tensors, weights.model)
    files = safetensors_file.cut_into_files({name: (each.shape, each.dtype) for name, each in theirs.items()})
    for file, names in files.items():
        shapes = {name: (theirs[name].shape, theirs[name].dtype) for name in names}
        with safetensors_file.Writer(path / file, shapes) as writer:
            for name in sorted(names):
                writer.write(theirs[name].read())
    written = [path / file for file in files]
    if len(files) > 1:
        written.append(write_index(path, files, sum(each.num_bytes for each in theirs.values())))
    dtypes = {each.dtype for each in theirs.values()}
    dtype = str(dtypes.pop()).removeprefix("torch.") if len(dtypes) == 1 else "float32"
    config = write_config(path, weights.model, eod_id=weights.eod_id, bos_id=weights.bos_id, dtype=dtype)
    return [*written, config]


def save(
    folder: Path,
    cfg: ModelConfig,
    weights: Mapping[str, Tensor],
    *,
    eod_id: int | None,
    bos_id: int | None = None,
) -> None:
    """A model that is in memory, under our names."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: in_memory(tensor.detach()) for name, tensor in weights.items()}
    write(folder, Weights(cfg, tensors, eod_id, bos_id=bos_id))


def write_index(folder: Path, files: Mapping[str, list[str]], total_size: int) -> Path:
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path


def write_config(
    folder: Path, cfg: ModelConfig, *, eod_id: int | None, bos_id: int | None = None, dtype: str = "float32"
) -> Path:
    """Where nothing says what begins a text, the end of a document does, as in GPT-2."""
    family = families.family_of(cfg)
    values = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        **family.write(cfg),
        "bos_token_id": eod_id if bos_id is None else bos_id,
        "eos_token_id": eod_id,
        "dtype": dtype,
    }
    path = folder / "config.json"
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return path


def read_config(folder: Path, overrides: Mapping[str, object] | None = None) -> ModelConfig:
    path = folder / "config.json"
    family, theirs = _config_in(folder)
    return model_config(settle(family.read(theirs, str(path)), overrides or {}, str(path)), str(path))


def _config_in(folder: Path) -> tuple[families.Family, dict[str, Any]]:
    path = folder / "config.json"
    try:
        theirs = json_text.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: not a checkpoint; it has no config.json (Hugging Face) and no manifest.json (gptworks)."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error}).") from None
    if not isinstance(theirs, dict):
        raise CheckpointError(f"{path}: holds a {type(theirs).__name__}, needed a JSON object.")
    kind = theirs.get("model_type")
    if not isinstance(kind, str) or kind not in families.FAMILIES:
        known = ", ".join(repr(name) for name in families.FAMILIES)
        raise CheckpointError(f"{path}: model_type is {kind!r}, needed one of {known}.")
    return families.FAMILIES[kind], theirs


def _with_prefix(tensors: LazyTensors, prefix: str) -> LazyTensors:
    """Files from the hub may leave out the prefix, as those of a model without its head do."""
    if any(name.startswith(prefix) for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else f"{prefix}{name}": each for name, each in tensors.items()}


def _open(folder: Path, *, of_shards: bool) -> tuple[LazyTensors, list[Path], list[str]]:
    """Tensors, files, and what a user should know about them. Where a folder has one file and shards as well, the file
    counts, as in transformers; with `of_shards`, they do."""
    for index in _INDEXES:
        whole = folder / index.removesuffix(".index.json")
        if whole.is_file() and not of_shards:
            files = [whole]
        elif (folder / index).is_file():
            files = _shards(folder / index)
        else:
            continue
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {missing[0].name} is missing, which {index} names. Copy the folder again."
            )
        remarks: list[str] = []
        tensors: dict[str, LazyTensor] = {}
        for file in files:
            tensors |= _read(file, remarks)
        return tensors, files, remarks
    raise CheckpointError(
        f"{folder}: model.safetensors is missing. Needed: model.safetensors, its shards, or pytorch_model.bin."
    )


def _open_file(path: Path) -> tuple[LazyTensors, list[Path], list[str]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder.")
    remarks: list[str] = []
    return _read(path, remarks), [path], remarks


def _is_file_of_weights(path: Path) -> bool:
    """By the names of its tensors: of a GPT-2, or of another family with its config.json beside it."""
    try:
        is_known = path.suffix == ".safetensors" or torch_file.is_torch_file(path)
        names = set(_read(path, [])) if is_known else set()
    except CheckpointError:
        return path.name in ("model.safetensors", "pytorch_model.bin")
    is_llama_kind = any(re.fullmatch(r"(model\.)?layers\.\d+\.self_attn\.q_proj\.weight", name) for name in names)
    if is_llama_kind and (path.parent / "config.json").is_file():
        return True
    return any(re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.c_attn\.weight", name) for name in names)


def _named_by_an_index(folder: Path) -> list[Path]:
    return [file for name in _INDEXES if (folder / name).is_file() for file in _shards(folder / name)]


def _read(file: Path, remarks: list[str]) -> dict[str, LazyTensor]:
    return safetensors_file.read(file) if file.suffix == ".safetensors" else _read_pickle(file, remarks)


def _read_pickle(file: Path, remarks: list[str]) -> dict[str, LazyTensor]:
    pickled = torch_file.read(file)
    content = pickled.content
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, needed a dictionary of tensors.")
    remarks += unknown_classes(pickled.unknown, file)
    if others := [str(name) for name, each in content.items() if not isinstance(each, LazyTensor)]:
        remarks.append(f"{file}: left out what is not a tensor: {brief(others)}")
    return {str(name): each for name, each in content.items() if isinstance(each, LazyTensor)}


def _shards(index: Path) -> list[Path]:
    try:
        names = json_text.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / Path(name).name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r}). Copy it again.") from None
