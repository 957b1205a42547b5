"""The types of numbers that GGUF files hold: plain ones, and blocks of a few bits with scales of their own.

A block has 32 or 256 values of one row. Every type is read to float32 as ggml's reference computes it, without fused
multiply-adds; two of the block types are written as its reference writes them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16 = 0, 1, 2, 3, 6, 7, 8, 12, 13, 14, 30  # ggml's numbers
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
_AT_ONCE = 2**20  # values that are worked on together: a few MB


@dataclass(frozen=True)
class BlockType:
    """`layout`: the fields of one block in memory. `read`: blocks -> float32 [blocks, length]."""

    name: str
    length: int  # values that a block has; a row is a whole number of blocks
    layout: "np.dtype[Any]"
    read: Callable[[Array], Array]
    write: Callable[[Array], Array] | None = None  # float32 [blocks, length] -> blocks


def dequantised(raw: memoryview, kind: int, shape: torch.Size) -> Tensor:
    """The values of a tensor of a block type."""
    block = BLOCKS[kind]
    blocks = np.frombuffer(raw, dtype=block.layout)
    numbers = np.empty((len(blocks), block.length), dtype=np.float32)
    step = _AT_ONCE // block.length
    with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale may be no number: the model says so
        for start in range(0, len(blocks), step):
            numbers[start : start + step] = block.read(blocks[start : start + step])
    return torch.from_numpy(numbers).view(shape)


def quantised(tensor: Tensor, kind: int) -> Array:
    """The blocks of a tensor whose rows are whole numbers of them."""
    block = BLOCKS[kind]
    assert block.write is not None, f"{block.name} is only read"
    rows = tensor.detach().reshape(-1, block.length)
    encoded = np.empty(len(rows), dtype=block.layout)
    step = _AT_ONCE // block.length
    for start in range(0, len(rows), step):
        encoded[start : start + step] = block.write(rows[start : start + step].float().numpy())
    return encoded


# 32 values with one scale


def _scale(blocks: Array, field: str = "scale") -> Array:
    return blocks[field].astype(np.float32)[:, None]


def _nibbles(packed: Array) -> Array:
    """All low halves of the bytes, then all high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: Array) -> Array:
    """The fifth bit of each of 32 values, shifted to where it stands in the value."""
    return (packed[:, None] >> np.arange(32, dtype=np.uint32) & 1).astype(np.uint8) << 4


def _read_q4_0(blocks: Array) -> Array:
    return _scale(blocks) * (_nibbles(blocks["values"]).astype(np.float32) - 8)


def _read_q4_1(blocks: Array) -> Array:
    return _scale(blocks) * _nibbles(blocks["values"]).astype(np.float32) + _scale(blocks, "smallest")


def _read_q5_0(blocks: Array) -> Array:
    values = _nibbles(blocks["values"]) | _fifth_bits(blocks["fifth"])
    return _scale(blocks) * (values.astype(np.float32) - 16)


def _read_q5_1(blocks: Array) -> Array:
    values = _nibbles(blocks["values"]) | _fifth_bits(blocks["fifth"])
    return _scale(blocks) * values.astype(np.float32) + _scale(blocks, "smallest")


def _read_q8_0(blocks: Array) -> Array:
    return _scale(blocks) * blocks["values"].astype(np.float32)


