"""Hugging Face GPT-2: a folder of config.json, model.safetensors (or pytorch_model.bin, or shards), tokenizer files.

It is our portable checkpoint as well.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from gptworks import json_text
from gptworks.checkpoint.formats import safetensors_file, torch_file
from gptworks.checkpoint.rules import Rule, Table, block_rules, infer_model, match, other_head, overruled, settle, split
from gptworks.checkpoint.stored import Stored, StoredTensors, in_memory
from gptworks.checkpoint.systems.contract import EXACT, Cut, Opened, Weights, left_alone, model_config
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.safe_pickle import shown
from gptworks.tokenizer import bundled

NAME = "hf"
TITLE = "Hugging Face GPT-2 folder"
CUTS = False
SUFFIX = ""
TOLERANCE = EXACT

# Their matrices are [in, out], and their QKV is all q, all k, all v.
TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("transformer.wte.weight",)),
        Rule("wpe.weight", ("transformer.wpe.weight",)),
        *block_rules(
            {
                "ln1": "transformer.h.{i}.ln_1",
                "attn.qkv": "transformer.h.{i}.attn.c_attn",
                "attn.out": "transformer.h.{i}.attn.c_proj",
                "ln2": "transformer.h.{i}.ln_2",
                "mlp.up": "transformer.h.{i}.mlp.c_fc",
                "mlp.down": "transformer.h.{i}.mlp.c_proj",
            },
            transposed=("attn.qkv", "attn.out", "mlp.up", "mlp.down"),
            order="3ad",
        ),
        Rule("ln_f.weight", ("transformer.ln_f.weight",)),
        Rule("ln_f.bias", ("transformer.ln_f.bias",)),
        Rule("head.weight", ("lm_head.weight",)),
    ],
)
_RULES = {rule.ours: rule for rule in TABLE.rules}
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_BUFFERS = r"\.attn\.(bias|masked_bias)$"  # causal masks that old files carry
_GELU = {"tanh": "gelu_new", "erf": "gelu", "sigmoid": "quick_gelu"}
_GELU_READ = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "erf",
    "quick_gelu": "sigmoid",
}


def recognise(path: Path) -> bool:
    if path.is_file():
        return _is_file_of_gpt2(path)
    try:
        return json_text.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"] == "gpt2"
    except (OSError, ValueError, TypeError, LookupError):
        return False


def open(path: Path, given: Mapping[str, object]) -> Opened:
    """A folder, or a file of weights: with the config.json beside it, or with numbers from shapes and the user."""
    folder = path.parent if path.is_file() else path
    is_part = path.is_file() and path in _named_by_an_index(folder)
    tensors, files, remarks = _open(folder) if path.is_dir() or is_part else _open_file(path)
    tensors = _with_prefix(tensors)
    about: dict[str, Any] = {"files": len(files)} if len(files) > 1 else {}
    said: dict[str, object] = {}
    eod_id = None
    if path.is_dir() or (folder / "config.json").is_file():
        said = _said(folder)
        model = read_config(folder, given)
        eod_id = json_text.loads((folder / "config.json").read_text(encoding="utf-8")).get("eos_token_id")
    else:
        known = {"gelu": "tanh", "layernorm_eps": 1e-5, "tied": other_head(TABLE, [tensors]) is None}
        model = model_config(infer_model(TABLE, [tensors], known, given, str(path)), str(path))
        about["config"] = "none beside it: GPT-2's GELU and epsilon are taken"
    return Opened(
        path,
        NAME,
        model,
        match(TABLE, [tensors], model, ignored=_BUFFERS, where=str(path)),
        about=about,
        files=files,
        tokenizer=folder,
        eod_id=eod_id if type(eod_id) is int else None,
        remarks=remarks,
        overruled=overruled(said, given),
    )


def write(path: Path, weights: Weights, cut: Cut = Cut()) -> list[Path]:  # noqa: B008
    """Spread over files of a few GB, as Hugging Face does, when it is larger."""
    theirs = split(TABLE, weights.tensors, weights.model)
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
    return [*written, write_config(path, weights.model, eod_id=weights.eod_id, dtype=dtype)]


def save(folder: Path, cfg: ModelConfig, weights: Mapping[str, Tensor], *, eod_id: int | None) -> None:
    """A model that is in memory, under our names."""
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, Weights(cfg, {name: in_memory(tensor.detach()) for name, tensor in weights.items()}, eod_id))


def rule_of(name: str) -> Rule:
    """For one of our tensors."""
    if not name.startswith("blocks."):
        return _RULES[name]
    _, layer, rest = name.split(".", 2)
    return _RULES[f"blocks.{{i}}.{rest}"].at(int(layer))


def write_index(folder: Path, files: Mapping[str, list[str]], total_size: int) -> Path:
    index = {
        "metadata": {"total_size": total_size},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return path


def write_config(folder: Path, cfg: ModelConfig, *, eod_id: int | None, dtype: str = "float32") -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config_json(cfg, eod_id, dtype), indent=2) + "\n", encoding="utf-8")
    return path


def config_json(cfg: ModelConfig, eod_id: int | None, dtype: str = "float32") -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": cfg.vocab_size,
        "n_positions": cfg.max_positions,
        "n_ctx": cfg.max_positions,
        "n_embd": cfg.hidden_size,
        "n_layer": cfg.num_layers,
        "n_head": cfg.num_heads,
        "n_inner": cfg.ffn_size,
        "activation_function": _GELU[cfg.gelu],
        "embd_pdrop": cfg.dropout_embed,
        "resid_pdrop": cfg.dropout_hidden,
        "attn_pdrop": cfg.dropout_attention,
        "layer_norm_epsilon": cfg.layernorm_eps,
        "tie_word_embeddings": cfg.tied,
        "bos_token_id": eod_id,
        "eos_token_id": eod_id,
        "dtype": dtype,
    }


def read_config(folder: Path, given: Mapping[str, object] | None = None) -> ModelConfig:
    path = folder / "config.json"
    return model_config(settle(_said(folder), given or {}, str(path)), str(path))


def _said(folder: Path) -> dict[str, object]:
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
    if theirs.get("model_type") != "gpt2":
        raise CheckpointError(f"{path}: model_type is {theirs.get('model_type')!r}, needed 'gpt2'.")
    for option in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if theirs.get(option):
            raise CheckpointError(f"{path}: {option} is set, which changes the computation and is not supported.")
    if theirs.get("scale_attn_weights") is False:
        raise CheckpointError(f"{path}: scale_attn_weights is off, which changes the computation and is not supported.")
    gelu = theirs.get("activation_function", "gelu_new")
    if gelu not in _GELU_READ:
        raise CheckpointError(f"{path}: activation_function {gelu!r}, needed one of {sorted(_GELU_READ)}.")
    return {
        "num_layers": theirs.get("n_layer", 12),
        "hidden_size": theirs.get("n_embd", 768),
        "num_heads": theirs.get("n_head", 12),
        "ffn_size": theirs.get("n_inner"),  # null = 4 x hidden_size, here as there
        "vocab_size": theirs.get("vocab_size", bundled.SIZE),
        "max_positions": theirs.get("n_positions", 1024),
        "tied": theirs.get("tie_word_embeddings", True),
        "gelu": _GELU_READ[gelu],
        "dropout_embed": theirs.get("embd_pdrop", 0.1),
        "dropout_hidden": theirs.get("resid_pdrop", 0.1),
        "dropout_attention": theirs.get("attn_pdrop", 0.1),
        "layernorm_eps": theirs.get("layer_norm_epsilon", 1e-5),
    }


def _with_prefix(tensors: StoredTensors) -> StoredTensors:
    """Files from the hub leave out the `transformer.` prefix."""
    if any(name.startswith("transformer.") for name in tensors):
        return tensors
    return {name if name.startswith("lm_head.") else f"transformer.{name}": each for name, each in tensors.items()}


def _open(folder: Path) -> tuple[StoredTensors, list[Path], list[str]]:
    """Tensors, files, and what a user should know about them."""
    for index in _INDEXES:
        whole = folder / index.removesuffix(".index.json")
        if (folder / index).is_file():
            files = _shards(folder / index)
        elif whole.is_file():
            files = [whole]
        else:
            continue
        missing = [file for file in files if not file.is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {missing[0].name} is missing, which {index} names. Copy the folder again."
            )
        remarks: list[str] = []
        tensors: dict[str, Stored] = {}
        for file in files:
            tensors |= _read(file, remarks)
        return tensors, files, remarks
    raise CheckpointError(
        f"{folder}: model.safetensors is missing. Needed: model.safetensors, its shards, or pytorch_model.bin."
    )


def _open_file(path: Path) -> tuple[StoredTensors, list[Path], list[str]]:
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file or folder.")
    remarks: list[str] = []
    return _read(path, remarks), [path], remarks


def _is_file_of_gpt2(path: Path) -> bool:
    """By the names of its tensors."""
    try:
        is_known = path.suffix == ".safetensors" or torch_file.is_torch_file(path)
        names = set(_read(path, [])) if is_known else set()
    except CheckpointError:
        return path.name in ("model.safetensors", "pytorch_model.bin")
    return any(re.fullmatch(r"(transformer\.)?h\.\d+\.attn\.c_attn\.weight", name) for name in names)


def _named_by_an_index(folder: Path) -> list[Path]:
    return [file for name in _INDEXES if (folder / name).is_file() for file in _shards(folder / name)]


def _read(file: Path, remarks: list[str]) -> dict[str, Stored]:
    return safetensors_file.read(file) if file.suffix == ".safetensors" else _read_pickle(file, remarks)


def _read_pickle(file: Path, remarks: list[str]) -> dict[str, Stored]:
    found = torch_file.read(file)
    content = found.content
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: holds a {type(content).__name__}, needed a dictionary of tensors.")
    remarks += left_alone(found.unknown, file)
    if others := [str(name) for name, each in content.items() if not isinstance(each, Stored)]:
        remarks.append(f"{file}: left out what is no tensor: {shown(others)}")
    return {str(name): each for name, each in content.items() if isinstance(each, Stored)}


def _shards(index: Path) -> list[Path]:
    try:
        names = json_text.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / Path(name).name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r}). Copy it again.") from None
