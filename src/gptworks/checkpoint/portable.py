"""The Hugging Face folder of a model that no rank holds whole.

Tensor by tensor: the ranks that have a slice send it to the rank that writes the file, which puts the tensor together,
writes it and forgets it. Beside its own part no rank ever holds more than one tensor.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gptworks.checkpoint.formats import safetensors_file
from gptworks.checkpoint.formats.safetensors_file import Writer
from gptworks.checkpoint.rules import Rule
from gptworks.checkpoint.systems import huggingface
from gptworks.checkpoint.systems.huggingface_families import family_of
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.launch.ranks import Ranks
from gptworks.parallel.slices import Pieces, Slice, slices_of

_PIECE_BYTES = 4 * 2**20  # what is sent, turned around and written at once


@dataclass(frozen=True)
class _Held:
    """A tensor and which ranks have which slices of it."""

    shape: torch.Size
    dtype: torch.dtype
    holders: dict[tuple[torch.Size, torch.Size], list[int]]  # offsets and sizes -> ranks

    def sources(self, writer: int) -> list[tuple[torch.Size, torch.Size, int]]:
        """Who gives each slice: the writer what it has itself, otherwise the first that has it."""
        return [(*place, writer if writer in ranks else ranks[0]) for place, ranks in self.holders.items()]


class Rules:
    """How tensors of a model are called and laid out in its folder. Refuses a model that no family computes."""

    def __init__(self, model: ModelConfig) -> None:
        self.model, self.family = model, family_of(model)
        self.heads = (model.head_size, model.heads_per_kv)

    def of(self, name: str) -> Rule:
        return self.family.rule(name)

    def their_shapes(self, name: str, shape: torch.Size) -> dict[str, torch.Size]:
        rule = self.of(name)
        return dict(zip(rule.theirs, rule.their_shapes(shape, self.model.heads_per_kv), strict=True))


def write(
    folder: Path,
    cfg: ModelConfig,
    weights: Mapping[str, Tensor | Slice | Pieces],
    ranks: Ranks,
    *,
    eod_id: int | None,
    bos_id: int | None = None,
    file_bytes: int = safetensors_file.FILE_BYTES,
) -> list[Path]:
    """All ranks call it, each with the slices it has; gives the files this rank wrote."""
    rules = Rules(cfg)
    if ranks.size == 1:
        whole = {name: only.here for name, tensor in weights.items() for (only,) in [slices_of(tensor)]}
        huggingface.save(folder, cfg, whole, eod_id=eod_id, bos_id=bos_id)
        return [folder / "model.safetensors", folder / "config.json"]
    here = {name: slices_of(tensor) for name, tensor in weights.items()}
    held = _who_has_what(here, rules, ranks)
    shapes = {name: (each.shape, each.dtype) for name, each in held.items()}
    files = safetensors_file.cut_into_files(shapes, file_bytes)
    writers = {file: number * ranks.size // len(files) for number, file in enumerate(files)}

    def write_all() -> list[Path]:
        failures = [
            _write_file(folder / file, names, held, here, rules, ranks, writers[file]) for file, names in files.items()
        ]
        for failure in failures:
            if failure:
                raise failure
        written = [folder / file for file in files if writers[file] == ranks.rank]
        if not ranks.is_main:
            return written
        config = huggingface.write_config(folder, cfg, eod_id=eod_id, bos_id=bos_id)
        return [*written, config, *_write_index(folder, rules, files, held)]

    ranks.on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    return ranks.on_all(write_all)


def _who_has_what(here: dict[str, tuple[Slice, ...]], rules: Rules, ranks: Ranks) -> dict[str, _Held]:
    """Under the names of the file, in their order."""
    mine = ranks.on_all(lambda: {rules.of(name).theirs[0]: name for name in here})
    slices_here = {
        theirs: (name, here[name][0].shape, here[name][0].here.dtype, [(p.offsets, p.here.shape) for p in here[name]])
        for theirs, name in mine.items()
    }
    held_of: dict[str, _Held] = {}
    names: dict[str, str] = {}
    for rank, of_rank in enumerate(ranks.gather(slices_here)):
        for theirs, (name, shape, dtype, places) in of_rank.items():
            names[theirs] = name
            holders = held_of.setdefault(theirs, _Held(shape, dtype, {})).holders
            for offsets, sizes in places:
                if sizes.numel():
                    holders.setdefault((offsets, sizes), []).append(rank)
    for theirs, held in held_of.items():
        if sum(sizes.numel() for _, sizes in held.holders) != held.shape.numel():
            raise CheckpointError(f"{names[theirs]}: the ranks hold slices that do not make up {list(held.shape)}.")
    return {names[theirs]: held_of[theirs] for theirs in sorted(held_of)}


def _write_file(
    path: Path,
    names: list[str],
    held: dict[str, _Held],
    here: dict[str, tuple[Slice, ...]],
    rules: Rules,
    ranks: Ranks,
    writer_rank: int,
) -> Exception | None:
    """A writer that fails goes on receiving, so that nobody waits for it; what went wrong is said at the end."""
    if ranks.rank != writer_rank:
        for name in names:
            for offsets, sizes, source in held[name].sources(writer_rank):
                if source == ranks.rank:
                    _send(_at(here[name], offsets, sizes), ranks, writer_rank)
        return None
    failure: Exception | None = None
    shapes = {
        theirs: (shape, held[name].dtype)
        for name in names
        for theirs, shape in rules.their_shapes(name, held[name].shape).items()
    }
    with ExitStack() as stack:
        file: Writer | None = None
        try:
            file = stack.enter_context(Writer(path, shapes))
        except OSError as error:
            failure = error
        for name in names:
            whole = _collect(held[name], here.get(name, ()), ranks)
            try:
                if failure is None and file is not None:
                    _write_pieces(file, name, whole, rules)
            except Exception as error:
                failure = error
            del whole  # before room is made for the next
    return failure


def _write_pieces(file: Writer, name: str, tensor: Tensor, rules: Rules) -> None:
    """A function of its own: a piece is a view, and the last one would keep the tensor alive beside the next."""
    rule = rules.of(name)
    if len(rule.theirs) == 1:
        file.begin(rule.theirs[0])
        for piece in _in_their_order(rule, tensor, rules):
            file.write(piece)
        return
    for theirs, stored in zip(rule.theirs, rule.to_theirs(tensor, *rules.heads), strict=True):
        file.begin(theirs)
        for piece in _pieces(stored):
            file.write(piece)


def _at(slices: tuple[Slice, ...], offsets: torch.Size, sizes: torch.Size) -> Tensor:
    return next(each.here for each in slices if (each.offsets, each.here.shape) == (offsets, sizes))


def _collect(held: _Held, mine: tuple[Slice, ...], ranks: Ranks) -> Tensor:
    if mine and mine[0].here.shape == held.shape:
        return mine[0].here  # nothing to put together
    whole = torch.empty(held.shape, dtype=held.dtype)
    for offsets, sizes, source in held.sources(ranks.rank):
        place = whole
        for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
            place = place.narrow(dim, begin, size)
        if source == ranks.rank:
            place.copy_(_at(mine, offsets, sizes))
        else:
            for piece in _pieces(place):
                buffer = torch.empty(piece.shape, dtype=piece.dtype)
                ranks.receive(buffer, source)
                piece.copy_(buffer)
    return whole


def _send(tensor: Tensor, ranks: Ranks, to: int) -> None:
    for piece in _pieces(tensor):
        ranks.send(piece.cpu().contiguous(), to)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """A few rows at a time; a scalar is one piece."""
    if tensor.ndim == 0:
        yield tensor
        return
    row = max(1, tensor[:1].numel() * tensor.element_size())
    yield from tensor.split(max(1, _PIECE_BYTES // row))


def _in_their_order(rule: Rule, tensor: Tensor, rules: Rules) -> Iterator[Tensor]:
    """Rows of their matrix are columns of ours: a few at a time, so that no second copy of the tensor exists."""
    if not rule.transposed or tensor.ndim == 1:
        yield from _pieces(*rule.to_theirs(tensor, *rules.heads))
        return
    columns = max(1, _PIECE_BYTES // (tensor.shape[0] * tensor.element_size()))
    for piece in tensor.split(columns, dim=1):
        yield from rule.to_theirs(piece, *rules.heads)


def _write_index(folder: Path, rules: Rules, files: dict[str, list[str]], held: dict[str, _Held]) -> list[Path]:
    """Where there are several files."""
    if len(files) == 1:
        return []
    total = sum(safetensors_file.num_bytes(tensor.shape, tensor.dtype) for tensor in held.values())
    theirs = {file: [each for name in names for each in rules.of(name).theirs] for file, names in files.items()}
    return [huggingface.write_index(folder, theirs, total)]
