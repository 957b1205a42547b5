"""PaddleFleetX: [output/]step_N or epoch_E_step_S, in it model.pdparams or mp_XX_sharding_XX_pp_XX/model.pdparams.

Names: `gpt.` and so on for one process or data parallelism; `_layers.` before them under tensor parallelism; with a
pipeline the number of the layer counted through all stages: 0 the embeddings (`shared_layers.embed`, on the last stage
once more, for the head), 1 the first block, after the last block the final norm.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from gptworks.checkpoint.formats import pdparams
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.checkpoint.rules import compare_copies, conflicts_with, infer_model, match, split
from gptworks.checkpoint.systems import paddle_names
from gptworks.checkpoint.systems.contract import (
    EXACT,
    Opened,
    SplitSpec,
    Weights,
    model_config,
    require_divisible,
    tokenizer_folder,
    unknown_classes,
)
from gptworks.checkpoint.systems.paddle_names import FIXED, NORM, POSITIONS, WORDS
from gptworks.config import yaml_text
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError, ConfigError

NAME = "fleetx"
TITLE = "PaddleFleetX checkpoint"
CUTS = True
SUFFIX = ""
TOLERANCE = EXACT

FILE = "model.pdparams"
META = "meta_state.pdopt"
CONFIG = "model.yaml"
_RANK = re.compile(r"mp_(\d+)_sharding_(\d+)_pp_(\d+)")
_STEP = re.compile(r"(?:epoch_(\d+)_)?step_(\d+)")
Rank = tuple[int, int, int]  # tensor-parallel, sharding, pipeline


def recognise(path: Path) -> bool:
    if path.is_file():
        return path.suffix == ".pdparams" and path.name != "model_state.pdparams"
    return bool(_files(path) or _steps(path))


def open(path: Path, overrides: Mapping[str, object]) -> Opened:
    folder, about = _checkpoint(path)
    files = _files(folder)
    shards, remarks = _shards(folder, files)
    table, qkv = paddle_names.table_of(shards[0])
    section, config = _configured(_where_configs_are(folder, path))
    stored = _known(section)
    # It lies beside, and may be of another run: what the user states wins, with a note.
    own = {name: value for name, value in stored.items() if name not in overrides}
    values = infer_model(table, shards, {**FIXED, **own}, overrides, str(path))
    if config is not None and "num_heads" not in overrides:
        _require_same_model(section, values, config)
        about["heads"] = f"from {config.name}"
    model = model_config(values, str(path))
    remarks += compare_copies(table, shards, model, str(path))
    stages = len({pp for _, _, pp in files})
    if len(shards) * stages > 1:
        about["layout"] = f"tensor {len(shards)} x pipeline {stages}"
    about |= {"qkv": qkv} | _progress(next(iter(files.values())).parent, remarks)
    return Opened(
        path,
        NAME,
        model,
        match(table, shards, model),
        about=about,
        files=[file for rank, file in sorted(files.items()) if rank[1] == 0],
        tokenizer=tokenizer_folder(*_where_configs_are(folder, path)),
        remarks=remarks,
        conflicts=conflicts_with(stored, overrides),
    )


def write(path: Path, weights: Weights, cut: SplitSpec = SplitSpec()) -> list[Path]:  # noqa: B008
    model = weights.model
    paddle_names.require_same_network(model, "FleetX")
    require_divisible(model, cut)
    written = []
    for tp in range(cut.tp):
        theirs = split(paddle_names.FUSED, weights.tensors, model, rank=tp, ranks=cut.tp)
        for pp in range(cut.pp):
            folder = path / f"mp_{tp:02d}_sharding_00_pp_{pp:02d}" if (cut.tp, cut.pp) != (1, 1) else path
            folder.mkdir(exist_ok=True)
            pdparams.write(folder / FILE, _saved_names(theirs, model.num_layers, cut, pp))
            written.append(folder / FILE)
            if weights.step:
                pdparams.write_values(folder / META, {"global_step": weights.step})
                written.append(folder / META)
    (path / CONFIG).write_text(yaml.safe_dump({"Model": _their_config(model)}, sort_keys=False), encoding="utf-8")
    return [*written, path / CONFIG]


# Folders


def _checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder (or file) with the weights, of several the newest."""
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder.")
    if path.is_file() or _files(path):
        _require_whole_model(path if path.is_dir() else path.parent)
        return path, {}
    steps = _steps(path)
    if not steps:
        raise CheckpointError(
            f"{path}: no FleetX checkpoint. Needed: {FILE}, folders mp_XX_sharding_XX_pp_XX with it, or step_N folders."
        )
    newest = max(steps)
    about = {"checkpoint": steps[newest].name + (f", the last of {len(steps)}" if len(steps) > 1 else "")}
    return steps[newest], about


