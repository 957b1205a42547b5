"""GGUF, which llama.cpp runs: one file with weights, settings and vocabulary.

Matrices keep the type they have (f32, f16, bf16); norms, biases and positions are always f32, as llama.cpp wants.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint.formats import gguf_file, raw_bytes
from gptworks.checkpoint.formats.ggml_blocks import BF16, BLOCKS, F16, F32, NAMES, Q4_0, Q8_0
from gptworks.checkpoint.formats.gguf_file import GgufFile, Value
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import conflicts_with, infer_model, match, our_shapes, require_layers, settle, split
from gptworks.checkpoint.systems import gguf_architectures, gguf_vocabulary
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config
from gptworks.checkpoint.systems.gguf_architectures import Architecture
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, TokenizerError
from gptworks.tokenizer import Tokenizer, gpt2_for

NAME = "gguf"
TITLE = gguf_architectures.TITLE
CUTS = False
SUFFIX = ".gguf"
TOLERANCE = EXACT

KNOWN = gguf_architectures.KNOWN
_FILE_TYPES = {F32: 0, F16: 1, Q4_0: 2, Q8_0: 7, BF16: 32}  # llama.cpp's numbers of "mostly this"
_PIECE = 2**20  # bytes
_QUANTISATION = 2  # version of ggml's blocks


def recognise(path: Path) -> bool:
    return gguf_file.is_gguf(path)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    file = gguf_file.read(path)
    name = file.settings.get("general.architecture")
    if name not in gguf_architectures.ALL:
        raise CheckpointError(
            f"{path}: general.architecture is {str(name)[:60]!r}, needed one of {', '.join(gguf_architectures.ALL)}."
        )
    architecture = gguf_architectures.ALL[name]
    if (parts := file.settings.get("split.count", 1)) != 1:
        raise CheckpointError(f"{path}: one of {parts} parts. Join them with llama-gguf-split --merge.")
    is_tied = _is_tied(path, file)
    stored = architecture.read(file, str(path))
    model = _model(path, architecture, file, {**stored, "tied": is_tied}, overrides)
    gguf_architectures.require_same_slowdowns(file, model, str(path))
    theirs = architecture.in_our_order(file.tensors, model.head_size)
    has_words = (
        file.settings.get("tokenizer.ggml.model") in gguf_vocabulary.KINDS
        or "tokenizer.huggingface.json" in file.settings
    )
    stored_as = Counter(NAMES[kind] for kind in file.types.values())
    about: dict[str, Any] = {"stored as": ", ".join(f"{kind} ({count} tensors)" for kind, count in stored_as.items())}
    about["tokenizer"] = "inside" if has_words else "none"
    remarks = []
    if is_tied and "output.weight" in file.tensors:
        remarks.append("output.weight is the word embedding once more: the head is tied")
    if (window := file.settings.get(f"{name}.attention.sliding_window")) and architecture.is_llama_kind:
        remarks.append(f"{name}.attention.sliding_window is {window}: ignored, as llama.cpp does")
    return Opened(
        path,
        NAME,
        model,
        match(architecture.table, [theirs], model, where=str(path)),
        about=about,
        files=[path],
        embedded_tokenizer=(lambda: gguf_vocabulary.carried_by(path)) if has_words else None,
        eod_id=_id_of(file.settings, "eos", model.vocab_size),
        bos_id=_id_of(file.settings, "bos", model.vocab_size),
        remarks=remarks,
        conflicts=conflicts_with(stored, overrides),
    )


def _id_of(settings: Mapping[str, Any], role: str, vocab_size: int) -> int | None:
    token_id = settings.get(f"tokenizer.ggml.{role}_token_id")
    return token_id if type(token_id) is int and token_id < vocab_size else None


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec(), *, blocks: int | None = None) -> list[Path]:  # noqa: B008
    """`blocks`: the type of matrices, where their rows are whole blocks; they are f16 where they are not."""
    model = weights.model
    architecture = gguf_architectures.for_model(model)
    if model.gelu != "tanh":
        raise CheckpointError(
            f"model.gelu is {model.gelu}, and llama.cpp computes GPT-2 with tanh: it would give other logits. "
            "Write it so all the same with -o model.gelu=tanh."
        )
    by_name = architecture.in_their_order(split(architecture.table, weights.tensors, model), model)
    theirs = {name: by_name[name] for name in _in_order(architecture, model, by_name)}
    types = {name: _type_of(name, each, blocks) for name, each in theirs.items()}
    mostly = types["blk.0.ffn_up.weight"]
    tokenizer = _tokenizer_for(weights)
    vocabulary = gguf_vocabulary.settings_of(tokenizer, model.vocab_size, weights.eod_id, weights.notes)
    gguf_file.write(path, {**_settings(architecture, model, mostly), **vocabulary}, theirs, types)
    return [path]


def _type_of(name: str, tensor: LazyTensor, blocks: int | None) -> int:
    """Words and the head decide more than the rest: where that has 4 bits they have 8, as llama.cpp does it too."""
    if len(tensor.shape) == 1 or name == "position_embd.weight":
        return F32
    if blocks is None:
        return gguf_file.type_of(tensor.dtype)
    if name in ("token_embd.weight", "output.weight"):
        blocks = Q8_0
    return F16 if tensor.shape[-1] % BLOCKS[blocks].length else blocks


def _in_order(architecture: Architecture, model: ModelConfig, present: Mapping[str, object]) -> list[str]:
    """Names of tensors in the order of the network, so that the file is read from its beginning to its end."""
    rules = architecture.table.at(model)
    ordered = [theirs for name in our_shapes(model) for theirs in rules[name].theirs]
    return [*(name for name in present if name not in ordered), *ordered]


def _settings(architecture: Architecture, model: ModelConfig, mostly: int) -> dict[str, Value]:
    return {
        "general.architecture": architecture.name,
        "general.file_type": _FILE_TYPES[mostly],
        "general.quantization_version": _QUANTISATION,
        "general.alignment": 32,
        **architecture.write(model),
    }


def _tokenizer_for(weights: Weights) -> Tokenizer | None:
    """The source's tokenizer; without one GPT-2's, which is installed, where the vocabulary has its size, or more."""
    try:
        if (tokenizer := weights.tokenizer()) is not None:
            return tokenizer
    except TokenizerError as error:
        weights.notes.append(str(error))
    if (tokenizer := gpt2_for(weights.model.vocab_size)) is not None:
        weights.notes.append(
            "no tokenizer comes with the source: GPT-2's was written, since the vocabulary has its size"
        )
    return tokenizer


def _model(
    path: Path, architecture: Architecture, file: GgufFile, known: dict[str, object], overrides: Mapping[str, object]
) -> ModelConfig:
    where = str(path)
    if not architecture.is_llama_kind:
        known = infer_model(architecture.table, [file.tensors], {**known, "gelu": "tanh"}, overrides, where)
        return model_config(known, where)
    words = file.tensors.get("token_embd.weight")
    if words is None or len(words.shape) != 2:
        raise CheckpointError(f"{path}: tensor 'token_embd.weight' is missing, or no matrix. The file is damaged.")
    require_layers(known["num_layers"], [file.tensors], where)
    return model_config(settle({**known, "vocab_size": words.shape[0]}, overrides, where), where)


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
