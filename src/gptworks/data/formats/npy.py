"""Numpy's own files, for token data: `.npy` (one array) and `.npz` (a zip of them).

Read without pickle and without trusting a number: what a header claims is compared with what the file has before
anything is allocated. `.npy`: 6 bytes "\\x93NUMPY", version (2 bytes), length of the text (u16; u32 from version 2),
the text of a Python dict, the numbers.
"""

import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from gptworks.data.formats.contents import map_stream
from gptworks.errors import DataError

MAGIC = b"\x93NUMPY"
_LONGEST_TEXT = 10_000  # numpy's own limit; ours have 118 bytes
_TEXT = re.compile(
    r"\{\s*'descr'\s*:\s*(?P<kind>.+?)\s*,\s*'fortran_order'\s*:\s*(?:True|False)\s*,"
    r"\s*'shape'\s*:\s*(?P<shape>\([0-9L, ]*\))\s*,?\s*\}\s*"
)
_KINDS = {f"'{kind}'": np.dtype(kind) for kind in ("|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8")}
_ONE_DIMENSION = re.compile(r"\(\s*([0-9]{1,18})L?\s*,\s*\)")
_LOCAL_HEADER = struct.Struct("<4s22xHH")
# Below this nobody is hurt; above it, token data never shrinks a hundredfold, and a zip bomb does.
_HARMLESS_BYTES, _MOST_SHRUNK = 64_000_000, 100
# zipfile has no single error for a damaged file.
_ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    OSError,
    EOFError,
    RuntimeError,  # NotImplementedError is one: encryption, unknown compression
    ValueError,
    OverflowError,
)


@dataclass(frozen=True)
class Header:
    dtype: np.dtype
    count: int
    start: int  # where the numbers begin

    @property
    def end(self) -> int:
        return self.start + self.count * self.dtype.itemsize


def read_header(opened: IO[bytes], where: str) -> Header:
    """A one-dimensional array of little-endian whole numbers; anything else is refused. `where`: for messages."""
    start = opened.read(8)
    if start[:6] != MAGIC:
        raise DataError(f"{where}: begins with {start[:6]!r}, needed {MAGIC!r}. This is not an array of numpy's.")
    version = tuple(start[6:])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise DataError(f"{where}: version {'.'.join(map(str, version)) or 'cut off'}, needed 1.0, 2.0 or 3.0.")
    width = 2 if version == (1, 0) else 4
    length = int.from_bytes(opened.read(width), "little")
    text = opened.read(min(length, _LONGEST_TEXT + 1))
    if length > _LONGEST_TEXT or len(text) < length:
        raise DataError(
            f"{where}: a header of {length} bytes, but {len(text)} are there (at most {_LONGEST_TEXT} make sense). The "
            "file is damaged: copy or prepare it again."
        )
    fields = _TEXT.fullmatch(text.decode("latin1"))
    if not fields:
        raise DataError(f"{where}: header {_preview(text)}, needed that of a plain array. The file is damaged.")
    if fields["kind"] not in _KINDS:
        raise DataError(
            f"{where}: numbers of type {fields['kind'][:60]}, needed little-endian whole numbers such as '<u2' or "
            "'<i4'."
        )
    shape = _ONE_DIMENSION.fullmatch(fields["shape"])
    if not shape:
        raise DataError(f"{where}: shape {fields['shape'][:60]}, needed one dimension, such as (1000,).")
    return Header(_KINDS[fields["kind"]], int(shape[1]), 8 + width + length)


def _preview(text: bytes) -> str:
    return repr(text.rstrip()[:100])


def write_header(file: IO[bytes], dtype: np.dtype, count: int) -> None:
    """As np.save writes it."""
    text = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, text)


def write_array(file: IO[bytes], dtype: np.dtype, count: int, blocks: Iterable[np.ndarray]) -> None:
    """The bytes of np.save, without the whole array in memory."""
    write_header(file, dtype, count)
    for block in blocks:
        file.write(block.tobytes())


def map_array(file: Path) -> np.ndarray:
    with file.open("rb") as opened:
        header = read_header(opened, str(file))
    return _mapped(file, header, 0, file.stat().st_size, str(file))


