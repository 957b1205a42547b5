"""GGUF of architecture gpt2, which llama.cpp runs: one file with weights, settings and vocabulary.

Matrices keep the type they have (f32, f16, bf16); norms, biases and positions are always f32, as llama.cpp wants.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gptworks.checkpoint.formats import gguf_file, raw_bytes
from gptworks.checkpoint.formats.gguf_file import BF16, BLOCK, F16, F32, Q8_0, GgufFile, Value
from gptworks.checkpoint.rules import Rule, Table, block_rules, infer_model, match, our_shapes, overruled, split
from gptworks.checkpoint.systems import gguf_vocabulary
from gptworks.checkpoint.systems.contract import EXACT, Cut, Opened, Weights, model_config
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer, gpt2_for

NAME = "gguf"
TITLE = "GGUF file of llama.cpp"
CUTS = False
SUFFIX = ".gguf"
TOLERANCE = EXACT

TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("token_embd.weight",)),
        Rule("wpe.weight", ("position_embd.weight",)),
        *block_rules(
            {
                "ln1": "blk.{i}.attn_norm",
                "attn.qkv": "blk.{i}.attn_qkv",
                "attn.out": "blk.{i}.attn_output",
                "ln2": "blk.{i}.ffn_norm",
                "mlp.up": "blk.{i}.ffn_up",
                "mlp.down": "blk.{i}.ffn_down",
            },
            order="3ad",
        ),
        Rule("ln_f.weight", ("output_norm.weight",)),
        Rule("ln_f.bias", ("output_norm.bias",)),
        Rule("head.weight", ("output.weight",)),
    ],
)
_FILE_TYPES = {F32: 0, F16: 1, Q8_0: 7, BF16: 32}  # llama.cpp's numbers of "mostly this"
_PIECE = 2**20  # bytes
_QUANTISATION = 2  # version of ggml's blocks
_COUNTS = {
    "num_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_heads": "attention.head_count",
    "ffn_size": "feed_forward_length",
    "max_positions": "context_length",
}


def recognise(path: Path) -> bool:
    return gguf_file.is_gguf(path)


def open(path: Path, given: Mapping[str, object]) -> Opened:
    file = gguf_file.read(path)
    architecture = file.settings.get("general.architecture")
    if architecture != "gpt2":
        raise CheckpointError(f"{path}: general.architecture is {architecture!r}, needed 'gpt2'.")
    if (parts := file.settings.get("split.count", 1)) != 1:
        raise CheckpointError(f"{path}: one of {parts} parts. Join them with llama-gguf-split --merge.")
    is_tied = _is_tied(path, file)
    said = _known(path, file)
    known = {**said, "tied": is_tied, "gelu": "tanh"}
    model = model_config(infer_model(TABLE, [file.tensors], known, given, str(path)), str(path))
    eod_id = file.settings.get("tokenizer.ggml.eos_token_id")
    has_words = file.settings.get("tokenizer.ggml.model") == "gpt2" or "tokenizer.huggingface.json" in file.settings
    stored_as = Counter(gguf_file.NAMES[kind] for kind in file.types.values())
    about: dict[str, Any] = {"stored as": ", ".join(f"{kind} ({count} tensors)" for kind, count in stored_as.items())}
    about["tokenizer"] = "inside" if has_words else "none"
    remarks = []
    if is_tied and "output.weight" in file.tensors:
        remarks.append("output.weight is the word embedding once more: the head is tied")
    return Opened(
        path,
        NAME,
        model,
        match(TABLE, [file.tensors], model),
        about=about,
        files=[path],
        carried=(lambda: gguf_vocabulary.carried_by(path)) if has_words else None,
        eod_id=eod_id if type(eod_id) is int and eod_id < model.vocab_size else None,
        remarks=remarks,
        overruled=overruled(said, given),
    )


def write(path: Path, weights: Weights, cut: Cut = Cut(), *, quantise: bool = False) -> list[Path]:  # noqa: B008
    """`quantise`: matrices as q8_0, where their rows are whole blocks, and f16 where they are not."""
    model = weights.model
    if model.gelu != "tanh":
        raise CheckpointError(
            f"model.gelu is {model.gelu}, and llama.cpp computes GPT-2 with tanh: it would give other logits. "
            "Write it so all the same with -o model.gelu=tanh."
        )
    by_name = split(TABLE, weights.tensors, model)
    theirs = {name: by_name[name] for name in _in_order(model)}
    types = {}
    for name, each in theirs.items():
        if len(each.shape) == 1 or name == "position_embd.weight":
            types[name] = F32
        elif quantise:
            types[name] = F16 if each.shape[-1] % BLOCK else Q8_0
        else:
            types[name] = gguf_file.type_of(each.dtype)
    mostly = types["blk.0.attn_qkv.weight"]
    tokenizer = _tokenizer_for(weights)
    vocabulary = gguf_vocabulary.settings_of(tokenizer, model.vocab_size, weights.eod_id, weights.notes)
    gguf_file.write(path, {**_settings(model, mostly), **vocabulary}, theirs, types)
    return [path]


def _in_order(model: ModelConfig) -> list[str]:
    """Of the network, as the file is read from its beginning to its end."""
    rules = TABLE.at(model)
    return [rules[name].theirs[0] for name in our_shapes(model)]


def _settings(model: ModelConfig, mostly: int) -> dict[str, Value]:
    return {
        "general.architecture": "gpt2",
        "general.file_type": _FILE_TYPES[mostly],
        "general.quantization_version": _QUANTISATION,
        "general.alignment": 32,
        **{f"gpt2.{theirs}": getattr(model, ours) for ours, theirs in _COUNTS.items()},
        "gpt2.attention.layer_norm_epsilon": model.layernorm_eps,
        "gpt2.vocab_size": model.vocab_size,
    }


def _tokenizer_for(weights: Weights) -> Tokenizer | None:
    """That of the source; GPT-2's, which comes with the installation, where the vocabulary has its size, or more."""
    try:
        if (found := weights.tokenizer()) is not None:
            return found
    except TokenizerError as error:
        weights.notes.append(str(error))
    if (found := gpt2_for(weights.model.vocab_size)) is not None:
        weights.notes.append(
            "no tokenizer comes with the source: GPT-2's was written, since the vocabulary has its size"
        )
    return found


def _known(path: Path, file: GgufFile) -> dict[str, object]:
    found: dict[str, object] = {}
    for ours, theirs in _COUNTS.items():
        value = file.settings.get(f"gpt2.{theirs}")
        if value is None:
            continue
        if type(value) is not int:
            raise CheckpointError(f"{path}: gpt2.{theirs} is {value!r}, needed a whole number.")
        found[ours] = value
    eps = file.settings.get("gpt2.attention.layer_norm_epsilon")
    if isinstance(eps, float):
        found["layernorm_eps"] = float(str(np.float32(eps)))  # 1e-05, not 9.999999747378752e-06
    return found


def _is_tied(path: Path, file: GgufFile) -> bool:
    """Older converters wrote a tied head as well. It is compared a piece at a time, up to the first difference."""
    if "output.weight" not in file.tensors or "token_embd.weight" not in file.tensors:
        return "output.weight" not in file.tensors
    head, words = (file.places[name] for name in ("output.weight", "token_embd.weight"))
    if file.types["output.weight"] != file.types["token_embd.weight"] or len(head) != len(words):
        return False
    return all(
        torch.equal(
            *(raw_bytes.read_pieces(path, [place[begin : begin + _PIECE]], torch.uint8) for place in (head, words))
        )
        for begin in range(0, len(head), _PIECE)
    )
