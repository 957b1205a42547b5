"""llm.c: one .bin file. The word embedding is padded to a multiple of 128 rows inside the file, and only there."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks.checkpoint.formats import llmc_weights
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Rule, Table, block_rules, conflicts_with, match, our_shapes, settle, split
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError

NAME = "llmc"
TITLE = "llm.c weights"
CUTS = False
SUFFIX = ".bin"
TOLERANCE = EXACT

_KINDS = ("w.{i}", "b.{i}")
# Each array has all layers, one after the other: here they are named apart.
TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("wte",)),
        Rule("wpe.weight", ("wpe",)),
        *block_rules(
            {
                "ln1": "ln1",
                "attn.qkv": "qkv",
                "attn.out": "attproj",
                "ln2": "ln2",
                "mlp.up": "fc",
                "mlp.down": "fcproj",
            },
            order="3ad",
            norm=_KINDS,
            linear=_KINDS,
            sep="",
        ),
        Rule("ln_f.weight", ("lnfw",)),
        Rule("ln_f.bias", ("lnfb",)),
    ],
)
_HEADER = ("max_positions", "vocab_size", "num_layers", "num_heads", "hidden_size")
_EPS = 1e-5
_ROWS = 128


def recognise(path: Path) -> bool:
    return llmc_weights.is_llmc(path)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    file = llmc_weights.read(path)
    numbers = dict(zip((*_HEADER, "rows"), file.numbers, strict=False))
    rows = numbers.pop("rows")
    if min(numbers.values()) < 1 or rows < numbers["vocab_size"]:
        raise CheckpointError(
            f"{path}: its header has {numbers} and {rows} rows of the word embedding. "
            "The file is damaged, or was written by an early llm.c."
        )
    width, layers = numbers["hidden_size"], numbers["num_layers"]
    per_layer = 12 * width**2 + 13 * width
    file.require((rows + numbers["max_positions"] + 2) * width + layers * per_layer)
    model = model_config({"layernorm_eps": _EPS, **settle(numbers, overrides, str(path))}, str(path))
    arrays = file.arrays(_shapes(model, rows))
    arrays["wte"] = arrays["wte"].first_rows(numbers["vocab_size"])
    about: dict[str, Any] = {"vocabulary": f"{rows:,} rows in the file"} if rows != model.vocab_size else {}
    if step := re.fullmatch(r"model_(\d{8})\.bin", path.name):  # as its trainer names them
        about["step"] = int(step[1])
    return Opened(
        path,
        NAME,
        model,
        match(TABLE, [arrays], model),
        about=about,
        files=[path],
        tokenizer=path.parent,
        conflicts=conflicts_with(numbers, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    model = weights.model
    _require_known_shape(model)
    theirs = split(TABLE, weights.tensors, model)
    rows = -(-model.vocab_size // _ROWS) * _ROWS
    theirs["wte"] = _padded(theirs["wte"], rows)
    dtypes = {each.dtype for each in theirs.values()}
    dtype = torch.bfloat16 if dtypes == {torch.bfloat16} else torch.float32
    if not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise CheckpointError(f"llm.c keeps fp32 or bf16; got {', '.join(map(str, dtypes))}. Add --dtype fp32.")
    if dtypes != {dtype}:
        weights.notes.append("llm.c keeps all tensors in fp32 or all in bf16: fp32 was written, which holds them all")
    numbers = [getattr(model, name) for name in _HEADER]
    llmc_weights.write(path, [*numbers, rows], dtype, {name: theirs[name] for name in _shapes(model, rows)})
    return [path]


def _shapes(model: ModelConfig, rows: int) -> dict[str, torch.Size]:
    """In the order of the file: array after array, each with all its layers."""
    ours = our_shapes(model)
    shapes = {}
    for rule in TABLE.rules:
        for each in map(rule.at, range(model.num_layers if "{i}" in rule.ours else 1)):
            shapes[each.theirs[0]] = ours[each.ours]
    return shapes | {"wte": torch.Size([rows, model.hidden_size])}


def _require_known_shape(model: ModelConfig) -> None:
    """What llm.c has no number for is fixed in its source."""
    wrong = {
        "gelu": (model.gelu, "tanh"),
        "layernorm_eps": (model.layernorm_eps, _EPS),
        "ffn_size": (model.ffn_size, 4 * model.hidden_size),
    }
    for name, (got, needed) in wrong.items():
        if got != needed:
            advice = "" if name == "ffn_size" else f" Write it so all the same with -o model.{name}={needed}."
            raise CheckpointError(
                f"model.{name} is {got}, and llm.c computes with {needed}: it would give other logits.{advice}"
            )


def _padded(stored: LazyTensor, rows: int) -> LazyTensor:
    def read() -> Tensor:
        tensor = stored.read()
        return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), tensor.shape[1])])

    return LazyTensor(torch.Size([rows, stored.shape[1]]), stored.dtype, read)