def _steps(path: Path) -> dict[tuple[int, int], Path]:
    """By (epoch, step); those that hold weights."""
    steps = {}
    for folder in path.iterdir() if path.is_dir() else ():
        named = _STEP.fullmatch(folder.name)
        if named and folder.is_dir() and _files(folder):
            steps[int(named[1] or 0), int(named[2])] = folder
    return steps


def _files(path: Path) -> dict[Rank, Path]:
    if path.is_file():
        return {(0, 0, 0): path}
    if (path / FILE).is_file():
        return {(0, 0, 0): path / FILE}
    files = {}
    for folder in path.iterdir() if path.is_dir() else ():
        named = _RANK.fullmatch(folder.name)
        if named and (folder / FILE).is_file():
            files[int(named[1]), int(named[2]), int(named[3])] = folder / FILE
    return files


def _require_whole_model(folder: Path) -> None:
    """The folder of one rank is a checkpoint by itself only where there was nothing but data parallelism."""
    if not _RANK.fullmatch(folder.resolve().name):
        return
    ranks = {(mp, pp) for mp, _, pp in _files(folder.resolve().parent)}
    if len(ranks) > 1:
        raise CheckpointError(f"{folder}: one of {len(ranks)} parts of a model. Give the folder above it.")


def _where_configs_are(folder: Path, path: Path) -> list[Path]:
    """Beside the weights, or where the step folders are."""
    place = folder if folder.is_dir() else folder.parent
    places = [place]
    if _RANK.fullmatch(place.name):
        places.append(place.parent)
    if _STEP.fullmatch(places[-1].name):
        places.append(places[-1].parent)
    if path.is_dir() and path not in places:
        places.append(path)
    return places


# Tensors


def _shards(folder: Path, files: Mapping[Rank, Path]) -> tuple[list[dict[str, LazyTensor]], list[str]]:
    """The tensors of each tensor-parallel rank, all stages together, under the names of one process."""
    sizes = [1 + max(rank[axis] for rank in files) for axis in range(3)]
    missing = [
        f"mp_{mp:02d}_sharding_00_pp_{pp:02d}"
        for mp in range(sizes[0])
        for pp in range(sizes[2])
        if (mp, 0, pp) not in files
    ]
    if missing:
        raise CheckpointError(f"{folder}: {', '.join(missing[:4])} is missing; no model without it. Copy it again.")
    remarks: list[str] = []
    shards = []
    for mp in range(sizes[0]):
        shard: dict[str, LazyTensor] = {}
        for pp in range(sizes[2]):
            read = pdparams.read(files[mp, 0, pp])
            remarks += unknown_classes(read.unknown, files[mp, 0, pp])
            _require_copies(files, (mp, 0, pp), read.tensors)
            _add_stage(shard, read.tensors, files[mp, 0, pp])
        shards.append(paddle_names.without_head(shard, str(folder)))
    if sizes[1] > 1:
        remarks.append(f"{sizes[1]} sharding ranks, each with all parameters: those of rank 0 are used")
    return shards, remarks


def _require_copies(files: Mapping[Rank, Path], rank: Rank, tensors: LazyTensors) -> None:
    """Sharding cuts the optimizer, the parameters are saved whole by every rank: names, shapes and small ones agree."""
    for other, file in files.items():
        if other == rank or (other[0], other[2]) != (rank[0], rank[2]):
            continue
        copies = pdparams.read(file).tensors
        differing = [
            name
            for name in {**tensors, **copies}
            if name not in tensors
            or name not in copies
            or tensors[name].shape != copies[name].shape
            or (len(tensors[name].shape) == 1 and not paddle_names.same(tensors[name], copies[name]))
        ]
        if differing:
            raise CheckpointError(
                f"{file}: '{differing[0]}' is not as in {files[rank].parent.name}, though sharding ranks save the same "
                "parameters. They are of different steps: copy the folder again."
            )


