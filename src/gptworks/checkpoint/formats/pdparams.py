"""Files of paddle.save (.pdparams, .pdopt): a pickle of names and numpy arrays. Nothing in it is ever called.

Array bytes stay in the file until a tensor is asked for, in protocols 3 to 5 as bytes, in protocol 2 as the text
that spells them; at most one tensor is in memory, reading as well as writing.

Paddle has no unsigned 16-bit tensors: it stores bfloat16 as numpy's uint16, and every uint16 array is bfloat16.
"""

import math
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from gptworks.checkpoint.formats import raw_bytes
from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.errors import CheckpointError
from gptworks.pickle_values import Bytes, Global, Object, brief
from gptworks.safe_pickle import Meaning, PickleMachine

NAMES = "StructuredToParameterName@@"  # name in the state -> name inside Paddle
_SLICES = "UnpackBigParamInfor@@"  # protocols 2 and 3 cut arrays of a gigabyte: name -> shape and names of slices
_DTYPES = {
    "f8": torch.float64,
    "f4": torch.float32,
    "f2": torch.float16,
    "u2": torch.bfloat16,
    "i8": torch.int64,
    "i4": torch.int32,
    "i2": torch.int16,
    "i1": torch.int8,
    "u1": torch.uint8,
    "b1": torch.bool,
}
_CODE_OF = {dtype: code for code, dtype in _DTYPES.items()}
_LONG_TEXT = 4096  # only arrays of protocol 2 are that long
_DAMAGED = "It is damaged: copy it again."


@dataclass(frozen=True)
class PaddleFile:
    tensors: dict[str, LazyTensor]
    values: dict[str, Any] = field(default_factory=dict)  # whatever else was saved: steps, nested dictionaries
    unknown: list[str] = field(default_factory=list)  # names of classes and functions that were left alone


def read(path: Path) -> PaddleFile:
    """
    >>> read(Path("model.pdparams")).tensors["gpt.decoder.norm.weight"].shape   # doctest: +SKIP
    torch.Size([1024])
    """
    data = raw_bytes.mapped(path, "a file of paddle.save")
    if data[0] != 0x80:
        raise CheckpointError(f"{path}: begins with {bytes(data[:4])!r}; not a file of paddle.save (a pickle).")
    content = _Machine(data, str(path)).load()
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}, needed a dictionary of arrays.")
    arrays = _Arrays(path)
    try:
        loaded = {str(name): arrays.of(_without_name(value)) for name, value in content.items()}
    except CheckpointError:
        raise
    except Exception as error:  # calls with other arguments than numpy gives them; lists in lists in lists
        raise CheckpointError(
            f"{path}: its pickle contradicts itself ({type(error).__name__}: {error}). {_DAMAGED}"
        ) from None
    slices = loaded.pop(_SLICES, {})
    tensors = {name: value for name, value in loaded.items() if isinstance(value, LazyTensor)}
    values = {name: value for name, value in loaded.items() if not isinstance(value, LazyTensor)}
    return PaddleFile(_joined(path, tensors, slices), values, sorted(arrays.unknown))


def _without_name(value: Any) -> Any:
    """Paddle makes (name, array) of a tensor outside a state."""
    is_named = isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
    return value[1] if is_named and isinstance(value[1], Object) else value


@dataclass(frozen=True)
class _Text:
    """A long text that was left in the file: bytes spelled in latin-1, one character each."""

    at: int  # in the file
    size: int


class _Machine(PickleMachine):
    """Leaves the arrays of protocol 2 in the file as well: _codecs.encode("...", "latin1")."""

    def _text(self, size: int) -> None:
        if size <= _LONG_TEXT:
            super()._text(size)
        else:
            self._take(size)
            self.stack.append(_Text(self.end - size, size))

    def _call(self, function: Any, args: Any) -> None:
        is_bytes = isinstance(function, Global) and str(function) == "_codecs.encode"
        if is_bytes and isinstance(args, tuple) and args[1:] == ("latin1",) and isinstance(args[0], _Text):
            self.stack.append(args[0])
        else:
            super()._call(function, args)


