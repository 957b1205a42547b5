"""What checkpoints of Megatron have in common, of either naming: the folders of ranks, the stages, the settings.

latest_checkpointed_iteration.txt           "123", or "release"
iter_0000123/mp_rank_00/model_optim_rng.pt  tensor-parallel rank 0
iter_0000123/mp_rank_00_001/...             tensor-parallel rank 0 of pipeline stage 1
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.rules import (
    Table,
    compare_copies,
    infer_model,
    match,
    other_head,
    overruled,
    zero_biases,
)
from gptworks.checkpoint.stored import Stored
from gptworks.checkpoint.systems.contract import (
    Cut,
    Opened,
    left_alone,
    model_config,
    tokenizer_folder,
)
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Object, shown
from gptworks.tokenizer import bundled

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_FILES = (FILE, "model_rng.pt")  # the second where the optimizer is saved apart
_RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_QUOTES = "'\""
_SAVED = re.compile(r"iter_\d{7}|release")
_LAYER = re.compile(r"(.*\blayers\.)(\d{1,6})(\..*)")


@dataclass(frozen=True)
class Loaded:
    """All pieces of a checkpoint: tensors of each tensor-parallel rank with the stages joined, settings, the rest."""

    path: Path
    tensors: list[dict[str, Stored]]  # one per tensor-parallel rank
    pp: int
    settings: dict[str, Any] | None  # Megatron's args
    version: object  # checkpoint_version; None when it is not stated
    is_bare: bool  # a dictionary of tensors and nothing else, as no Megatron saves it
    step: int | None
    files: list[Path]
    unknown: list[str]  # classes in the files that were left alone

    @property
    def tp(self) -> int:
        return len(self.tensors)


# Finding and reading


def recognise(path: Path, is_mine: Callable[[str], bool]) -> bool:
    """`is_mine`: whether a name is one of the naming asked about. A damaged file is everybody's: opening says so."""
    if path.is_file() and path.name != TRACKER and not torch_file.is_torch_file(path):
        return path.name in _FILES
    try:
        pieces = _pieces(path)
        file = pieces[min(pieces)] if pieces else None
    except CheckpointError:
        return True
    if file is None:
        return False
    try:
        content = torch_file.read(file).content
        if not isinstance(content, dict) or "model_args" in content:
            return False
        names = [name for chunk in _chunks(content, file) for name in chunk]
    except CheckpointError:
        return file.name in _FILES
    return any(map(is_mine, names))


def load(path: Path, canonical: Callable[[str], str | None]) -> Loaded:
    """`canonical`: a name in a file, whose spelling changed with the years, as it is in the table; None: no weight."""
    pieces = _pieces(path)
    if not pieces:
        raise CheckpointError(
            f"{path}: no checkpoint of Megatron. Needed: a folder with {TRACKER}, one with folders mp_rank_00 ..., "
            f"or a file {FILE}."
        )
    tp, pp = 1 + max(t for t, _ in pieces), 1 + max(p for _, p in pieces)
    for rank in range(tp):
        for stage in range(pp):
            if (rank, stage) not in pieces:
                name = folder_name(rank, stage, Cut(tp, pp))
                raise CheckpointError(
                    f"{path}: {name}/{FILE} is missing; the others make it a checkpoint of {tp} tensor-parallel ranks "
                    f"x {pp} pipeline stages. Copy it as well."
                )
    read = {at: torch_file.read(file) for at, file in pieces.items()}
    contents: dict[tuple[int, int], dict[Any, Any]] = {}
    for at, found in read.items():
        if not isinstance(found.content, dict):
            raise CheckpointError(f"{pieces[at]}: holds a {type(found.content).__name__}, needed a dictionary.")
        contents[at] = found.content
    tensors = []
    for rank in range(tp):
        stages = [_chunks(contents[rank, stage], pieces[rank, stage]) for stage in range(pp)]
        tensors.append(_joined(stages, canonical, f"{path}, tensor-parallel rank {rank}"))
    _require_one_save(contents, pieces)
    first = contents[0, 0]
    step = first.get("iteration")
    return Loaded(
        path,
        tensors,
        pp,
        _settings(first.get("args")),
        first.get("checkpoint_version"),
        not any(key in first for key in ("model", "model0", "checkpoint_version")),
        step if type(step) is int else None,
        [pieces[at] for at in sorted(pieces)],
        sorted({name for found in read.values() for name in found.unknown}),
    )


