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

from gptworks.checkpoint.formats import torch_file
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.systems.contract import SplitSpec
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Object

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_FILES = (FILE, "model_rng.pt")  # the second where the optimizer is saved apart
_RANK = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_SAVED = re.compile(r"iter_\d{7}|release")
_LAYER = re.compile(r"(.*\blayers\.)(\d{1,6})(\..*)")


@dataclass(frozen=True)
class Loaded:
    """All pieces of a checkpoint: tensors of each tensor-parallel rank with the stages joined, settings, the rest."""

    path: Path
    tensors: list[dict[str, LazyTensor]]  # one per tensor-parallel rank
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
                name = folder_name(rank, stage, SplitSpec(tp, pp))
                raise CheckpointError(
                    f"{path}: {name}/{FILE} is missing; the others make it a checkpoint of {tp} tensor-parallel ranks "
                    f"x {pp} pipeline stages. Copy it as well."
                )
    read = {at: torch_file.read(file) for at, file in pieces.items()}
    contents: dict[tuple[int, int], dict[Any, Any]] = {}
    for at, file in read.items():
        if not isinstance(file.content, dict):
            raise CheckpointError(f"{pieces[at]}: holds a {type(file.content).__name__}, needed a dictionary.")
        contents[at] = file.content
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
        sorted({name for file in read.values() for name in file.unknown}),
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
    facts: dict[str, object] = {name: content.get(name) for name in ("checkpoint_version", "iteration")}
    return facts | {f"args.{name}": settings.get(name) for name in names}


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
    files = {}
    for folder in sorted(root.glob("mp_rank_*")) if root.is_dir() else []:
        name = _RANK.fullmatch(folder.name)
        if name and (file := _file_in(folder)):
            files[int(name[1]), int(name[2] or 0)] = file
    return files


def folders_of(path: Path) -> list[Path]:
    """The folders of a rank, of its iteration and of all iterations: as far as the path tells."""
    folders = [path.resolve() if path.is_dir() else path.resolve().parent]
    if _RANK.fullmatch(folders[-1].name):
        folders.append(folders[-1].parent)
    if _SAVED.fullmatch(folders[-1].name):
        folders.append(folders[-1].parent)
    return folders


def _latest(root: Path) -> Path:
    newest = (root / TRACKER).read_bytes()[:40].decode("latin-1").strip()
    folder = root / ("release" if newest == "release" else f"iter_{newest:0>7}")
    if not newest.isalnum() or not folder.is_dir():
        there = ", ".join(sorted(each.name for each in root.glob("iter_*"))[:8]) or "none"
        raise CheckpointError(
            f"{root / TRACKER}: says {newest!r}, and there is no folder {folder.name}. Folders: {there}. "
            "Name one of them instead."
        )
    return folder


def _file_in(folder: Path) -> Path | None:
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def _chunks(content: Mapping[Any, Any], file: Path) -> list[dict[str, LazyTensor]]:
    """The model in a file; several of them when stages are interleaved. A bare dictionary of tensors is a model."""
    if "model" in content:
        return [_flat(content["model"])]
    if "model0" in content:
        names = [f"model{number}" for number in range(len(content)) if f"model{number}" in content]
        return [_flat(content[name]) for name in names]
    tensors = _flat(content)
    if not tensors:
        keys = ", ".join(repr(key) for key in list(content)[:6]) or "nothing"
        raise CheckpointError(f"{file}: no model in it; it holds {keys}.")
    return [tensors]


def _flat(value: object, prefix: str = "", depth: int = 0, seen: set[int] | None = None) -> dict[str, LazyTensor]:
    """Dictionaries in dictionaries, as Megatron saved until it went over to dotted names; they may also be mixed.

    One that is there under several names is looked at once: all ways through a net of them would have no end.
    """
    seen = set() if seen is None else seen
    if not isinstance(value, dict) or depth > 12 or id(value) in seen:
        return {}
    seen.add(id(value))
    tensors: dict[str, LazyTensor] = {}
    for key, item in value.items():
        if isinstance(item, LazyTensor):
            tensors[f"{prefix}{key}"] = item
        else:
            tensors |= _flat(item, f"{prefix}{key}.", depth + 1, seen)
    return tensors


def _joined(
    stages: list[list[dict[str, LazyTensor]]], canonical: Callable[[str], str | None], where: str
) -> dict[str, LazyTensor]:
    """Layers are numbered from 0 in every stage. Interleaved: the first chunk of every stage, then the second."""
    tensors: dict[str, LazyTensor] = {}
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
                if name in tensors:
                    raise CheckpointError(
                        f"{where}: tensor '{theirs}' of stage {stage} is in an earlier stage as well."
                    )
                tensors[name] = each
            layers += len(own)
    return tensors


def _settings(args: object) -> dict[str, Any] | None:
    if isinstance(args, Object):  # a class of its own, not argparse's
        args = args.state
    return {str(key): value for key, value in args.items()} if isinstance(args, dict) else None


PADDING = 1024  # vocabularies are padded to 128 x tensor-parallel ranks, of which there are 8 at most


def one_of_many(loaded: Loaded) -> str:
    ranks = loaded.path if loaded.path.is_dir() else loaded.path.parent
    if _RANK.fullmatch(ranks.name):
        return f"{ranks.name} is one rank of several: name the folder above it."
    return "Folders mp_rank_... are missing: copy them as well."


def folder_name(rank: int, stage: int, cut: SplitSpec) -> str:
    return f"mp_rank_{rank:02d}_{stage:03d}" if cut.pp > 1 else f"mp_rank_{rank:02d}"
