"""How MindRecord packs an array of integers: each in as few bytes as it needs.

u32 big-endian  count, n
(n + 3) // 4 bytes  2 bits for each number, the first in the highest bits: 0, 1, 2, 3 for int8, int16, int32, int64
the numbers, little-endian, each as wide as its 2 bits say
"""

import struct

import numpy as np

COUNT = struct.Struct(">I")
_CODES_OF_BYTE = (np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3).astype(np.uint8)
_WIDTHS_OF_BYTE = (1 << _CODES_OF_BYTE.astype(np.int64)).astype(np.int64)
_KINDS = [np.dtype(f"<i{1 << code}") for code in range(4)]


class Damaged(ValueError):
    """What is wrong with the bytes; the caller knows where they are."""


def pack(numbers: np.ndarray) -> bytes:
    values = np.ascontiguousarray(numbers, "<i8")
    count = len(values)
    codes = np.zeros(count, np.uint8)
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        codes += (values < limits.min) | (values > limits.max)
    fours = np.zeros(-(-count // 4) * 4, np.uint8)
    fours[:count] = codes
    bitmap = fours.reshape(-1, 4) @ np.array([64, 16, 4, 1], np.uint8)
    used = np.arange(8) < (1 << codes.astype(np.int64))[:, None]
    return COUNT.pack(count) + bitmap.tobytes() + values.view(np.uint8).reshape(-1, 8)[used].tobytes()


def count_of(start: bytes, length: int) -> int:
    """How many numbers `length` bytes hold that begin with `start`: checked, as far as that is cheap."""
    (count,) = COUNT.unpack(start)
    least = COUNT.size + -(-count // 4) + count
    if not least <= length <= least + 7 * count:
        raise Damaged(f"{count} numbers, which do not take {length} bytes")
    return count


def unpack(packed: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """`packed`: uint8, all bytes of one array."""
    count = count_of(packed[: COUNT.size].tobytes(), len(packed))
    data_at = COUNT.size + -(-count // 4)
    bitmap, data = packed[COUNT.size : data_at], packed[data_at:]
    ends = _WIDTHS_OF_BYTE[bitmap].ravel()[:count].cumsum()
    needed = int(ends[-1]) if count else 0
    if needed != len(data):
        raise Damaged(f"{count} numbers in {len(data)} bytes, but their widths add up to {needed}")
    codes = _CODES_OF_BYTE[bitmap].ravel()[:count]
    result = np.empty(count, dtype)
    for code, kind in enumerate(_KINDS):
        where = np.flatnonzero(codes == code)
        if not len(where):
            continue
        # At every byte the number that would begin there; those that do are picked out.
        at_every_byte = np.ndarray(len(data) - kind.itemsize + 1, kind, data, strides=(1,))
        values = at_every_byte[ends[where] - kind.itemsize]
        if kind.itemsize > dtype.itemsize:
            wrong = np.flatnonzero(values != values.astype(dtype))
            if len(wrong):
                raise Damaged(f"number {where[wrong[0]]} is {values[wrong[0]]}, which {dtype.name} does not hold")
        result[where] = values
    return result