class _Arrays(Meaning):
    """Says which of the calls in the pickle mean arrays: a `LazyTensor` for each."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def of_call(self, call: Object) -> Any:
        name = str(call.made_by).replace("numpy._core.", "numpy.core.")
        if name == "numpy.core.multiarray._reconstruct":
            return self._array(call.state)
        if name == "numpy.core.numeric._frombuffer":  # protocol 5
            data, dtype, shape, order = self._exactly(call.args, 4)
            return self._stored(shape, dtype, order == "F", data)
        if name == "numpy.core.multiarray.scalar":
            dtype, data = self._exactly(call.args, 2)
            return self._stored((), dtype, False, data)
        return super().of_call(call)

    def _array(self, state: Any) -> LazyTensor:
        _, shape, dtype, is_fortran, data = self._exactly(state, 5)
        return self._stored(shape, dtype, bool(is_fortran), data)

    def _exactly(self, values: Any, count: int) -> tuple[Any, ...]:
        if not isinstance(values, tuple) or len(values) != count:
            raise CheckpointError(f"{self.path}: an array of {brief(values)}. {_DAMAGED}")
        return values

    def _dtype(self, call: Any) -> torch.dtype:
        is_dtype = isinstance(call, Object) and str(call.made_by) == "numpy.dtype" and call.args
        code = call.args[0] if is_dtype and isinstance(call.args[0], str) else ""
        order = call.state[1] if is_dtype and isinstance(call.state, tuple) and len(call.state) > 1 else "|"
        if code[:1] in "<>|=" and code:
            order, code = code[0], code[1:]
        if order == ">":
            raise CheckpointError(f"{self.path}: an array of big-endian numbers, which is not supported.")
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: an array of type {brief(call.args[0] if is_dtype else call)}, which holds no weights."
            )
        return _DTYPES[code]

    def _stored(self, shape: Any, dtype_call: Any, is_fortran: bool, data: Any) -> LazyTensor:
        dtype = self._dtype(dtype_call)
        if not isinstance(shape, tuple | list) or not all(type(n) is int and n >= 0 for n in shape):
            raise CheckpointError(f"{self.path}: {brief(shape)} is not the shape of an array. {_DAMAGED}")
        size, path = math.prod(shape) * dtype.itemsize, self.path
        if not isinstance(data, bytes | str | Bytes | _Text):
            raise CheckpointError(f"{path}: an array with {type(data).__name__} for its bytes. {_DAMAGED}")
        if not isinstance(data, _Text):
            self._require_size(shape, size, len(data))
        if isinstance(data, Bytes) and not is_fortran:
            return raw_bytes.stored(path, [range(data.at, data.at + size)], torch.Size(shape), dtype)

        def tensor() -> Tensor:
            raw = _raw(path, data)
            self._require_size(shape, size, len(raw))
            flat = raw.view(dtype)
            if is_fortran:
                return flat.view(tuple(reversed(shape))).permute(tuple(reversed(range(len(shape)))))
            return flat.view(tuple(shape))

        return LazyTensor(torch.Size(shape), dtype, tensor)

    def _require_size(self, shape: Any, needed: int, size: int) -> None:
        if size != needed:
            raise CheckpointError(
                f"{self.path}: an array of shape {brief(list(shape))} has {size:,} bytes, needed {needed:,}. {_DAMAGED}"
            )


def _raw(path: Path, data: bytes | str | Bytes | _Text) -> Tensor:
    """The bytes of an array, in memory of their own: in a pickle they begin anywhere, and numbers want alignment."""
    if isinstance(data, Bytes):
        return raw_bytes.read(path, data.at, len(data), torch.uint8)
    try:
        if isinstance(data, _Text):
            spelled = raw_bytes.read(path, data.at, data.size, torch.uint8)
            data = str(spelled.numpy().data, "utf-8")
            del spelled
        buffer = bytearray(data, "latin-1") if isinstance(data, str) else bytearray(data)  # a str is from Python 2
    except ValueError as error:
        raise CheckpointError(f"{path}: an array whose text is not bytes ({error}). {_DAMAGED}") from None
    return torch.frombuffer(buffer, dtype=torch.uint8) if buffer else torch.empty(0, dtype=torch.uint8)


def _joined(path: Path, tensors: dict[str, LazyTensor], slices: Any) -> dict[str, LazyTensor]:
    """With each array that was saved in slices in one piece."""
    if not isinstance(slices, dict):
        raise CheckpointError(f"{path}: {_SLICES} is a {type(slices).__name__}, needed a dictionary. {_DAMAGED}")
    whole = dict(tensors)
    for name, about in slices.items():
        shape = about.get("OriginShape") if isinstance(about, dict) else None
        slice_names = about.get("slices") if isinstance(about, dict) else None
        if (
            not isinstance(shape, tuple | list)
            or not all(type(n) is int and n >= 0 for n in shape)
            or not isinstance(slice_names, list)
            or not slice_names
            or not all(isinstance(slice_name, str) and slice_name in tensors for slice_name in slice_names)
        ):
            raise CheckpointError(f"{path}: the slices of '{name}' are not all there. {_DAMAGED}")
        pieces = [tensors[slice_name] for slice_name in slice_names]
        if sum(piece.shape.numel() for piece in pieces) != math.prod(shape) or len({p.dtype for p in pieces}) != 1:
            raise CheckpointError(f"{path}: the slices of '{name}' do not make up {list(shape)}. {_DAMAGED}")
        for slice_name in slice_names:
            whole.pop(slice_name, None)
        whole[str(name)] = _in_one_piece(torch.Size(shape), pieces)
    return whole


def _in_one_piece(shape: torch.Size, pieces: list[LazyTensor]) -> LazyTensor:
    return LazyTensor(
        shape, pieces[0].dtype, lambda: torch.cat([each.read().reshape(-1) for each in pieces]).view(shape)
    )


# Writing: protocol 4, one array after the other, by the instructions that numpy's own arrays pickle to.

_RECONSTRUCT, _NDARRAY, _DTYPE = 0, 1, 2  # places in the memo
_PIECE = 4 * 2**20


def write(path: Path, tensors: Mapping[str, LazyTensor]) -> None:
    """What paddle.save would write of a state of these tensors; each is read, written and forgotten in turn."""
    with path.open("wb") as file:
        file.write(b"\x80\x04}")
        for at, name in enumerate(("numpy.core.multiarray\n_reconstruct", "numpy\nndarray", "numpy\ndtype")):
            file.write(b"c" + name.encode() + b"\nq" + bytes([at]) + b"0")  # named once, kept in the memo
        for name, stored in tensors.items():
            file.write(_text(name))
            _write_array(file, stored)
            file.write(b"s")
        file.write(_text(NAMES) + b"}")
        for name in tensors:
            file.write(_text(name) + _text(name) + b"s")
        file.write(b"s.")


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Plain numbers and texts, as in meta_state.pdopt."""
    path.write_bytes(pickle.dumps(dict(values), protocol=4))


def _text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def _get(at: int) -> bytes:
    return b"h" + bytes([at])


def _write_array(file: BinaryIO, stored: LazyTensor) -> None:
    code = _CODE_OF[stored.dtype]
    order = "|" if stored.dtype.itemsize == 1 else "<"
    file.write(_get(_RECONSTRUCT) + _get(_NDARRAY) + b"K\x00\x85C\x01b\x87R")  # _reconstruct(ndarray, (0,), b"b")
    file.write(b"(K\x01(" + b"".join(b"J" + struct.pack("<i", n) for n in stored.shape) + b"t")  # (1, shape,
    file.write(_get(_DTYPE) + _text(code) + b"\x89\x88\x87R")  # dtype(code, False, True) with its state
    file.write(b"(K\x03" + _text(order) + b"NNN" + 2 * (b"J" + struct.pack("<i", -1)) + b"K\x00tb")
    file.write(b"\x89\x8e" + struct.pack("<Q", stored.num_bytes))  # not Fortran, bytes)
    flat = stored.read_bytes()
    for start in range(0, len(flat), _PIECE):
        file.write(flat[start : start + _PIECE])
    file.write(b"tb")
