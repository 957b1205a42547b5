"""OneFlow's GPT: a snapshot folder, or the folder of a run with iter{N}_snapshot folders, of which the last is meant.

The number of heads is not in it and is given. Written are the weights and, as OneFlow's own converter from Megatron
does, a first moment of 0 and a second of 1 for each: who loads a snapshot in OneFlow does not initialize anything else,
and its Adam would begin with whatever was in memory. Reading leaves them out.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import oneflow_snapshot
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Rule, Table, block_rules, infer_model, match, split
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config, tokenizer_folder
from gptworks.errors import CheckpointError

NAME = "oneflow"
TITLE = "OneFlow GPT snapshot folder"
CUTS = False
SUFFIX = ""
TOLERANCE = EXACT

# Matrices are [in, out]; QKV is per head, as ours.
TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("model-wte",)),
        Rule("wpe.weight", ("model-wpe",)),
        *block_rules(
            {
                "ln1": "model-h{i}-layernorm_1",
                "attn.qkv": "model-h{i}-attn-c_attn",
                "attn.out": "model-h{i}-attn-c_proj",
                "ln2": "model-h{i}-layernorm_2",
                "mlp.up": "model-h{i}-mlp-c_fc",
                "mlp.down": "model-h{i}-mlp-c_proj",
            },
            transposed=("attn.qkv", "attn.out", "mlp.up", "mlp.down"),
            norm=("gamma", "beta"),
            sep="-",
        ),
        Rule("ln_f.weight", ("model-layernorm_f-gamma",)),
        Rule("ln_f.bias", ("model-layernorm_f-beta",)),
    ],
)
_SNAPSHOT = re.compile(r"iter(\d+)_snapshot")
_MOMENTS = {"-m": 0.0, "-v": 1.0}
_TRAINING = re.compile(r".*-[mv]|System-Train-.*")
_STEP = "System-Train-TrainStep"


def recognise(path: Path) -> bool:
    return path.is_dir() and (oneflow_snapshot.is_snapshot(path) or bool(_snapshots(path)))


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    folder = _newest(path)
    variables = oneflow_snapshot.read(folder)
    left_out = [name for name in variables if _TRAINING.fullmatch(name)]
    weights = {name: each for name, each in variables.items() if name not in left_out}
    known = {"gelu": "erf", "layernorm_eps": 1e-5}  # as OneFlow computes it
    model = model_config(infer_model(TABLE, [weights], known, overrides, str(folder)), str(folder))
    about: dict[str, Any] = {}
    if (step := _step(folder, variables)) is not None:
        about["step"] = step
    if "gelu" not in overrides:
        about["gelu"] = "erf, as OneFlow computes it (weights that came from GPT-2 need -o model.gelu=tanh)"
    remarks = []
    if left_out:
        remarks.append(f"left out, as they belong to training: {len(left_out)} variables, such as {left_out[0]}")
    if not (folder / oneflow_snapshot.DONE).is_file():
        remarks.append(f"{oneflow_snapshot.DONE} is missing: saving was interrupted, or OneFlow's converter made it")
    files = [folder / name / kind for name in weights for kind in (oneflow_snapshot.DATA, oneflow_snapshot.META)]
    return Opened(
        folder,
        NAME,
        model,
        match(TABLE, [weights], model),
        about=about,
        files=files,
        tokenizer=tokenizer_folder(folder, folder.parent),
        remarks=remarks,
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    theirs = split(TABLE, weights.tensors, weights.model)
    writer = oneflow_snapshot.Writer(path)
    writer.write(theirs)
    for name, stored in theirs.items():
        for ending, value in _MOMENTS.items():
            writer.fill(name + ending, stored, value)
    return writer.finish()


def _newest(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(f"{path}: {'a file' if path.exists() else 'no such folder'}. Needed: a snapshot folder.")
    if oneflow_snapshot.is_snapshot(path):
        return path
    snapshots = _snapshots(path)
    if not snapshots:
        raise CheckpointError(f"{path}: no snapshot and no iter{{N}}_snapshot folder is in it.")
    return snapshots[max(snapshots)]


def _snapshots(path: Path) -> dict[int, Path]:
    """By iteration."""
    try:
        inside = list(path.iterdir())
    except OSError:
        return {}
    return {int(name[1]): each for each in inside if (name := _SNAPSHOT.fullmatch(each.name)) and each.is_dir()}


def _step(folder: Path, variables: Mapping[str, LazyTensor]) -> int | None:
    counter = next((each for name, each in variables.items() if name.startswith(_STEP)), None)
    if counter is not None and counter.shape.numel() == 1:
        return int(counter.read().item())
    named = _SNAPSHOT.fullmatch(folder.name)
    return int(named[1]) if named else None
