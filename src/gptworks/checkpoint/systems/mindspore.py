"""MindSpore: a .ckpt file of MindFormers' GPT-2, or a folder (rank_0) in which training saved such files.

The number of heads is not in it: it is given, or stands in the YAML file of the run if that lies beside. What
MindFormers trains with `gelu` is the tanh form; its 13B and 52B use fast_gelu, ours `sigmoid`.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptworks.checkpoint.formats import mindspore_ckpt
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import Rule, Table, block_rules, conflicts_with, infer_model, match, split
from gptworks.checkpoint.systems.contract import EXACT, Opened, SplitSpec, Weights, model_config, tokenizer_folder
from gptworks.config import yaml_text
from gptworks.errors import CheckpointError, ConfigError

NAME = "mindspore"
TITLE = "MindSpore checkpoint of MindFormers' GPT-2"
CUTS = False
SUFFIX = ".ckpt"
TOLERANCE = EXACT

# The projections of attention and the feed-forward layer are [in, out], those to q, k and v are [out, in].
TABLE = Table(
    TITLE,
    [
        Rule("wte.weight", ("backbone.embedding.word_embedding.embedding_table",)),
        Rule("wpe.weight", ("backbone.embedding.position_embedding.embedding_table",)),
        *block_rules(
            {
                "ln1": "backbone.blocks.{i}.layernorm1",
                "attn.qkv": tuple(f"backbone.blocks.{{i}}.attention.dense{n}" for n in (1, 2, 3)),
                "attn.out": "backbone.blocks.{i}.attention.projection",
                "ln2": "backbone.blocks.{i}.layernorm2",
                "mlp.up": "backbone.blocks.{i}.output.mapping",
                "mlp.down": "backbone.blocks.{i}.output.projection",
            },
            transposed=("attn.out", "mlp.up", "mlp.down"),
            norm=("gamma", "beta"),
        ),
        Rule("ln_f.weight", ("backbone.layernorm.gamma",)),
        Rule("ln_f.bias", ("backbone.layernorm.beta",)),
    ],
)
# Whatever stands before: nothing, `backbone.`, and `gpt2.backbone.transformer.encoder.` of before July 2023.
_WEIGHT = re.compile(
    r"(?:.*\.)?(embedding\.(?:word|position)_embedding\.embedding_table|layernorm\.(?:gamma|beta)|"
    r"blocks\.\d+\.(?:layernorm[12]\.(?:gamma|beta)|"
    r"(?:attention\.(?:dense[123]|projection)|output\.(?:mapping|projection))\.(?:weight|bias)))"
)
_OPTIMIZER = re.compile(r"(adam_[mv]|moments?|moment[12]|vhat|velocity|accum|accu_grads|accumulation|acc_grads)\.")
# Causal masks that MindFormers' converter copies, and the cache of its generation.
_BUFFERS = r"\.attention\.(beta|masked_beta)$|\.(key|value)_past$"
_SAVED_AS = re.compile(r"-(?P<epoch>\d+)_(?P<step>\d+)\.ckpt$")
_GELU = {"gelu": "tanh", "fast_gelu": "sigmoid"}
_HIDDEN = ("hidden_size", "embedding_size")


def recognise(path: Path) -> bool:
    if path.is_dir():
        return any(mindspore_ckpt.is_mindspore_file(file) for file in _saved(path)[-1:])
    return mindspore_ckpt.is_mindspore_file(path)


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    file = _newest(path)
    content = mindspore_ckpt.read(file)
    weights, left_out = _sort(file, content.tensors)
    yaml_file, settings = _settings(file, weights)
    known = _known(yaml_file, settings)
    # A YAML file that lies beside may be of another run: what the user states wins, with a note.
    own = {name: value for name, value in known.items() if name not in overrides}
    model = model_config(infer_model(TABLE, [weights], own, overrides, str(file)), str(file))
    about: dict[str, Any] = dict(_progress(file, content.tensors))
    if yaml_file is not None:
        about["settings"] = yaml_file.name
    elif "gelu" not in overrides:
        about["gelu"] = "tanh, MindFormers' gelu (a model with fast_gelu needs -o model.gelu=sigmoid)"
    if content.has_checksum:
        about["checksum"] = "right"
    remarks = [f"{name} is left out: it is {why}" for name, why in content.skipped.items()]
    if left_out:
        kinds = ", ".join(dict.fromkeys(f"{name.split('.')[0]}{'.*' if '.' in name else ''}" for name in left_out))
        remarks.append(f"left out, as they belong to training: {len(left_out)} of {kinds}")
    if others := _other_ranks(file):
        remarks.append(
            f"{', '.join(others[:4])}{' ...' if len(others) > 4 else ''} beside it not read: after data parallelism "
            "all ranks hold the same; after model parallelism each has a part, and MindSpore's own "
            "transform_checkpoints joins them"
        )
    eod_id = settings.get("eos_token_id", settings.get("eos_token"))
    return Opened(
        file,
        NAME,
        model,
        match(TABLE, [weights], model, ignored=_BUFFERS),
        about=about,
        files=[file],
        tokenizer=tokenizer_folder(
            file.parent, *([file.parent.parent] if file.parent.name.startswith("rank_") else [])
        ),
        eod_id=eod_id if type(eod_id) is int else None,
        remarks=remarks,
        conflicts=conflicts_with(known if yaml_file is not None else {}, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    """Under the names that MindFormers has had since July 2023."""
    mindspore_ckpt.write(path, split(TABLE, weights.tensors, weights.model))
    return [path]


def _newest(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = _saved(path)
    if not files:
        raise CheckpointError(f"{path}: no .ckpt file is in it, nor in its rank_0. Name a file.")
    return files[-1]


def _saved(folder: Path) -> list[Path]:
    """What training saved, oldest first: of one folder, or of that of its first rank."""
    inside = folder / "rank_0"
    files = [file for file in (inside if inside.is_dir() else folder).glob("*.ckpt") if file.is_file()]

    def age(file: Path) -> tuple[int, int, float]:
        saved = _SAVED_AS.search(file.name)
        return (int(saved["epoch"]), int(saved["step"]), 0.0) if saved else (-1, -1, file.stat().st_mtime)

    return sorted(files, key=age)


def _other_ranks(file: Path) -> list[str]:
    if not file.parent.name.startswith("rank_"):
        return []
    return sorted(each.name for each in file.parent.parent.glob("rank_*") if each.is_dir() and each != file.parent)


def _sort(file: Path, tensors: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str]]:
    """Weights under the names of the table, with whatever is unknown; and names of what belongs to training."""
    weights: dict[str, LazyTensor] = {}
    names: dict[str, str] = {}
    left_out = []
    for name, stored in tensors.items():
        if _OPTIMIZER.match(name):
            left_out.append(name)
            continue
        known = _WEIGHT.fullmatch(name)
        if not known and stored.shape.numel() == 1:  # steps, rates, loss scales
            left_out.append(name)
            continue
        called = f"backbone.{known[1]}" if known else name
        if called in weights:
            raise CheckpointError(
                f"{file}: '{names[called]}' and '{name}' are both there, and only one of them can be meant. "
                "Save the model without its wrapper or its optimizer."
            )
        weights[called], names[called] = stored, name
    return weights, left_out


def _progress(file: Path, tensors: Mapping[str, LazyTensor]) -> dict[str, int]:
    """The name tells the step within the epoch; the steps of all epochs are in the file, if at all."""
    for name in ("global_step", "step_num"):
        stored = tensors.get(name)
        if stored is not None and stored.shape.numel() == 1:
            return {"step": int(stored.read().item())}
    saved = _SAVED_AS.search(file.name)
    if saved is None:
        return {}
    epoch, step = int(saved["epoch"]), int(saved["step"])
    return {"step": step} if epoch <= 1 else {"epoch": epoch, "step_of_the_epoch": step}


def _settings(file: Path, weights: Mapping[str, LazyTensor]) -> tuple[Path | None, dict[str, Any]]:
    """`model_config` of the MindFormers YAML file that lies beside, or above rank_N, and describes this model."""
    table = weights.get("backbone.embedding.word_embedding.embedding_table")
    folders = [file.parent, file.parent.parent] if file.parent.name.startswith("rank_") else [file.parent]
    for folder in folders:
        for yaml_file in sorted([*folder.glob("*.yaml"), *folder.glob("*.yml")]):
            settings = _model_config_of(yaml_file)
            hidden = next((settings[key] for key in _HIDDEN if key in settings), None)
            if "num_heads" in settings and table is not None and table.shape[-1:] == (hidden,):
                return yaml_file, settings
    return None, {}


def _model_config_of(file: Path) -> dict[str, Any]:
    try:
        values: Any = yaml_text.read(file)
        section = values["model"]["model_config"]
        return {key: each.value for key, each in section.items() if isinstance(each, yaml_text.Value)}
    except (ConfigError, LookupError, TypeError, AttributeError):
        return {}  # of something else


def _known(file: Path | None, settings: dict[str, Any]) -> dict[str, object]:
    known: dict[str, object] = {"gelu": "tanh", "layernorm_eps": 1e-5}
    if file is None:
        return known
    activation = settings.get("hidden_act", "gelu")
    if activation not in _GELU:
        raise CheckpointError(
            f"{file}: hidden_act {activation!r}, which a GPT here cannot compute. Known: gelu, fast_gelu."
        )
    if settings.get("post_layernorm_residual"):
        raise CheckpointError(f"{file}: post_layernorm_residual is set, which changes the computation.")
    return known | {"num_heads": settings["num_heads"], "gelu": _GELU[activation]}
