"""Files of torch.save: zip archives, and the five pickles in a row of before 2020. Nothing in them is ever called.

Tensors are read and written one at a time: no more than one is in memory.
"""

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Global, Object, Persistent, brief
from gptworks.safe_pickle import Meaning, PickleMachine

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_STORAGE_OF = {dtype: name for name, dtype in _STORAGES.items()}
_REBUILD = {"torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_tensor"}
_PARAMETER = {"torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"}
_OLD_MAGIC = 0x1950A86A20F9469CFC6C


@dataclass(frozen=True)
class TorchFile:
    """`content`: what was saved, with a `LazyTensor` for each tensor and an `Object` for what is not plain."""

    content: Any
    unknown: list[str]  # names of classes and functions that were left alone


def read(path: Path) -> TorchFile:
    """Nested dictionaries, lists and numbers as they were; argparse.Namespace as a dictionary.

    >>> read(Path("ckpt.pt")).content["model_args"]["n_head"]   # doctest: +SKIP
    12
    """
    # Systems look at a file one after another to know whose it is: what is refused once is not read again.
    if not path.is_file():
        return _read(path)  # which says what is wrong
    about = path.resolve(), path.stat().st_size, path.stat().st_mtime_ns
    if about in _REFUSED:
        raise CheckpointError(_REFUSED[about])
    try:
        return _read(path)
    except CheckpointError as error:
        _REFUSED.clear()
        _REFUSED[about] = str(error)
        raise


_REFUSED: dict[tuple[Path, int, int], str] = {}  # the last file that could not be read: where, size, date


def _read(path: Path) -> TorchFile:
    data = raw_bytes.mapped(path, "a file of torch.save")
    if bytes(data[:4]) == b"PK\x03\x04":
        machine, storages = _open_zip(path, data)
        loaded = machine.load()
    elif _is_old(data):
        machine = _after_preamble(path, data)
        loaded = machine.load()
        storages = _old_storages(path, data, machine)
    else:
        raise CheckpointError(
            f"{path}: begins with {bytes(data[:4])!r}; not a file of torch.save (a zip archive or its older form)."
        )
    meaning = _Meaning(path, storages)
    try:
        content = meaning.of(loaded)
    except CheckpointError:
        raise
    except RecursionError:
        raise CheckpointError(
            f"{path}: its lists or dictionaries lie hundreds deep within each other. Refused: no file with weights "
            "does that."
        ) from None
    except Exception as error:  # calls with too few or with other arguments than torch gives them
        raise CheckpointError(
            f"{path}: its pickle contradicts itself ({type(error).__name__}: {error}). It is damaged: copy it again."
        ) from None
    return TorchFile(content, sorted(meaning.unknown))


