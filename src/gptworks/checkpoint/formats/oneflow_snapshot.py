"""Snapshot folders of OneFlow: <variable>/out with the numbers, <variable>/meta with shape and type, and an empty
snapshot_done, which is written last.
"""

import math
import re
from pathlib import Path

import torch

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from gptworks.errors import CheckpointError

DONE = "snapshot_done"
DATA, META = "out", "meta"
_TYPES = {
    "kFloat": torch.float32,
    "kDouble": torch.float64,
    "kInt8": torch.int8,
    "kInt32": torch.int32,
    "kInt64": torch.int64,
    "kUInt8": torch.uint8,
    "kFloat16": torch.float16,
    "kBFloat16": torch.bfloat16,
}
_NUMBERS = {
    2: "kFloat",
    3: "kDouble",
    4: "kInt8",
    5: "kInt32",
    6: "kInt64",
    7: "kUInt8",
    9: "kFloat16",
    11: "kBFloat16",
}
_NAME_OF = {dtype: name for name, dtype in _TYPES.items()}
_META_BYTES = 4096  # there is no reason for more
_SHAPE = re.compile(r"\bshape\s*:?\s*[{<]([^{}<>]*)[}>]")
_TYPE = re.compile(r"\bdata_type\s*:\s*(\w+)")
_DIM = re.compile(r"\s*dim\s*:\s*(?:(-?\d+)|\[([-\d\s,]*)\])\s*[,;]?")
_PIECE = 4 * 2**20
_MOST_ITEMS = 2**62


def read(folder: Path) -> dict[str, LazyTensor]:
    """All variables. Shapes and sizes of files are compared; numbers are read when asked for."""
    try:
        variables = sorted(each for each in folder.iterdir() if (each / DATA).is_file())
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read ({error}). Needed: a OneFlow snapshot folder.") from None
    return {each.name: _variable(each) for each in variables}


def is_snapshot(folder: Path) -> bool:
    """Looks at names only: the mark at its end, or a variable with its description."""
    try:
        if (folder / DONE).is_file():
            return True
        return any((each / DATA).is_file() and (each / META).is_file() for each in folder.iterdir())
    except OSError:
        return False


def _variable(folder: Path) -> LazyTensor:
    file = folder / DATA
    shape, dtype = _described(folder / META)
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}).") from None
    if math.prod(shape) * dtype.itemsize != size:
        raise CheckpointError(
            f"{file}: has {size:,} bytes, and meta says {_NAME_OF[dtype]} of shape {shape[:8]}. "
            "It is damaged: copy the folder again."
        )
    return raw_bytes.stored(file, [range(size)], torch.Size(shape), dtype)


def _described(meta: Path) -> tuple[list[int], torch.dtype]:
    try:
        with meta.open("rb") as file:
            text = file.read(_META_BYTES).decode()
    except FileNotFoundError:
        raise CheckpointError(
            f"{meta}: missing. Snapshots of OneFlow before 0.3 have none and do not say their shapes; load and save it "
            "with a later one."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{meta}: cannot be read ({error}). It is damaged: copy the folder again.") from None
    shape, kind = _SHAPE.search(text), _TYPE.search(text)
    if shape is None or kind is None:
        raise CheckpointError(f"{meta}: got {text[:60]!r}, needed a shape and a data_type. Copy the folder again.")
    name = _NUMBERS.get(int(kind[1]), kind[1]) if kind[1].isdecimal() else kind[1]
    if name not in _TYPES:
        raise CheckpointError(f"{meta}: data_type {name[:40]}, which holds no weights of a GPT.")
    dims = _dims(shape[1])
    if dims is None or math.prod(max(n, 1) for n in dims) >= _MOST_ITEMS:
        raise CheckpointError(
            f"{meta}: {shape[1].strip()[:60]!r} is not a shape. It is damaged: copy the folder again."
        )
    return dims, _TYPES[name]


def _dims(text: str) -> list[int] | None:
    dims: list[int] = []
    at = 0
    while text[at:].strip():
        dim = _DIM.match(text, at)
        if dim is None:
            return None
        pieces = [dim[1]] if dim[1] is not None else [n for n in dim[2].split(",") if n.strip()]
        try:
            dims += [int(n) for n in pieces]
        except ValueError:
            return None
        at = dim.end()
    return dims if all(n >= 0 for n in dims) else None


class Writer:
    """Variables one at a time; `finish` says that all are there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: list[Path] = []

    def write(self, variables: LazyTensors) -> None:
        for name, stored in variables.items():
            tensor = stored.read().detach().contiguous()
            if tensor.shape != stored.shape or tensor.dtype != stored.dtype:
                raise AssertionError(f"announced {stored.shape} {stored.dtype}, got {tensor.shape} {tensor.dtype}")
            file = self._begin(name, stored)
            with file.open("wb") as opened:
                opened.write(tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else b"")

    def fill(self, name: str, like: LazyTensor, value: float) -> None:
        """A variable that has one number everywhere."""
        one = torch.full((max(1, _PIECE // like.dtype.itemsize),), value, dtype=like.dtype)
        piece = one.view(torch.uint8).numpy().data
        with self._begin(name, like).open("wb") as opened:
            for begin in range(0, like.num_bytes, len(piece)):
                opened.write(piece[: like.num_bytes - begin])

    def finish(self) -> list[Path]:
        done = self.folder / DONE
        done.touch()
        return [*self.files, done]

    def _begin(self, name: str, stored: LazyTensor) -> Path:
        kind = _NAME_OF.get(stored.dtype)
        if kind is None:
            raise CheckpointError(f"'{name}': OneFlow has no variables of type {stored.dtype}.")
        folder = self.folder / name
        folder.mkdir()
        dims = "".join(f"  dim: {n}\n" for n in stored.shape)
        (folder / META).write_text(f"shape {{\n{dims}}}\ndata_type: {kind}\n", encoding="utf-8")
        self.files += [folder / DATA, folder / META]
        return folder / DATA