def _inverse(scale: Array) -> Array:
    """1 / scale; 0 where all values are zero, or so small that the inverse is no number."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    inverse[np.isinf(inverse)] = 0
    return inverse


def _write_q8_0(values: Array) -> Array:
    """The scale that computes is fp32, the one that is kept fp16; halves away from zero."""
    encoded = np.empty(len(values), dtype=BLOCKS[Q8_0].layout)
    scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    with np.errstate(over="ignore"):
        encoded["scale"] = scale[:, 0]
    scaled = values * _inverse(scale)
    size = np.abs(scaled)
    whole = np.floor(size)
    encoded["values"] = np.copysign(whole + (size - whole >= 0.5), scaled)
    return encoded


def _write_q4_0(values: Array) -> Array:
    """The value that is farthest from zero, of equal ones the first, becomes -8."""
    encoded = np.empty(len(values), dtype=BLOCKS[Q4_0].layout)
    farthest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    scale = farthest / np.float32(-8)
    with np.errstate(over="ignore"):
        encoded["scale"] = scale[:, 0]
    steps = np.minimum(values * _inverse(scale) + np.float32(8.5), 15).astype(np.uint8)
    encoded["values"] = steps[:, :16] | steps[:, 16:] << 4
    return encoded


# 256 values: a scale for all, and smaller ones for each 32 or 16


def _six_bits(packed: Array) -> tuple[Array, Array]:
    """Eight scales and eight offsets of 6 bits in 12 bytes: the upper bits of the last four lie above the first."""
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _with_offsets(blocks: Array, values: Array) -> Array:
    """`values` [blocks, 8, 32], each 32 with the scale and offset of their own."""
    scales, offsets = _six_bits(blocks["scales"])
    scaled = (_scale(blocks) * scales)[:, :, None] * values.astype(np.float32)
    return (scaled - (_scale(blocks, "offset") * offsets)[:, :, None]).reshape(-1, 256)


def _halves(packed: Array) -> Array:
    """[blocks, 128] -> [blocks, 8, 32]: of each 32 bytes the low halves, then the high halves."""
    return _nibbles(packed.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _read_q4_k(blocks: Array) -> Array:
    return _with_offsets(blocks, _halves(blocks["values"]))


def _read_q5_k(blocks: Array) -> Array:
    bits = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks["fifth"][:, None, :] >> bits & 1) << 4
    return _with_offsets(blocks, _halves(blocks["values"]) | fifth)


def _read_q6_k(blocks: Array) -> Array:
    low = _nibbles(blocks["low"].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks["high"].reshape(-1, 2, 1, 32) >> places & 3
    values = (low | high << 4).astype(np.float32) - 32
    scales = _scale(blocks) * blocks["scales"].astype(np.float32)
    return (values.reshape(-1, 16, 16) * scales[:, :, None]).reshape(-1, 256)


_SCALE, _SMALLEST, _FIFTH = ("scale", "<f2"), ("smallest", "<f2"), ("fifth", "<u4")
_HALF_BYTES = ("values", "u1", 16)
_SUPER = [_SCALE, ("offset", "<f2"), ("scales", "u1", 12)]
BLOCKS = {
    Q4_0: BlockType("q4_0", 32, np.dtype([_SCALE, _HALF_BYTES]), _read_q4_0, _write_q4_0),
    Q4_1: BlockType("q4_1", 32, np.dtype([_SCALE, _SMALLEST, _HALF_BYTES]), _read_q4_1),
    Q5_0: BlockType("q5_0", 32, np.dtype([_SCALE, _FIFTH, _HALF_BYTES]), _read_q5_0),
    Q5_1: BlockType("q5_1", 32, np.dtype([_SCALE, _SMALLEST, _FIFTH, _HALF_BYTES]), _read_q5_1),
    Q8_0: BlockType("q8_0", 32, np.dtype([_SCALE, ("values", "i1", 32)]), _read_q8_0, _write_q8_0),
    Q4_K: BlockType("q4_k", 256, np.dtype([*_SUPER, ("values", "u1", 128)]), _read_q4_k),
    Q5_K: BlockType("q5_k", 256, np.dtype([*_SUPER, ("fifth", "u1", 32), ("values", "u1", 128)]), _read_q5_k),
    Q6_K: BlockType(
        "q6_k", 256, np.dtype([("low", "u1", 128), ("high", "u1", 64), ("scales", "i1", 16), _SCALE]), _read_q6_k
    ),
}
NAMES = {F32: "f32", F16: "f16", BF16: "bf16"} | {kind: block.name for kind, block in BLOCKS.items()}
