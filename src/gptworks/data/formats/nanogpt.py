"""nanoGPT's `X.bin`: uint16 tokens, little-endian, and nothing else. Nothing in the file says what it is, so only a
file that is named in full is taken for one, and not when it looks like something else.
"""

import json
from pathlib import Path

import numpy as np

from gptworks.data.formats import llmc
from gptworks.data.formats.contents import Contents, bare_stream, blocks, map_stream
from gptworks.data.formats.file_names import begins_with, beside, files_of_one, prefix_of, sidecar_of_one
from gptworks.errors import DataError

NAME = "nanogpt"
TITLE = "nanoGPT .bin, bare uint16 tokens"
KEEPS_SEQUENCES = False
NEEDS_ROWS = False
LARGEST_ID: int | None = 65535
DTYPE = np.dtype("<u2")
# llm.c's shards and its sets of questions; a zip, such as weights saved by PyTorch under the name of .bin.
_OTHERS = (*llmc.MAGICS, (20240522).to_bytes(4, "little"), b"PK\x03\x04")


def find(path: Path) -> Path | None:
    if not path.name.endswith(".bin") or not path.is_file():
        return None
    if beside(prefix_of(path), ".idx").exists() or _lost_its_index(path):
        return None
    return None if any(begins_with(path, magic) for magic in _OTHERS) else path


def _lost_its_index(path: Path) -> bool:
    """Our own sidecar says that there was a .idx: half a Megatron pair is not a bare stream."""
    try:
        described = json.loads(beside(prefix_of(path), ".json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    hashes = described.get("sha256") if isinstance(described, dict) else None
    return isinstance(hashes, dict) and ".idx" in hashes


files, sidecar = files_of_one, sidecar_of_one


def read(main: Path) -> Contents:
    if not main.is_file():
        raise DataError(f"{main}: no such file.")
    size = main.stat().st_size
    if size % DTYPE.itemsize:
        raise DataError(
            f"{main}: {size} bytes, an odd number; needed two for each token. It is cut off or of another kind."
        )
    with main.open("rb") as file:
        header = file.read(llmc.HEADER_BYTES)
    if len(header) == llmc.HEADER_BYTES and any(header[:12]) and not any(header[12:]):
        raise DataError(
            f"{main}: begins like a shard of llm.c (three numbers, then zeros), but with {llmc.first_number(header)}, "
            f"needed {llmc.MAGIC}. It is damaged or of an unknown kind: copy it again."
        )
    return bare_stream(map_stream(main, DTYPE, 0, size // DTYPE.itemsize))


def write(prefix: Path, contents: Contents, vocab_size: int | None) -> list[Path]:
    bin_ = beside(prefix, ".bin")
    with bin_.open("wb") as file:
        for block in blocks(contents.tokens, DTYPE, bin_):
            file.write(block.tobytes())
    return [bin_]