def _require_one_save(contents: Mapping[tuple[int, int], Mapping[Any, Any]], pieces: Mapping[Any, Path]) -> None:
    """Ranks of different runs, or of different steps, fit together by their shapes."""
    for at, content in contents.items():
        mine, first = _of_the_save(content), _of_the_save(contents[0, 0])
        for name in first:
            if mine[name] != first[name]:
                raise CheckpointError(
                    f"{pieces[at]}: {name} is {str(mine[name])[:40]}, and {pieces[0, 0].parent.name} has "
                    f"{str(first[name])[:40]}. The ranks are of different runs or steps: copy the folder again."
                )


def _of_the_save(content: Mapping[Any, Any]) -> dict[str, object]:
    settings = _settings(content.get("args")) or {}
    names = ["num_layers", "num_attention_heads", "hidden_size"]
    names += ["tensor_model_parallel_size", "pipeline_model_parallel_size"]
    found: dict[str, object] = {name: content.get(name) for name in ("checkpoint_version", "iteration")}
    return found | {f"args.{name}": settings.get(name) for name in names}


def _pieces(path: Path) -> dict[tuple[int, int], Path]:
    """The file of each (tensor-parallel rank, stage)."""
    if path.is_file() and path.name != TRACKER:
        return {(0, 0): path}
    root = path.parent if path.name == TRACKER else path
    if (root / TRACKER).is_file():
        root = _latest(root)
    if (root / ".metadata").is_file() and _SAVED.fullmatch(root.name):  # others save so too, we among them
        raise CheckpointError(
            f"{root}: a distributed checkpoint (--ckpt-format torch_dist), which has no mp_rank folders. "
            "Save it once more from Megatron with --ckpt-format torch."
        )
    if own := _file_in(root):
        return {(0, 0): own}
    found = {}
    for folder in sorted(root.glob("mp_rank_*")) if root.is_dir() else []:
        name = _RANK.fullmatch(folder.name)
        if name and (file := _file_in(folder)):
            found[int(name[1]), int(name[2] or 0)] = file
    return found


def _folders_of(path: Path) -> list[Path]:
    """That of a rank, of the iteration and of them all: as far as the path tells."""
    found = [path.resolve() if path.is_dir() else path.resolve().parent]
    if _RANK.fullmatch(found[-1].name):
        found.append(found[-1].parent)
    if _SAVED.fullmatch(found[-1].name):
        found.append(found[-1].parent)
    return found


def _latest(root: Path) -> Path:
    said = (root / TRACKER).read_bytes()[:40].decode("latin-1").strip()
    folder = root / ("release" if said == "release" else f"iter_{said:0>7}")
    if not said.isalnum() or not folder.is_dir():
        there = ", ".join(sorted(found.name for found in root.glob("iter_*"))[:8]) or "none"
        raise CheckpointError(
            f"{root / TRACKER}: says {said!r}, and there is no folder {folder.name}. Folders: {there}. "
            "Name one of them instead."
        )
    return folder


