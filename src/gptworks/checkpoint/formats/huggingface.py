"""A Hugging Face GPT-2 folder: config.json, model.safetensors (or pytorch_model.bin, or shards) and tokenizer files."""

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from gptworks.config.load import from_dict
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, ConfigError

# ours -> theirs
_TOP = {
    "wte.weight": "transformer.wte.weight",
    "wpe.weight": "transformer.wpe.weight",
    "ln_f.weight": "transformer.ln_f.weight",
    "ln_f.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "ln1": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "ln2": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")  # causal masks that old files carry
_GELU = {"tanh": "gelu_new", "erf": "gelu", "sigmoid": "quick_gelu"}
_GELU_READ = {
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_fast": "tanh",
    "gelu": "erf",
    "quick_gelu": "sigmoid",
}


def their_name(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"transformer.h.{layer}.{_BLOCK[module]}.{kind}"


def to_theirs(name: str, tensor: Tensor, cfg: ModelConfig) -> Tensor:
    """Their matrices are [in, out], and their QKV is all q, all k, all v; ours is [out, in], q|k|v per head."""
    if ".attn.qkv." in name:
        by_head = tensor.reshape(cfg.num_heads, 3, cfg.head_size, *tensor.shape[1:])
        tensor = by_head.transpose(0, 1).reshape(tensor.shape)
    return tensor.T if is_transposed(name) else tensor


def from_theirs(name: str, tensor: Tensor, cfg: ModelConfig) -> Tensor:
    tensor = tensor.T if is_transposed(name) else tensor
    if ".attn.qkv." in name:
        by_kind = tensor.reshape(3, cfg.num_heads, cfg.head_size, *tensor.shape[1:])
        tensor = by_kind.transpose(0, 1).reshape(tensor.shape)
    return tensor


def is_transposed(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(".weight") and ".ln" not in name


def write(folder: Path, cfg: ModelConfig, weights: dict[str, Tensor], *, eod_id: int | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {their_name(n): to_theirs(n, t.detach(), cfg).cpu().contiguous() for n, t in weights.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, cfg, eod_id=eod_id)


def write_config(folder: Path, cfg: ModelConfig, *, eod_id: int | None) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config_json(cfg, eod_id), indent=2) + "\n", encoding="utf-8")
    return path


def config_json(cfg: ModelConfig, eod_id: int | None) -> dict[str, Any]:
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
        "dtype": "float32",
    }


def read_config(folder: Path) -> ModelConfig:
    path = folder / "config.json"
    try:
        theirs = json.loads(path.read_text(encoding="utf-8"))
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
    model = {
        "num_layers": theirs.get("n_layer", 12),
        "hidden_size": theirs.get("n_embd", 768),
        "num_heads": theirs.get("n_head", 12),
        "ffn_size": theirs.get("n_inner"),  # null = 4 x hidden_size, here as there
        "vocab_size": theirs.get("vocab_size", 50257),
        "max_positions": theirs.get("n_positions", 1024),
        "tied": theirs.get("tie_word_embeddings", True),
        "gelu": _GELU_READ[gelu],
        "dropout_embed": theirs.get("embd_pdrop", 0.1),
        "dropout_hidden": theirs.get("resid_pdrop", 0.1),
        "dropout_attention": theirs.get("attn_pdrop", 0.1),
        "layernorm_eps": theirs.get("layer_norm_epsilon", 1e-5),
    }
    try:
        return from_dict({"model": model}, str(path)).model
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


class Weights:
    """The tensors of a folder under our names, read one at a time."""

    def __init__(self, folder: Path, cfg: ModelConfig) -> None:
        self.folder, self.cfg = folder, cfg
        self.tensors = _open(folder)
        # Files from the hub leave out the `transformer.` prefix.
        self.prefix = "transformer." if any(n.startswith("transformer.") for n in self.tensors) else ""
        self.used: set[str] = set()

    def tensor(self, name: str, shape: torch.Size) -> Tensor:
        theirs = their_name(name).removeprefix("transformer.")
        key = theirs if name == "head.weight" else self.prefix + theirs
        if key not in self.tensors:
            raise CheckpointError(
                f"{self.folder}: tensor '{key}' is missing; the file has {len(self.tensors)} tensors."
            )
        self.used.add(key)
        tensor = self.tensors[key]()
        needed = shape[::-1] if is_transposed(name) else shape
        if tensor.shape != needed:
            raise CheckpointError(
                f"{self.folder}: '{key}' has shape {list(tensor.shape)}, needed {list(needed)}: another model size."
            )
        return from_theirs(name, tensor, self.cfg)

    def require_all_used(self) -> None:
        left = [n for n in self.tensors if n not in self.used and not _BUFFERS.search(n)]
        if self.cfg.tied:
            left = [n for n in left if n != "lm_head.weight"]
        if left:
            raise CheckpointError(
                f"{self.folder}: {len(left)} tensors have no place in the model, such as '{left[0]}'."
            )


def _open(folder: Path) -> dict[str, Any]:
    """name -> function that reads the tensor."""
    index = folder / "model.safetensors.index.json"
    files = _shards(index) if index.is_file() else [folder / "model.safetensors"]
    missing = [file for file in files if not file.is_file()]
    if missing and (folder / "pytorch_model.bin").is_file():
        return _open_pickle(folder / "pytorch_model.bin")
    if missing:
        raise CheckpointError(
            f"{folder}: {missing[0].name} is missing. Needed: model.safetensors, its shards, or pytorch_model.bin."
        )
    readers: dict[str, Any] = {}
    for file in files:
        try:
            handle = safetensors.safe_open(file, framework="pt")
            names = list(handle.keys())
        except Exception as error:  # SafetensorError, OSError
            raise CheckpointError(f"{file}: cannot be read ({error}). The file is damaged: copy it again.") from None
        for name in names:
            readers[name] = lambda handle=handle, name=name: handle.get_tensor(name)
    return readers


def _shards(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return sorted({index.parent / Path(name).name for name in names})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: not an index of shards ({error!r}). Copy it again.") from None


def _open_pickle(file: Path) -> dict[str, Any]:
    try:
        # Files from before 2020 are no zip archives and cannot be mapped.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # whatever a damaged or hostile pickle raises
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{file}: cannot be read safely ({reason}).") from None
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{file}: holds a {type(tensors).__name__}, needed a dictionary of tensors.")
    return {name: lambda tensor=tensor: tensor for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
