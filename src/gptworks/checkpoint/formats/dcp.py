"""torch.distributed.checkpoint folders that hold tensors and nothing else.

Its `.metadata` is a pickle: it is read through an unpickler that knows a dozen harmless names and refuses the rest.
"""

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
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
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        except Exception as error:  # anything a damaged pickle can raise
            raise CheckpointError(
                f"{path}: cannot be read ({type(error).__name__}: {error}). The checkpoint is damaged."
            ) from None
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{path}: holds a {type(metadata).__name__}, needed checkpoint metadata.")
        for name, entry in metadata.state_dict_metadata.items():
            if not isinstance(entry, TensorStorageMetadata):  # torch would unpickle it without restriction
                raise CheckpointError(f"{path}: entry '{name}' is not a tensor. Do not trust this file.")
        for info in (metadata.storage_data or {}).values():
            if Path(info.relative_path).name != info.relative_path:
                raise CheckpointError(
                    f"{path}: refers to {info.relative_path}, outside its own folder. Do not trust this file."
                )
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save(folder: Path, tensors: dict[str, Tensor]) -> None:
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(tensors, storage_writer=writer, no_dist=True)


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
        dcp.load(tensors, storage_reader=_Reader(folder), no_dist=True)


def shapes(folder: Path) -> dict[str, torch.Size]:
    return {name: entry.size for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items()}  # type: ignore[union-attr]
