"""torch.distributed.checkpoint folders that hold tensors and nothing else.

Its `.metadata` is a pickle: it is read through an unpickler that knows a dozen harmless names and refuses the rest.
"""

import io
import pickle
import pickletools
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from gptworks.errors import CheckpointError

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
        if name not in _ALLOWED.get(module, ()):
            raise CheckpointError(
                f"refused to load {module}.{name}: a checkpoint's metadata has no business with it. Do not trust "
                "this file."
            )
        return super().find_class(module, name)


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
    for info in (metadata.storage_data or {}).values():
        if Path(info.relative_path).name != info.relative_path or info.relative_path == "..":
            raise CheckpointError(f"refers to {info.relative_path}, outside its own folder. Do not trust this file.")


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.save(tensors, storage_writer=writer, no_dist=True)
        except CheckpointException as error:  # a BaseException, which nobody expects
            raise _cause(error) from None


def load_into(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the given tensors in place, by name."""
    stored = shapes(folder)
    missing = sorted(set(tensors) - set(stored))
    if missing:
        raise CheckpointError(
            f"{folder}: has no tensor '{missing[0]}' ({len(missing)} missing of {len(tensors)}). It belongs to "
            "another model."
        )
    for name, tensor in tensors.items():
        if stored[name] != tensor.shape:
            raise CheckpointError(
                f"{folder}: '{name}' has shape {list(stored[name])}, needed {list(tensor.shape)}. It belongs to "
                "another model size."
            )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)
        except (Exception, CheckpointException) as error:  # whatever torch says to damaged bytes
            cause = _cause(error)
            raise CheckpointError(
                f"{folder}: cannot be read ({type(cause).__name__}: {first_line(cause)}). The checkpoint is damaged."
            ) from None


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


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