def _mapped(file: Path, header: Header, at: int, size: int, where: str) -> np.ndarray:
    if size != header.end:
        raise DataError(
            f"{where}: {size} bytes, but {header.count} numbers of type {header.dtype.name} need {header.end}. It is "
            "cut off or damaged: copy or prepare it again."
        )
    return map_stream(file, header.dtype, at + header.start, header.count)


def members(file: Path) -> list[str]:
    """Names of the arrays in a .npz."""
    return list(_listing(file))


def _listing(file: Path) -> dict[str, zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(file) as opened:
            return {each.filename.removesuffix(".npy"): each for each in opened.infolist()}
    except _ZIP_ERRORS as error:
        raise DataError(f"{file}: not a zip of arrays ({error}). It is damaged: copy or prepare it again.") from None


def read_member(file: Path, name: str) -> np.ndarray:
    """An array of a .npz. Mapped when it is stored as it is (np.savez does), else decompressed."""
    info = _info(file, name)
    where = f"{file}, array {name}"
    if info.compress_type == zipfile.ZIP_STORED:
        at = _start_of_stored(file, info, where)
        with file.open("rb") as opened:
            opened.seek(at)
            header = read_header(opened, where)
        return _mapped(file, header, at, info.file_size, where)
    return _decompressed(file, info, where)


def read_small_member(file: Path, name: str) -> np.ndarray:
    """An array read into memory, with the zip's checksum compared: for lengths and borders, which decide everything."""
    return _decompressed(file, _info(file, name), f"{file}, array {name}")


def _info(file: Path, name: str) -> zipfile.ZipInfo:
    listing = _listing(file)
    if name not in listing:
        raise DataError(f"{file}: no array {name!r}; it has {', '.join(sorted(listing))[:200] or 'none'}.")
    return listing[name]


def _start_of_stored(file: Path, info: zipfile.ZipInfo, where: str) -> int:
    """Where the bytes of a stored member begin: after its local header, whose names may differ in length."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        opened.seek(min(max(info.header_offset, 0), size))
        head = opened.read(_LOCAL_HEADER.size)
        magic, name_length, extra_length = _LOCAL_HEADER.unpack(head.ljust(_LOCAL_HEADER.size, b"\0"))
        name = opened.read(name_length)
    start = info.header_offset + _LOCAL_HEADER.size + name_length + extra_length
    encrypted = bool(info.flag_bits & 1)
    if (
        info.header_offset < 0  # zipfile subtracts what it believes to stand before the zip
        or magic != b"PK\3\4"
        or encrypted
        or name != info.orig_filename.encode()
        or info.compress_size != info.file_size
        or start + info.file_size > size
    ):
        raise DataError(
            f"{where}: {info.file_size} bytes at {info.header_offset}{' (encrypted)' if encrypted else ''} in a zip of "
            f"{size}, and nothing of the kind is there. The file is damaged: copy or prepare it again."
        )
    return start


def _decompressed(file: Path, info: zipfile.ZipInfo, where: str) -> np.ndarray:
    _check_claims(file, info, where)
    try:
        with zipfile.ZipFile(file) as archive, archive.open(info) as opened:
            header = read_header(opened, where)
            if header.end != info.file_size:
                raise DataError(
                    f"{where}: {info.file_size} bytes, but {header.count} numbers of type {header.dtype.name} need "
                    f"{header.end}. The file is damaged: copy or prepare it again."
                )
            data = opened.read()
    except _ZIP_ERRORS as error:
        raise DataError(f"{where}: cannot be unpacked ({error}). Copy or prepare it again.") from None
    if header.start + len(data) != header.end:
        raise DataError(f"{where}: {header.start + len(data)} bytes unpacked, needed {header.end}. It is damaged.")
    return np.frombuffer(data, header.dtype)


def _check_claims(file: Path, info: zipfile.ZipInfo, where: str) -> None:
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise DataError(f"{where}: compression method {info.compress_type}, needed 0 (none) or 8 (deflate).")
    packed = min(info.compress_size, file.stat().st_size)
    if info.file_size > max(_HARMLESS_BYTES, _MOST_SHRUNK * packed):
        raise DataError(
            f"{where}: claims to unpack to {info.file_size} bytes from {packed}; no token data shrinks so much. If you "
            "trust it, unpack and save it with numpy.savez."
        )