def _file_in(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _chunks(content: Mapping[Any, Any], file: Path) -> list[dict[str, Stored]]:
    """The model in a file; several of them when stages are interleaved. A bare dictionary of tensors is a model."""
    if "model" in content:
        return [_flat(content["model"])]
    if "model0" in content:
        names = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
        return [_flat(content[name]) for name in names]
    found = _flat(content)
    if not found:
        keys = ", ".join(repr(key) for key in list(content)[:6]) or "nothing"
        raise CheckpointError(f"{file}: no model in it; it holds {keys}.")
    return [found]


def _flat(value: object, prefix: str = "", depth: int = 0, seen: set[int] | None = None) -> dict[str, Stored]:
    """Dictionaries in dictionaries, as Megatron saved until it went over to dotted names; they may also be mixed.

    One that is there under several names is looked at once: all ways through a net of them would have no end.
    """
    seen = set() if seen is None else seen
    if not isinstance(value, dict) or depth > 12 or id(value) in seen:
        return {}
    seen.add(id(value))
    found: dict[str, Stored] = {}
    for key, item in value.items():
        if isinstance(item, Stored):
            found[f"{prefix}{key}"] = item
        else:
            found |= _flat(item, f"{prefix}{key}.", depth + 1, seen)
    return found


def _joined(
    stages: list[list[dict[str, Stored]]], canonical: Callable[[str], str | None], where: str
) -> dict[str, Stored]:
    """Layers are numbered from 0 in every stage. Interleaved: the first chunk of every stage, then the second."""
    found: dict[str, Stored] = {}
    layers = 0
    for number in range(max(map(len, stages))):
        for stage, chunks in enumerate(stages):
            if number >= len(chunks):
                raise CheckpointError(f"{where}: stage {stage} has {len(chunks)} interleaved chunks, others more.")
            own = set()
            for theirs, each in chunks[number].items():
                name = canonical(theirs)
                if name is None:
                    continue
                if layer := _LAYER.fullmatch(name):
                    own.add(int(layer[2]))
                    name = f"{layer[1]}{layers + int(layer[2])}{layer[3]}"
                if name in found:
                    raise CheckpointError(
                        f"{where}: tensor '{theirs}' of stage {stage} is in an earlier stage as well."
                    )
                found[name] = each
            layers += len(own)
    return found


def _settings(args: object) -> dict[str, Any] | None:
    if isinstance(args, Object):  # a class of its own, not argparse's
        args = args.state
    return {str(key): value for key, value in args.items()} if isinstance(args, dict) else None


# What the settings mean

PADDING = 1024  # vocabularies are padded to 128 x tensor-parallel ranks, of which there are 8 at most

_REFUSED = {
    "swiglu": "gated feed-forward layers (SwiGLU)",
    "quick_geglu": "gated feed-forward layers",
    "squared_relu": "squared ReLU",
    "num_experts": "experts",
    "use_rotary_position_embeddings": "rotary positions",
    "apply_layernorm_1p": "LayerNorm weights kept as a difference to one",
    "apply_residual_connection_post_layernorm": "the residual taken after the LayerNorm",
    "qk_layernorm": "normalised queries and keys",
    "multi_latent_attention": "latent attention",
    "window_size": "attention within a window",
}


def open_with(loaded: Loaded, system: str, table: Table, given: Mapping[str, object], about: dict[str, Any]) -> Opened:
    where = str(loaded.path)
    settings = loaded.settings or {}
    _require_gpt2(settings, where)
    _require_gpt2_shapes(loaded, table, biases=settings.get("add_bias_linear") is not False)
    known = _numbers(settings) | {"tied": _is_tied(loaded, table, given)}
    values = infer_model(table, loaded.tensors, known, given, where)
    layers = settings.get("num_layers")
    if type(layers) is int and layers != values["num_layers"]:
        raise CheckpointError(
            f"{where}: has {values['num_layers']} layers, and its args say num_layers {layers}. {_one_of_many(loaded)}"
        )
    model = model_config(values, where)
    remarks = left_alone(loaded.unknown)
    if settings.get("add_bias_linear") is False:
        for shard in loaded.tensors:
            shard.update(zero_biases(table, shard, model, ranks=loaded.tp))
        remarks.append("trained without biases (args.add_bias_linear is off): biases of zero, which compute the same")
    if (
        settings.get("tokenizer_type") == "GPT2BPETokenizer"
        and bundled.SIZE < model.vocab_size < bundled.SIZE + PADDING
    ):
        remarks.append(
            f"the vocabulary is GPT-2's of {bundled.SIZE:,}, padded to {model.vocab_size:,}; converting with "
            f"-o model.vocab_size={bundled.SIZE} leaves the padding out"
        )
    matched = match(table, loaded.tensors, model)
    remarks += compare_copies(table, loaded.tensors, model, where)
    if model.tied and (problem := other_head(table, loaded.tensors)):
        matched.misshapen.insert(0, problem)
    numbered = {"step": loaded.step} if loaded.step is not None else {}
    return Opened(
        loaded.path,
        system,
        model,
        matched,
        about={**numbered, "layout": f"tp{loaded.tp}.pp{loaded.pp}", **about},
        files=loaded.files,
        tokenizer=tokenizer_folder(*_folders_of(loaded.path)),
        remarks=remarks,
        overruled=overruled(known if loaded.settings is not None else {}, given),
    )


def _require_gpt2(settings: Mapping[str, Any], where: str) -> None:
    refused = [(name, what) for name, what in _REFUSED.items() if settings.get(name) not in (None, False)]
    if settings.get("normalization", "LayerNorm") != "LayerNorm":
        refused.append(("normalization", "another norm than LayerNorm"))
    if settings.get("position_embedding_type", "learned_absolute") in ("rope", "rotary", "alibi", "relative", "none"):
        refused.append(("position_embedding_type", "positions that are not learned"))
    heads, groups = settings.get("num_attention_heads"), settings.get("num_query_groups")
    if settings.get("group_query_attention") and groups != heads:
        refused.append(("num_query_groups", f"heads in groups ({heads} heads)"))
    channels, hidden = settings.get("kv_channels"), settings.get("hidden_size")
    sizes = [each for each in (channels, heads, hidden) if type(each) is int]
    if len(sizes) == 3 and sizes[0] * sizes[1] != sizes[2]:
        refused.append(("kv_channels", f"{heads} heads of a size that does not make up hidden_size {hidden}"))
    if refused:
        name, what = refused[0]
        raise CheckpointError(
            f"{where}: its args say {name}={shown(settings[name]).strip(_QUOTES)}: {what}. A GPT-2 has none of "
            "that, and the weights would compute something else."
        )


def _require_gpt2_shapes(loaded: Loaded, table: Table, *, biases: bool) -> None:
    """Says what a network is instead, where a list of missing tensors would leave that to be guessed."""
    first, where = loaded.tensors[0], loaded.path
    names = {rule.ours: rule.at(0).theirs[0] for rule in table.rules}
    layer = {kind: first.get(names[f"blocks.{{i}}.{kind}"]) for kind in ("attn.qkv.weight", "attn.out.weight")}
    layer |= {kind: first.get(names[f"blocks.{{i}}.{kind}"]) for kind in ("mlp.up.weight", "mlp.down.weight")}
    if any(each is None or len(each.shape) != 2 for each in layer.values()):
        return  # the first layer is not here: what is missing will be listed
    qkv, out, up, down = (torch.Size(each.shape) for each in layer.values() if each is not None)
    hidden = out[0]
    if out[1] and hidden != out[1] * loaded.tp and hidden % out[1] == 0:
        raise CheckpointError(
            f"{where}: cut for {hidden // out[1]} tensor-parallel ranks, and {loaded.tp} of them "
            f"{'is' if loaded.tp == 1 else 'are'} here. {_one_of_many(loaded)}"
        )
    if names["wte.weight"] in first and names["wpe.weight"] not in first:
        raise CheckpointError(f"{where}: no learned positions in it (they may be rotary): not a GPT-2.")
    if qkv[0] != 3 * out[1]:
        raise CheckpointError(
            f"{where}: its QKV has {qkv[0]} rows, needed {3 * out[1]}: heads in groups, which a GPT-2 has not."
        )
    if up[0] == 2 * down[1]:
        raise CheckpointError(f"{where}: its feed-forward layers are gated (SwiGLU), which those of a GPT-2 are not.")
    if biases and names["blocks.{i}.ln1.weight"] in first and names["blocks.{i}.ln1.bias"] not in first:
        raise CheckpointError(f"{where}: its norms have no bias (RMSNorm), where a GPT-2 has LayerNorm.")


def _one_of_many(loaded: Loaded) -> str:
    ranks = loaded.path if loaded.path.is_dir() else loaded.path.parent
    if _RANK.fullmatch(ranks.name):
        return f"{ranks.name} is one rank of several: name the folder above it."
    return "Folders mp_rank_... are missing: copy them as well."


def _numbers(settings: Mapping[str, Any]) -> dict[str, object]:
    """What no shape tells."""
    found: dict[str, object] = {}
    for ours, theirs in {
        "num_heads": ("num_attention_heads",),
        "layernorm_eps": ("norm_epsilon", "layernorm_epsilon"),
        "dropout_embed": ("hidden_dropout",),
        "dropout_hidden": ("hidden_dropout",),
        "dropout_attention": ("attention_dropout",),
    }.items():
        values = [settings[name] for name in theirs if settings.get(name) is not None]
        found |= {ours: values[0]} if values else {}
    return found | {"gelu": _gelu(settings)}


def _gelu(settings: Mapping[str, Any]) -> str:
    """Fused with the bias it is the tanh form, and that is the default; otherwise torch's exact one."""
    if settings.get("openai_gelu"):
        return "tanh"
    return "tanh" if settings.get("bias_gelu_fusion", True) and not settings.get("onnx_safe") else "erf"


def _is_tied(loaded: Loaded, table: Table, given: Mapping[str, object]) -> bool:
    if loaded.settings is not None:
        return not loaded.settings.get("untie_embeddings_and_output_weights")
    (head,) = next(rule.theirs for rule in table.rules if rule.ours == "head.weight")
    if head not in loaded.tensors[0] or "tied" in given:
        return True
    return other_head(table, loaded.tensors) is None


def folder_name(rank: int, stage: int, cut: Cut) -> str:
    return f"mp_rank_{rank:02d}_{stage:03d}" if cut.pp > 1 else f"mp_rank_{rank:02d}"