def is_torch_file(path: Path) -> bool:
    """Looks at the first bytes only."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return False
    return start[:4] == b"PK\x03\x04" or _is_old(memoryview(start))


class _Meaning(Meaning):
    def __init__(self, path: Path, storages: dict[str, range]) -> None:
        super().__init__()
        self.path, self.storages = path, storages

    def of_global(self, name: Global) -> Any:
        if name.module == "torch" and isinstance(getattr(torch, name.name, None), torch.dtype):
            return getattr(torch, name.name)
        return super().of_global(name)

    def of_call(self, call: Object) -> Any:
        name = str(call.made_by)
        if name in _REBUILD:
            return self._tensor(*call.args[:4], *call.args[6:7])
        if name in _PARAMETER:
            return self.of(call.args[0])
        if name == "torch.Size":
            return torch.Size(call.args[0])
        if name == "torch.device" and isinstance(call.args[0], str):
            return call.args[0]
        return super().of_call(call)

    def _tensor(
        self, storage: Any, offset: Any, size: tuple[int, ...], stride: tuple[int, ...], *kind: Any
    ) -> LazyTensor:
        if not isinstance(storage, Persistent) or not isinstance(storage.id, tuple) or len(storage.id) < 5:
            raise CheckpointError(f"{self.path}: a tensor without a storage. It is damaged.")
        storage_type, key = storage.id[1], _key(storage.id)
        dtype = _STORAGES.get(getattr(storage_type, "name", ""))
        if kind and isinstance(kind[0], Global):  # version 3 names the type beside an untyped storage
            dtype = getattr(torch, kind[0].name, None)
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{self.path}: a tensor of type {brief(storage_type)}, which holds no weights.")
        data = self.storages.get(key)
        if data is None:
            raise CheckpointError(f"{self.path}: storage '{key}' is missing. It is damaged: copy it again.")
        (offset,) = _whole_numbers(self.path, (offset,))
        shape, strides = _whole_numbers(self.path, size), _whole_numbers(self.path, stride)
        last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) if 0 not in shape else -1
        # A stride of 0 repeats numbers without end: weights are never saved so.
        needed = max(last + 1, math.prod(shape)) * dtype.itemsize
        if needed > len(data):
            raise CheckpointError(
                f"{self.path}: a tensor of shape {brief(list(shape))} needs {needed:,} bytes of storage '{key}', which "
                f"has {len(data):,}. It is damaged: copy it again."
            )

        begin = data.start + offset * dtype.itemsize
        if strides == tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape))):
            place = range(begin, begin + math.prod(shape) * dtype.itemsize)
            return raw_bytes.stored(self.path, [place], torch.Size(shape), dtype)

        def read_tensor() -> Tensor:
            if 0 in shape:
                return torch.empty(shape, dtype=dtype)
            flat = raw_bytes.read(self.path, begin, last + 1 - offset, dtype)
            return flat.as_strided(shape, strides)

        return LazyTensor(torch.Size(shape), dtype, read_tensor)


def _whole_numbers(path: Path, values: Any) -> tuple[int, ...]:
    if isinstance(values, Object):  # torch.Size
        values = values.args[0]
    if not isinstance(values, tuple | list) or not all(type(n) is int and n >= 0 for n in values):
        raise CheckpointError(f"{path}: {brief(values)} is not a shape or stride of a tensor. It is damaged.")
    return tuple(values)


def _key(about: tuple[Any, ...]) -> str:
    """What a storage is called."""
    return about[2] if isinstance(about[2], str) else brief(about[2])


# The archive of today


def _open_zip(path: Path, data: memoryview) -> tuple[PickleMachine, dict[str, range]]:
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError, struct.error) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}). It is damaged: copy it again.") from None
    # Not entry.is_dir(), which looks at the last letter of a name that may have none.
    pieces = {entry.filename: _entry(path, data, entry) for entry in entries if not entry.filename.endswith("/")}
    pickles = [name for name in pieces if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"{path}: a zip archive without data.pkl; not a file of torch.save.")
    folder = pickles[0].removesuffix("data.pkl")
    order = pieces.get(folder + "byteorder")
    if order is not None and bytes(data[order.start : order.stop]).strip() != b"little":
        raise CheckpointError(f"{path}: saved on a big-endian machine, which is not supported.")
    inside = folder + "data/"
    storages = {name.removeprefix(inside): piece for name, piece in pieces.items() if name.startswith(inside)}
    program = pieces[pickles[0]]
    return PickleMachine(data[program.start : program.stop], str(path)), storages


def _entry(path: Path, data: memoryview, entry: zipfile.ZipInfo) -> range:
    """Where the bytes of the entry lie in the file."""
    if entry.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: '{entry.filename}' is compressed; torch.save does not do that.")
    header = data[entry.header_offset : entry.header_offset + 30]
    if len(header) < 30 or bytes(header[:4]) != b"PK\x03\x04":
        raise CheckpointError(f"{path}: no header for '{entry.filename}'. It is damaged: copy it again.")
    name_len, extra_len = struct.unpack("<HH", header[26:30])
    begin = entry.header_offset + 30 + name_len + extra_len
    if begin + entry.file_size > len(data):
        raise CheckpointError(f"{path}: '{entry.filename}' is cut off. It is damaged: copy it again.")
    return range(begin, begin + entry.file_size)


# Five pickles in a row (magic number, protocol, machine, content, keys of storages), then the storages


def _is_old(data: memoryview) -> bool:
    try:
        return bool(PickleMachine(data[:64], "").load() == _OLD_MAGIC)
    except CheckpointError:
        return False


def _after_preamble(path: Path, data: memoryview) -> PickleMachine:
    at = 0
    for _ in range(3):
        machine = PickleMachine(data, str(path), at)
        machine.load()
        at = machine.end
    return PickleMachine(data, str(path), at)


def _old_storages(path: Path, data: memoryview, content: PickleMachine) -> dict[str, range]:
    machine = PickleMachine(data, str(path), content.end)
    keys = machine.load()
    if not isinstance(keys, list):
        raise CheckpointError(f"{path}: no list of storages. It is damaged: copy it again.")
    sizes = {_key(entry): _STORAGES.get(getattr(entry[1], "name", "")) for entry in _persistent_ids(content)}
    at, storages = machine.end, {}
    for key in (each if isinstance(each, str) else brief(each) for each in keys):
        dtype = sizes.get(key)
        count = struct.unpack("<q", data[at : at + 8])[0] if len(data) >= at + 8 else -1
        size = count * (dtype.itemsize if dtype else 0)
        if dtype is None or count < 0 or at + 8 + size > len(data):
            raise CheckpointError(f"{path}: storage '{key}' is cut off. It is damaged: copy it again.")
        storages[key] = range(at + 8, at + 8 + size)
        at += 8 + size
    return storages


def _persistent_ids(machine: PickleMachine) -> Iterator[tuple[Any, ...]]:
    for value in machine.persistent:
        if isinstance(value.id, tuple) and len(value.id) >= 5:
            yield value.id


# Writing


class _Storage:
    def __init__(self, key: str, stored: LazyTensor) -> None:
        self.key, self.stored = key, stored


class _Reference:
    """Pickles as the tensor whose bytes will follow."""

    def __init__(self, storage: _Storage) -> None:
        self.storage = storage

    def __reduce__(self) -> tuple[Any, ...]:
        shape = self.storage.stored.shape
        stride = torch.empty(shape, device="meta").stride()
        return torch._utils._rebuild_tensor_v2, (self.storage, 0, tuple(shape), stride, False, OrderedDict())


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, _Storage):
            return None
        kind = getattr(torch, _STORAGE_OF[value.stored.dtype])
        return ("storage", kind, value.key, "cpu", value.stored.shape.numel())


def write(path: Path, content: Any) -> None:
    """What torch.save would write of `content`, in which tensors are `LazyTensor`: read, written and forgotten in turn.

    One `LazyTensor` under two names is saved once, as tied weights are.
    """
    storages: dict[int, _Storage] = {}

    def referenced(value: Any) -> Any:
        if isinstance(value, LazyTensor):
            return _Reference(storages.setdefault(id(value), _Storage(str(len(storages)), value)))
        if isinstance(value, dict):
            return type(value)((key, referenced(item)) for key, item in value.items())
        if isinstance(value, list | tuple):
            return type(value)(referenced(item) for item in value)
        return value

    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(referenced(content))
    folder = path.stem
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        _add(archive, f"{folder}/data.pkl", [buffer.getbuffer()], len(buffer.getbuffer()))
        _add(archive, f"{folder}/byteorder", [memoryview(b"little")], 6)
        for storage in storages.values():
            _add(archive, f"{folder}/data/{storage.key}", _pieces(storage.stored), storage.stored.num_bytes)
        _add(archive, f"{folder}/version", [memoryview(b"3\n")], 2)


_PIECE = 4 * 2**20


def _pieces(stored: LazyTensor) -> Iterator[memoryview]:
    flat = stored.read_bytes()
    for start in range(0, len(flat), _PIECE):
        yield flat[start : start + _PIECE]


def _add(archive: zipfile.ZipFile, name: str, pieces: Any, size: int) -> None:
    entry = zipfile.ZipInfo(name)
    # Data begins at a multiple of 64 bytes, as torch does it, so that a mapped file gives aligned tensors. zipfile adds
    # 20 bytes of its own to the header of an entry that may pass 2 GiB.
    large = size * 1.05 > zipfile.ZIP64_LIMIT
    begin = archive.fp.tell() + 30 + len(name.encode()) + (20 if large else 0)  # type: ignore[union-attr]
    padding = -(begin + 4) % 64
    entry.extra = struct.pack("<HH", 0x4246, padding) + b"Z" * padding
    with archive.open(entry, "w", force_zip64=large) as file:
        for piece in pieces:
            file.write(piece)
