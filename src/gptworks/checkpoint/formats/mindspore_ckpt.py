"""MindSpore .ckpt files: one protobuf message, a value after the other, each a tag and a tensor (dims, type, content).

Read and written without protobuf: bytes of tensors stay in the file until they are asked for, and tensors are written
one at a time.
"""

import math
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.errors import CheckpointError

CHUNK_BYTES = 512 * 2**20  # a larger tensor is spread over several values of the same tag
_TYPES = {
    "Float64": torch.float64,
    "Float32": torch.float32,
    "Float16": torch.float16,
    "BFloat16": torch.bfloat16,
    "Int64": torch.int64,
    "Int32": torch.int32,
    "Int16": torch.int16,
    "Int8": torch.int8,
    "UInt64": torch.uint64,
    "UInt32": torch.uint32,
    "UInt16": torch.uint16,
    "UInt8": torch.uint8,
    "Bool": torch.bool,
}
_NAME_OF = {dtype: name for name, dtype in _TYPES.items()}
_CRC_MARK = b"crc_num"
_CRC_BYTES = 10  # of the number behind the mark, big-endian
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECE = 4 * 2**20
_MOST_ITEMS = 2**62


@dataclass(frozen=True)
class MindSporeFile:
    tensors: dict[str, LazyTensor]
    texts: dict[str, str]  # values of type str, which training appends
    skipped: dict[str, str]  # what holds no tensor we know: name, and why
    has_checksum: bool  # and it was right


@dataclass
class _Value:
    tag: str = ""
    dims: list[int] = field(default_factory=list)
    kind: str = ""
    pieces: list[range] = field(default_factory=list)  # bytes of the file, in order


def read(path: Path) -> MindSporeFile:
    """A checksum, where there is one, is compared: that reads the whole file once.

    >>> read(Path("gpt2.ckpt")).tensors["backbone.layernorm.gamma"].shape   # doctest: +SKIP
    torch.Size([768])
    """
    data = raw_bytes.mapped(path, "a MindSpore .ckpt file")
    end = len(data)
    has_checksum = data[max(0, end - _CRC_BYTES - len(_CRC_MARK)) : end - _CRC_BYTES] == _CRC_MARK
    if has_checksum:
        end -= _CRC_BYTES + len(_CRC_MARK)
        _compare_checksum(path, end, int.from_bytes(data[-_CRC_BYTES:], "big"))
    content = MindSporeFile({}, {}, {}, has_checksum)
    for value in _Message(path, data, 0, end).values():
        if value.tag in content.tensors or value.tag in content.texts or value.tag in content.skipped:
            raise CheckpointError(f"{path}: '{value.tag}' is in it twice. It is damaged: save or copy it again.")
        if value.kind == "map":
            content.skipped[value.tag] = "a map tensor, which holds no weights of a GPT"
        elif value.kind == "str":
            content.texts[value.tag] = _text(path, value)
        elif (dtype := _TYPES.get(value.kind)) is None:
            content.skipped[value.tag] = f"of type {value.kind[:40]}, which holds no weights of a GPT"
        else:
            content.tensors[value.tag] = _stored(path, value, dtype)
    return content


def is_mindspore_file(path: Path) -> bool:
    """Looks at the first bytes only: a value that begins with its tag."""
    try:
        with path.open("rb") as file:
            start = file.read(1024)
            size = os.fstat(file.fileno()).st_size
    except OSError:
        return False
    message = _Message(path, memoryview(start), 0, len(start))
    try:
        if message.key() != (1, _BYTES) or message.varint() > size or message.key() != (1, _BYTES):
            return False
        length = message.varint()
        tag = start[message.at : message.at + length].decode()
        return (
            0 < length <= len(start) - message.at and tag.isprintable() and start[message.at + length] in (0x12, 0x1A)
        )
    except (CheckpointError, UnicodeDecodeError, IndexError):
        return False


def _compare_checksum(path: Path, end: int, expected: int) -> None:
    checksum = 0
    with path.open("rb") as file:
        for begin in range(0, end, _PIECE):
            checksum = zlib.crc32(file.read(min(_PIECE, end - begin)), checksum)
    if checksum != expected:
        raise CheckpointError(
            f"{path}: its checksum is {checksum:#x}, and {expected:#x} is written in it. It is damaged: copy it again."
        )