def _add_stage(shard: dict[str, LazyTensor], tensors: LazyTensors, file: Path) -> None:
    for theirs, stored in tensors.items():
        name = paddle_names.plain_name(theirs)
        if name not in shard:
            shard[name] = stored
        elif name == WORDS:  # on the last stage as well, for the head
            if not paddle_names.same(shard[name], stored):
                raise CheckpointError(
                    f"{file}: '{theirs}' is not the word embedding of the first stage. The stages are of different "
                    "steps: copy the folder again."
                )
        elif name != POSITIONS:  # the last stage makes some that it never uses nor trains
            raise CheckpointError(f"{file}: '{theirs}' is in two places. The stages belong to different runs.")


def _saved_names(tensors: LazyTensors, layers: int, cut: SplitSpec, stage: int) -> dict[str, LazyTensor]:
    """As FleetX's own wrappers of a model call them: what a rank of this stage has."""
    if cut.pp == 1:
        return {f"_layers.{name}" if cut.tp > 1 else name: stored for name, stored in tensors.items()}
    saved: dict[str, LazyTensor] = {}
    first, last = stage * layers // cut.pp, (stage + 1) * layers // cut.pp
    is_end = stage in (0, cut.pp - 1)
    for name, stored in tensors.items():
        block = re.fullmatch(r"gpt\.decoder\.layers\.(\d+)\.(.+)", name)
        if block is None and name in (WORDS, POSITIONS) and is_end:
            saved[name.replace("gpt.embeddings.", "_layers.shared_layers.embed.")] = stored
        elif block is not None and first <= int(block[1]) < last:
            saved[f"_layers.{int(block[1]) + 1}.{block[2]}"] = stored
        elif name.startswith(f"{NORM}.") and stage == cut.pp - 1:
            saved[name.replace(f"{NORM}.", f"_layers.{layers + 1}.norm.")] = stored
    return saved


# What lies beside


def _progress(folder: Path, remarks: list[str]) -> dict[str, Any]:
    """The step reached: of {global_step} at first, of {epoch, step} later, where step is the last one's, from 0."""
    try:
        values = pdparams.read(folder / META).values if (folder / META).is_file() else {}
    except CheckpointError as error:
        remarks.append(f"{error} The step is not known.")
        return {}
    if type(values.get("global_step")) is int:
        return {"step": values["global_step"]}
    if type(values.get("step")) is int:
        epoch = values.get("epoch")
        return ({"epoch": epoch} if type(epoch) is int and epoch else {}) | {"step": values["step"] + 1}
    return {}


def _configured(places: list[Path]) -> tuple[dict[str, Any], Path | None]:
    """The Model section of a FleetX YAML, where those that lie there state exactly one number of heads."""
    for place in places:
        sections = {file: _model_section(file) for file in sorted([*place.glob("*.yaml"), *place.glob("*.yml")])}
        sections = {file: each for file, each in sections.items() if type(each.get("num_attention_heads")) is int}
        if len({each["num_attention_heads"] for each in sections.values()}) == 1:
            file, section = next(iter(sections.items()))
            return section, file
    return {}, None


def _known(section: Mapping[str, Any]) -> dict[str, object]:
    """What no shape tells."""
    values = {
        "num_heads": section.get("num_attention_heads"),
        "dropout_embed": section.get("hidden_dropout_prob"),
        "dropout_hidden": section.get("hidden_dropout_prob"),
        "dropout_attention": section.get("attention_probs_dropout_prob"),
    }
    return {key: value for key, value in values.items() if value is not None}


def _require_same_model(section: Mapping[str, Any], values: Mapping[str, object], config: Path) -> None:
    for key in ("hidden_size", "num_layers"):
        if section.get(key) not in (None, values[key]):
            raise CheckpointError(
                f"{config}: {key} is {section[key]}, and the weights beside it have {values[key]}: it is of another "
                "model. Remove it, or state the heads with -o model.num_heads=N."
            )


def _model_section(file: Path) -> dict[str, Any]:
    try:
        content = yaml_text.read_plain(file)
    except (OSError, ValueError, ConfigError, yaml.YAMLError):
        return {}
    model = content.get("Model") if isinstance(content, dict) else None
    return model if isinstance(model, dict) else {}


def _their_config(model: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "ffn_hidden_size": model.ffn_size,
        "hidden_dropout_prob": model.dropout_hidden,
        "attention_probs_dropout_prob": model.dropout_attention,
        "max_position_embeddings": model.max_positions,
        "type_vocab_size": 16,
        "initializer_range": 0.02,
        "fuse_attn_qkv": True,
    }
