"""Shards of llm.c, little-endian: 256 int32 (a magic number, the version, number of tokens, zeros), then the tokens.

Magic 20240520, version 1: uint16 (GPT-2). Magic 20240801, version 7: uint32 (Llama 3); read, never written.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptworks.data.formats.contents import Contents, Tokens, bare_stream, blocks, map_stream
from gptworks.data.formats.file_names import begins_with, beside, files_of_one, sidecar_of_one
from gptworks.errors import DataError

NAME = "llmc"
TITLE = "llm.c shards"
KEEPS_SEQUENCES = False
NEEDS_ROWS = False
LARGEST_ID: int | None = 65535
MAGIC = 20240520
SHARD_TOKENS = 100_000_000  # as llm.c cuts FineWeb
HEADER_BYTES = 1024
_START = struct.Struct("<3i")


@dataclass(frozen=True)
class _Kind:
    version: int
    dtype: np.dtype


_KINDS = {MAGIC: _Kind(1, np.dtype("<u2")), 20240801: _Kind(7, np.dtype("<u4"))}
MAGICS = tuple(magic.to_bytes(4, "little") for magic in _KINDS)


def find(path: Path) -> Path | None:
    """One shard, named in full, is one dataset."""
    return path if path.name.endswith(".bin") and any(begins_with(path, magic) for magic in MAGICS) else None


files, sidecar = files_of_one, sidecar_of_one


def read(main: Path) -> Contents:
    if not main.is_file():
        raise DataError(f"{main}: no such file.")
    with main.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise DataError(f"{main}: {len(header)} bytes, but the header alone has {HEADER_BYTES}. It is cut off.")
    magic, version, count = _START.unpack_from(header)
    if magic not in _KINDS:
        raise DataError(f"{main}: begins with {magic}, needed one of {sorted(_KINDS)}. This is not a shard of llm.c.")
    kind = _KINDS[magic]
    if version != kind.version:
        raise DataError(f"{main}: version {version}, needed {kind.version} with {magic}.")
    size, needed = main.stat().st_size, HEADER_BYTES + count * kind.dtype.itemsize
    if count < 0 or size != needed:
        raise DataError(
            f"{main}: {size} bytes, but its header counts {count} tokens, {needed} bytes in all. It is cut off or "
            "damaged: copy it again."
        )
    return bare_stream(map_stream(main, kind.dtype, HEADER_BYTES, count))


def first_number(header: bytes) -> int:
    return int(_START.unpack_from(header)[0])


class _TokenRange:
    """Some of the tokens, still where they are."""

    def __init__(self, tokens: Tokens, start: int, end: int) -> None:
        self._tokens, self._start, self._end = tokens, start, end

    @property
    def dtype(self) -> np.dtype:
        return self._tokens.dtype

    def __len__(self) -> int:
        return self._end - self._start

    def __getitem__(self, where: slice) -> np.ndarray:
        start, stop, _ = where.indices(len(self))
        return self._tokens[self._start + start : self._start + stop]


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    """PREFIX_000000.bin, PREFIX_000001.bin and so on. Tokens only: documents have no place in this format."""
    dtype = _KINDS[MAGIC].dtype
    written = []
    for number, start in enumerate(range(0, max(contents.num_tokens, 1), SHARD_TOKENS)):
        shard = beside(prefix, f"_{number:06d}.bin")
        tokens = _TokenRange(contents.tokens, start, min(start + SHARD_TOKENS, contents.num_tokens))
        with shard.open("wb") as file:
            file.write(_START.pack(MAGIC, _KINDS[MAGIC].version, len(tokens)).ljust(HEADER_BYTES, b"\0"))
            for block in blocks(tokens, dtype, shard):
                file.write(block.tobytes())
        written.append(shard)
    return written