class _Message:
    """The fields of a protobuf message, which lies from `at` to `end` in the data."""

    def __init__(self, path: Path, data: memoryview, at: int, end: int) -> None:
        self.path, self.data, self.at, self.end = path, data, at, end

    def values(self) -> list[_Value]:
        values: list[_Value] = []
        for number, begin, end in self.fields():
            if number != 1:
                continue
            value = _Message(self.path, self.data, begin, end).value()
            previous = values[-1] if values else None
            if previous and previous.tag == value.tag:
                if (previous.dims, previous.kind) != (value.dims, value.kind):
                    raise self.damaged(f"the parts of '{value.tag}' are of different shapes or types")
                previous.pieces += value.pieces
            else:
                values.append(value)
        return values

    def value(self) -> _Value:
        value = _Value()
        has_tag = False
        for number, begin, end in self.fields():
            if number == 1:
                value.tag, has_tag = self.text(begin, end), True
            elif number == 2:
                _Message(self.path, self.data, begin, end).tensor(value)
            elif number == 3:
                value.kind = "map"
        if not has_tag or not value.kind:
            raise self.damaged("a value without a name or a tensor")
        return value

    def tensor(self, value: _Value) -> None:
        begin = self.at
        value.pieces = []
        for number, first, last in self.fields(numbers=value.dims.append):
            if number == 1:  # a list of numbers in one field, as later versions of protobuf write them
                packed = _Message(self.path, self.data, first, last)
                while packed.at < last:
                    value.dims.append(packed.varint())
            elif number == 2:
                value.kind = self.text(first, last)
            elif number == 3:
                value.pieces = [range(first, last)]
        if not value.kind or not value.pieces:
            raise self.damaged(f"no tensor at byte {begin:,}")

    def fields(self, numbers: Callable[[int], None] | None = None) -> Iterator[tuple[int, int, int]]:
        """Number, begin and end of each field that holds bytes; `numbers` is called with those of field 1."""
        while self.at < self.end:
            number, kind = self.key()
            if kind == _BYTES:
                length = self.varint()
                begin = self.at
                if length > self.end - begin:
                    raise self.damaged(f"{length:,} bytes are announced at byte {begin:,}, and fewer follow")
                self.at = begin + length
                yield number, begin, self.at
            elif kind == _VARINT:
                value = self.varint()
                if number == 1 and numbers is not None:
                    numbers(value)
            elif kind in (_FIXED64, _FIXED32):
                self.at += 8 if kind == _FIXED64 else 4
            else:
                raise self.damaged(f"no field of a message at byte {self.at:,}")
        if self.at != self.end:
            raise self.damaged("it is cut off")

    def key(self) -> tuple[int, int]:
        key = self.varint()
        return key >> 3, key & 7

    def varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            if self.at >= self.end:
                raise self.damaged("it is cut off")
            byte = self.data[self.at]
            self.at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return number
        raise self.damaged(f"no number at byte {self.at:,}")

    def text(self, begin: int, end: int) -> str:
        try:
            return str(self.data[begin:end], "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"no name at byte {begin:,}") from None

    def damaged(self, problem: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: not a MindSpore checkpoint, or a damaged or encrypted one ({problem}). Copy it again; one "
            "that was saved with enc_key must be saved anew without it."
        )


def _stored(path: Path, value: _Value, dtype: torch.dtype) -> LazyTensor:
    held = sum(map(len, value.pieces))
    # A number was saved with dims [0] before MindSpore 2, and without any since.
    dims = [] if value.dims == [0] and held == dtype.itemsize else value.dims
    if math.prod(max(n, 1) for n in dims) >= _MOST_ITEMS or math.prod(dims) * dtype.itemsize != held:
        raise CheckpointError(
            f"{path}: '{value.tag}' has {held:,} bytes, which do not make a {value.kind} tensor of shape {dims[:8]}. "
            "It is damaged: copy it again."
        )
    return raw_bytes.stored(path, value.pieces, torch.Size(dims), dtype)


def _text(path: Path, value: _Value) -> str:
    """Saved as numpy does it: four bytes for each character."""
    data = raw_bytes.read_pieces(path, value.pieces, torch.uint8)
    return bytes(data.numpy().data).decode("utf-32-le", errors="replace").rstrip("\0")


def write(path: Path, tensors: LazyTensors, *, checksum: bool = False, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Byte for byte what mindspore.save_checkpoint writes of these tensors in this order; the file is read-only, as its
    are. `checksum`: its `crc_check`.
    """
    path.unlink(missing_ok=True)  # one that is read-only could not be opened
    with path.open("wb") as file:
        crc = 0
        for tag, stored in tensors.items():
            for piece in _pieces(tag, stored, chunk_bytes):
                file.write(piece)
                if checksum:
                    crc = zlib.crc32(piece, crc)
        if checksum:
            file.write(_CRC_MARK + crc.to_bytes(_CRC_BYTES, "big"))
    path.chmod(0o400)


def _pieces(tag: str, stored: LazyTensor, chunk_bytes: int) -> Iterator[bytes | memoryview]:
    kind = _NAME_OF.get(stored.dtype)
    if kind is None:
        raise CheckpointError(f"'{tag}': MindSpore has no tensors of type {stored.dtype}.")
    data = stored.read_bytes()
    about = b"".join(b"\x08" + _number(n) for n in stored.shape) + b"\x12" + _sized(kind.encode())
    name = b"\x0a" + _sized(tag.encode())
    for begin in range(0, len(data) or 1, chunk_bytes):
        chunk = data[begin : begin + chunk_bytes]
        inner = about + b"\x1a" + _number(len(chunk))
        middle = name + b"\x12" + _number(len(inner) + len(chunk)) + inner
        yield b"\x0a" + _number(len(middle) + len(chunk)) + middle
        for first in range(0, len(chunk), _PIECE):
            yield chunk[first : first + _PIECE]


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
