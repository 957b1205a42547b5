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
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import ModelConfig
from gptworks.errors import CheckpointError
from gptworks.launch.ranks import Ranks
from gptworks.parallel.slices import Slice, slice_of

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


def write(
    folder: Path,
    cfg: ModelConfig,
    weights: Mapping[str, Tensor | Slice],
    ranks: Ranks,
    *,
    eod_id: int | None,
    file_bytes: int = safetensors_file.FILE_BYTES,
) -> list[Path]:
    """All ranks call it, each with the slices it has; gives the files this rank wrote."""
    huggingface.TABLE.require(cfg)
    if ranks.size == 1:
        huggingface.save(folder, cfg, {n: slice_of(t).here for n, t in weights.items()}, eod_id=eod_id)
        return [folder / "model.safetensors", folder / "config.json"]
    here = {name: slice_of(tensor) for name, tensor in weights.items()}
    held = _who_has_what(here, cfg, ranks)
    shapes = {name: (each.shape, each.dtype) for name, each in held.items()}
    files = safetensors_file.cut_into_files(shapes, file_bytes)
    writers = {file: number * ranks.size // len(files) for number, file in enumerate(files)}

    def write_all() -> list[Path]:
        failures = [
            _write_file(folder / file, names, held, here, cfg, ranks, writers[file]) for file, names in files.items()
        ]
        for failure in failures:
            if failure:
                raise failure
        written = [folder / file for file in files if writers[file] == ranks.rank]
        return written + (_describe(folder, cfg, files, held, eod_id) if ranks.is_main else [])

    ranks.main_does(lambda: folder.mkdir(parents=True, exist_ok=True))
    return ranks.all_do(write_all)


def _who_has_what(here: dict[str, Slice], cfg: ModelConfig, ranks: Ranks) -> dict[str, _Held]:
    """Under the names of the file, in their order."""
    mine = ranks.all_do(lambda: {_their_name(name): name for name in here})
    told = {
        theirs: (name, part.shape, part.here.dtype, part.offsets, part.here.shape)
        for theirs, name in mine.items()
        for part in [here[name]]
    }
    found: dict[str, _Held] = {}
    names: dict[str, str] = {}
    for rank, parts in enumerate(ranks.gather(told)):
        for theirs, (name, shape, dtype, offsets, sizes) in parts.items():
            names[theirs] = name
            holders = found.setdefault(theirs, _Held(shape, dtype, {})).holders
            if sizes.numel():
                holders.setdefault((offsets, sizes), []).append(rank)
    for theirs, held in found.items():
        if sum(sizes.numel() for _, sizes in held.holders) != held.shape.numel():
            raise CheckpointError(f"{names[theirs]}: the ranks hold slices that do not make up {list(held.shape)}.")
    return {names[theirs]: found[theirs] for theirs in sorted(found)}


def _write_file(
    path: Path,
    names: list[str],
    held: dict[str, _Held],
    here: dict[str, Slice],
    cfg: ModelConfig,
    ranks: Ranks,
    writer_rank: int,
) -> Exception | None:
    """A writer that fails goes on receiving, so that nobody waits for it; what went wrong is said at the end."""
    if ranks.rank != writer_rank:
        for name in names:
            if any(source == ranks.rank for *_, source in held[name].sources(writer_rank)):
                _send(here[name].here, ranks, writer_rank)
        return None
    failure: Exception | None = None
    shapes = {_their_name(name): (_their_shape(name, held[name].shape), held[name].dtype) for name in names}
    with ExitStack() as stack:
        file: Writer | None = None
        try:
            file = stack.enter_context(Writer(path, shapes))
        except OSError as error:
            failure = error
        for name in names:
            whole = _collect(held[name], here.get(name), ranks)
            try:
                if failure is None and file is not None:
                    _write_pieces(file, name, whole, cfg)
            except Exception as error:
                failure = error
            del whole  # before room is made for the next
    return failure


def _write_pieces(file: Writer, name: str, tensor: Tensor, cfg: ModelConfig) -> None:
    """A function of its own: a piece is a view, and the last one would keep the tensor alive beside the next."""
    for piece in _in_their_order(name, tensor, cfg):
        file.write(piece)


def _collect(held: _Held, mine: Slice | None, ranks: Ranks) -> Tensor:
    if mine is not None and mine.here.shape == held.shape:
        return mine.here  # nothing to put together
    whole = torch.empty(held.shape, dtype=held.dtype)
    for offsets, sizes, source in held.sources(ranks.rank):
        place = whole
        for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
            place = place.narrow(dim, begin, size)
        if source == ranks.rank:
            assert mine is not None
            place.copy_(mine.here)
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


def _in_their_order(name: str, tensor: Tensor, cfg: ModelConfig) -> Iterator[Tensor]:
    """Rows of their matrix are columns of ours: a few at a time, so that no second copy of the tensor exists."""
    rule = huggingface.rule_of(name)
    if not rule.transposed or tensor.ndim == 1:
        yield from _pieces(*rule.to_theirs(tensor, cfg.head_size))
        return
    columns = max(1, _PIECE_BYTES // (tensor.shape[0] * tensor.element_size()))
    for piece in tensor.split(columns, dim=1):
        yield from rule.to_theirs(piece, cfg.head_size)


def _their_name(name: str) -> str:
    return huggingface.rule_of(name).theirs[0]


def _their_shape(name: str, shape: torch.Size) -> torch.Size:
    return huggingface.rule_of(name).their_shapes(shape)[0]


def _describe(
    folder: Path, cfg: ModelConfig, files: dict[str, list[str]], held: dict[str, _Held], eod_id: int | None
) -> list[Path]:
    paths = [huggingface.write_config(folder, cfg, eod_id=eod_id)]
    if len(files) > 1:
        total = sum(safetensors_file.num_bytes(tensor.shape, tensor.dtype) for tensor in held.values())
        theirs = {file: [_their_name(name) for name in names] for file, names in files.items()}
        paths.append(huggingface.write_index(folder, theirs, total))
    return paths
