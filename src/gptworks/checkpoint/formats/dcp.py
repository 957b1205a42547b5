"""torch.distributed.checkpoint folders that hold tensors and nothing else, written by all ranks at once.

A rank writes the slices it has (of replicas, one rank its copy) into a file of its own, and reads the slices it needs,
whoever wrote them: the layout that loads need not be the one that saved. Its `.metadata` is a pickle: it is read
through an unpickler that knows a dozen harmless names and refuses the rest.
"""

import io
import pickle
import pickletools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from gptworks.errors import CheckpointError, first_line
from gptworks.launch.ranks import Ranks
from gptworks.parallel.slices import Pieces, Slice, slices_of

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"},
    "pathlib": {"PosixPath", "WindowsPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "WindowsPath", "PurePosixPath"},  # the same since Python 3.13
}


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _memory_format
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"refused to load {module}.{name}: the metadata of a checkpoint never needs it. Do not trust this file."
            )
        return super().find_class(module, name)


def _memory_format(kind: Any, name: str) -> Any:
    """What Python 3.11.0 to 3.11.3 means by getattr when it pickles a member of an enum; nothing else is looked up."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise CheckpointError(
            f"refused to load attribute {name}: the metadata of a checkpoint never needs it. Do not trust this file."
        )
    return _MEM_FORMAT_ENCODING[name]


class _Reader(dcp.FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(str(self.path)) / ".metadata"
        try:
            data = path.read_bytes()
            _refuse_memory_bomb(data)
            metadata = _MetadataUnpickler(io.BytesIO(data)).load()
            _check(metadata)
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
            metadata.storage_meta.load_id = self.load_id
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # anything a damaged pickle can raise
            raise CheckpointError(
                f"{path}: cannot be read ({type(error).__name__}: {error}). The checkpoint is damaged."
            ) from None
        return metadata


def _refuse_memory_bomb(data: bytes) -> None:
    """The unpickler makes room for as many remembered objects as a file says it has: ten bytes can ask for 64 GB."""
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in {"PUT", "BINPUT", "LONG_BINPUT"} and not 0 <= argument <= len(data):  # type: ignore[operator]
            raise CheckpointError(f"remembers object number {argument} in {len(data)} bytes. Do not trust this file.")


def _check(metadata: Any) -> None:
    """Tensors only, in files of this folder only."""
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"holds a {type(metadata).__name__}, needed checkpoint metadata.")
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it without restriction
            raise CheckpointError(f"entry '{name}' is not a tensor. Do not trust this file.")
        if not isinstance(entry.size, torch.Size):
            raise CheckpointError(f"entry '{name}' has no shape. The checkpoint is damaged.")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise CheckpointError(f"the slices of '{name}' do not cover it exactly. The checkpoint is damaged.")
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
            raise CheckpointError(f"refers to {info.relative_path}, outside its own folder. Do not trust this file.")


class _Planner(dcp.DefaultSavePlanner):
    """Plans for slices, which know their place without any process group."""

    def create_local_plan(self) -> SavePlan:
        items = [_write_item(name, piece) for name, pieces in self.state_dict.items() for piece in pieces]
        self.plan = replace(SavePlan(items), planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return _at(self.state_dict[index.fqn], index)


def _at(pieces: tuple[Slice, ...], index: MetadataIndex) -> Tensor:
    return next(piece.here for piece in pieces if piece.offsets == index.offset)


def _write_item(name: str, piece: Slice) -> WriteItem:
    return WriteItem(
        MetadataIndex(name, piece.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            ChunkStorageMetadata(piece.offsets, piece.here.shape),
            TensorProperties.create_from_tensor(piece.here),
            piece.shape,
        ),
    )


def save(folder: Path, tensors: Mapping[str, Tensor | Slice | Pieces], ranks: Ranks | None = None) -> None:
    """Every rank gives what it has; what several ranks have is written once, by the one with the least to write."""
    ranks = ranks or Ranks()
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    planner = _Planner()

    def plan() -> SavePlan:
        planner.set_up_planner({name: slices_of(tensor) for name, tensor in tensors.items()}, is_coordinator=True)
        writer.set_up_storage_writer(ranks.is_main)
        return writer.prepare_local_plan(planner.create_local_plan())

    # Every rank works out the plan of all: that is a sort of names, and saves sending it around.
    plans = ranks.gather(ranks.on_all(plan))

    def write() -> tuple[Metadata, list[WriteResult]]:
        agreed, metadata = planner.create_global_plan(plans)
        mine = planner.finish_plan(writer.prepare_global_plan(agreed)[ranks.rank])
        with _plain_failures():
            return metadata, writer.write_data(mine, planner).wait()

    metadata, written = ranks.on_all(write)
    results = ranks.gather(written)
    ranks.on_main(lambda: writer.finish(metadata, results))


def files_of(folder: Path, rank: int) -> list[Path]:
    """What that rank wrote in `save`."""
    return sorted(folder.glob(f"__{rank}_*"))


@contextmanager
def _plain_failures() -> Iterator[None]:
    try:
        yield
    except (Exception, CheckpointException) as error:
        raise _cause(error) from None


class _LoadPlanner(dcp.DefaultLoadPlanner):
    """Plans for slices, and refuses to leave a number of them as it was."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, tuple[Slice, ...]], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        items = []
        for name, piece in ((name, piece) for name, pieces in self.state_dict.items() for piece in pieces):
            wanted = ChunkStorageMetadata(piece.offsets, piece.here.shape)
            stored = self.metadata.state_dict_metadata[name]
            reads = create_read_items_for_chunk_list(name, stored, [wanted]) if piece.here.numel() else []  # type: ignore[arg-type]
            if left := _not_covered(piece.here.shape, reads):
                raise CheckpointError(f"of '{name}', {left:,} of {piece.here.numel():,} numbers are in no slice")
            items += reads
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return _at(self.state_dict[index.fqn], index)


