"""GGUF, the one file of llama.cpp: settings, a table of tensors, and their bytes. Versions 2 and 3, little-endian.

Tensors are read and written one at a time: no more than one is in memory.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gptworks.checkpoint.formats import ggml_blocks, raw_bytes
from gptworks.checkpoint.formats.ggml_blocks import BLOCKS, NAMES, PLAIN
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError

MAGIC = b"GGUF"
_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}

Value = str | int | float | bool | Sequence[str] | Sequence[int] | Sequence[float]


@dataclass(frozen=True)
class GgufFile:
    """`settings`: numbers, texts, lists of texts, and numpy arrays of numbers. Tensors as torch has them: [out, in]."""

    settings: dict[str, Any]
    tensors: dict[str, LazyTensor]  # those of blocks are given as float32
    types: dict[str, int]  # as they are stored
    places: dict[str, range]  # their bytes in the file


def is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read(path: Path) -> GgufFile:
    """Nothing is trusted: a count or a length that the file has no room for is an error before it is used."""
    data = raw_bytes.mapped(path, "a GGUF file")
    cursor = _Cursor(path, data)
    if bytes(cursor.take(4)) != MAGIC:
        raise CheckpointError(f"{path}: begins with {bytes(data[:4])!r}, needed {MAGIC!r}: not a GGUF file.")
    version = cursor.number("<I")
    if version not in (2, 3):
        swapped = " It was written for a big-endian machine." if version & 0xFFFF == 0 else ""
        raise CheckpointError(f"{path}: GGUF version {version}, needed 2 or 3.{swapped}")
    num_tensors, num_settings = cursor.number("<Q"), cursor.number("<Q")
    settings: dict[str, Any] = {}
    for _ in range(num_settings):
        key = cursor.text()
        if key in settings:
            raise CheckpointError(f"{path}: the setting '{key}' is there twice. The file is damaged.")
        settings[key] = cursor.value(cursor.number("<I"))
    table = [_Entry.read(cursor) for _ in range(num_tensors)]
    alignment = settings.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment % 8:
        raise CheckpointError(f"{path}: general.alignment is {alignment!r}, needed a multiple of 8.")
    start = -(-cursor.at // alignment) * alignment
    file = GgufFile(settings, {}, {}, {})
    for entry in table:
        if entry.name in file.tensors:
            raise CheckpointError(f"{path}: tensor '{entry.name}' is there twice. The file is damaged.")
        size = entry.num_bytes(path)
        begin = start + entry.offset
        if entry.offset % alignment or begin + size > len(data):
            raise CheckpointError(
                f"{path}: tensor '{entry.name}' needs {size:,} bytes from {begin:,} on, and the file has "
                f"{len(data):,}. It is damaged or cut short: copy it again."
            )
        file.tensors[entry.name] = _stored(path, begin, size, entry)
        file.types[entry.name] = entry.type
        file.places[entry.name] = range(begin, begin + size)
    return file


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: torch.Size
    type: int
    offset: int

    @classmethod
    def read(cls, cursor: "_Cursor") -> "_Entry":
        name, num_dims = cursor.text(), cursor.number("<I")
        if num_dims > 4:
            raise CheckpointError(f"{cursor.path}: tensor '{name}' has {num_dims} dims, at most 4. It is damaged.")
        dims = [cursor.number("<Q") for _ in range(num_dims)]
        if any(dim >= 2**63 for dim in dims):
            raise CheckpointError(f"{cursor.path}: tensor '{name}' has shape {dims[::-1]}. The file is damaged.")
        return cls(name, torch.Size(reversed(dims)), cursor.number("<I"), cursor.number("<Q"))

    def num_bytes(self, path: Path) -> int:
        count = 1
        for dim in self.shape:  # not numel(), which would wrap around
            count *= dim
        if self.type in PLAIN:
            return count * PLAIN[self.type].itemsize
        if self.type not in BLOCKS:
            raise CheckpointError(
                f"{path}: tensor '{self.name}' is of ggml type {self.type}. Known are {', '.join(NAMES.values())}: "
                "take the file it was quantised from."
            )
        block = BLOCKS[self.type]
        if not self.shape or self.shape[-1] % block.length:
            raise CheckpointError(
                f"{path}: tensor '{self.name}' is {block.name} with rows that are not a multiple of {block.length}."
            )
        return count // block.length * block.layout.itemsize


class _Cursor:
    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise CheckpointError(
                f"{self.path}: {size:,} bytes are announced at {self.at:,}, and the file has {len(self.data):,}. "
                "It is damaged or cut short: copy it again."
            )
        self.at += size
        return self.data[self.at - size : self.at]

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def text(self) -> str:
        taken = self.take(self.number("<Q"))
        try:
            return str(taken, "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self.path}: the text at {self.at:,} is not UTF-8. The file is damaged.") from None

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        if kind == _ARRAY:
            inside, count = self.number("<I"), self.number("<Q")
            if inside in _SCALARS:
                return self._numbers(inside, count)
            if inside == _STRING:  # a count that is not true ends at the end of the file
                return [self.text() for _ in range(count)]
            kind = inside
        raise CheckpointError(f"{self.path}: a setting before {self.at:,} is of unknown type {kind}. It is damaged.")

    def _numbers(self, kind: int, count: int) -> "np.ndarray[Any, Any]":
        form = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(bytes(self.take(count * form.itemsize)), dtype=form)  # a copy: the mapping may go


def _stored(path: Path, begin: int, size: int, entry: _Entry) -> LazyTensor:
    def read() -> Tensor:
        raw = raw_bytes.read(path, begin, size, torch.uint8).numpy().data
        return ggml_blocks.dequantised(raw, entry.type, entry.shape)

    if entry.type in BLOCKS:
        return LazyTensor(entry.shape, torch.float32, read)
    return raw_bytes.stored(path, [range(begin, begin + size)], entry.shape, PLAIN[entry.type])


# Writing


def write(
    path: Path, settings: Mapping[str, Value], tensors: Mapping[str, LazyTensor], types: Mapping[str, int] | None = None
) -> None:
    """Tensors stand in the order given. `types`: how each is stored, where that is not its own type.

    An int is written as uint32 (in a list int32), a float as float32, a list as its first value.
    """
    types = {name: (types or {}).get(name, type_of(each.dtype)) for name, each in tensors.items()}
    header = [MAGIC, struct.pack("<IQQ", 3, len(tensors), len(settings))]
    header += [_text(key) + _packed(value) for key, value in settings.items()]
    offset = 0
    for name, each in tensors.items():
        dims = tuple(reversed(each.shape))
        header.append(_text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, types[name], offset))
        offset += _padded(_size(each.shape, types[name]))
    with path.open("wb") as file:
        file.write(b"".join(header))
        _pad(file)
        for name, each in tensors.items():
            file.write(_bytes(name, each.read(), types[name]))
            _pad(file)


def type_of(dtype: torch.dtype) -> int:
    """Which of ggml's types keeps all numbers of this one."""
    kind = next((kind for kind, known in PLAIN.items() if known == dtype), None)
    if kind is None:
        raise CheckpointError(f"GGUF has no place for weights of type {dtype}. Add --dtype fp32.")
    return kind


def _size(shape: torch.Size, kind: int) -> int:
    count = shape.numel()
    if kind in PLAIN:
        return count * PLAIN[kind].itemsize
    return count // BLOCKS[kind].length * BLOCKS[kind].layout.itemsize


def _bytes(name: str, tensor: Tensor, kind: int) -> memoryview:
    if kind in PLAIN:
        return tensor.detach().cpu().to(PLAIN[kind]).contiguous().view(torch.uint8).numpy().data
    if not tensor.isfinite().all():
        raise CheckpointError(f"'{name}' holds values that are not finite; {NAMES[kind]} has no place for them.")
    return ggml_blocks.quantised(tensor.cpu(), kind).view(np.uint8).data


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _pad(file: BinaryIO) -> None:
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def _packed(value: Value) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(_text(str(each)) for each in value)
    if value and isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", _ARRAY, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", _ARRAY, 5, len(value), *value)