def _not_covered(shape: torch.Size, items: list[ReadItem]) -> int:
    """Numbers that no item fills. The tensor is looked at in cells: wherever an item begins or ends, a cell does."""
    boxes = [
        (item.dest_offsets, [a + n for a, n in zip(item.dest_offsets, item.lengths, strict=True)]) for item in items
    ]
    left = shape.numel()
    if len(boxes) < 2:
        return left - sum(item.lengths.numel() for item in items)
    cuts = [sorted({0, size, *(edge[dim] for box in boxes for edge in box)}) for dim, size in enumerate(shape)]
    filled = torch.zeros([len(edges) - 1 for edges in cuts], dtype=torch.bool)
    for begin, end in boxes:
        filled[tuple(slice(edges.index(a), edges.index(b)) for edges, a, b in zip(cuts, begin, end, strict=True))] = (
            True
        )
    for dim, edges in enumerate(cuts):
        widths = torch.tensor(edges).diff()
        filled = filled * widths.view([-1 if each == dim else 1 for each in range(len(cuts))])
    return left - int(filled.sum())


def load_into(
    folder: Path,
    tensors: Mapping[str, Tensor | Slice | Pieces] | Iterable[tuple[str, Tensor | Slice | Pieces]],
    ranks: Ranks | None = None,
) -> None:
    """Fill the given tensors in place, by name, to the last number; of a tensor in slices, the slice that is here.

    As pairs a name can come twice: an embedding and the copy of it that is a tied head.
    """
    pairs = list(tensors.items() if isinstance(tensors, Mapping) else tensors)
    (ranks or Ranks()).on_all(lambda: _load(folder, pairs))


def _load(folder: Path, pairs: Sequence[tuple[str, Tensor | Slice | Pieces]]) -> None:
    stored = shapes(folder)
    missing = sorted({name for name, _ in pairs} - set(stored))
    if missing:
        raise CheckpointError(
            f"{folder}: has no tensor '{missing[0]}' ({len(missing)} missing of {len(pairs)}). It belongs to "
            "another model."
        )
    for name, tensor in pairs:
        if stored[name] != tensor.shape:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {list(stored[name])}, needed {list(tensor.shape)}. It belongs to "
                "another model size."
            )
    once = dict(pairs)
    again = [(name, tensor) for name, tensor in pairs if once[name] is not tensor]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            wanted = {name: slices_of(tensor) for name, tensor in once.items()}
            # Each rank for itself: nothing to agree on.
            dcp.load(wanted, storage_reader=_Reader(folder), planner=_LoadPlanner(), no_dist=True)
        except (Exception, CheckpointException) as error:  # whatever torch says to damaged bytes
            cause = _cause(error)
            if isinstance(cause, PermissionError):
                raise cause from None
            raise CheckpointError(
                f"{folder}: cannot be read ({type(cause).__name__}: {first_line(cause)}). The checkpoint is damaged."
            ) from None
    if again:
        _load(folder, again)


def shapes(folder: Path) -> dict[str, torch.Size]:
    return {name: entry.size for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]


def _cause(error: BaseException) -> Exception:
    """What went wrong on the first rank that failed; what the operating system said, where it was that."""
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()))[0]
    if not isinstance(error, Exception):  # Ctrl-C, or the end of the interpreter
        raise error
    earlier: BaseException | None = error
    while earlier is not None and not isinstance(earlier, OSError):
        earlier = earlier.__cause__ or earlier.__context__
    return earlier or error
