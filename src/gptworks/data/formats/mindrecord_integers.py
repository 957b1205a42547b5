"""How MindRecord packs an array of integers: each in as few bytes as it needs.

u32 big-endian  count, n
(n + 3) // 4 bytes  2 bits for each number, the first in the highest bits: 0, 1, 2, 3 for int8, int16, int32, int64
the numbers, little-endian, each as wide as its 2 bits say
"""

import struct

import numpy as np

COUNT = struct.Struct(">I")
# Of the four numbers that one byte of the map describes.
_WIDTHS = (1 << (np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3)).astype(np.int64)


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


def count_of(data: memoryview, start: int, end: int) -> int:
    """How many numbers these bytes hold: checked, as far as that is cheap."""
    length = end - start
    if length < COUNT.size:
        raise Damaged(f"{length} bytes, but the count alone takes {COUNT.size}")
    count: int = COUNT.unpack_from(data, start)[0]
    least = COUNT.size + -(-count // 4) + count
    if not least <= length <= least + 7 * count:
        raise Damaged(f"{count} numbers, which do not take {length} bytes")
    return count


def unpack(data: np.ndarray, start: int, end: int, dtype: np.dtype) -> np.ndarray:
    """The numbers in these bytes of `data` (uint8), before which there are at least 8 others."""
    count = count_of(data.data, start, end)
    begin = start + COUNT.size + -(-count // 4)
    widths = _WIDTHS[data[start + COUNT.size : begin]].ravel()[:count]
    ends = widths.cumsum()
    needed = int(ends[-1]) if count else 0
    if needed != end - begin:
        raise Damaged(f"{count} numbers in {end - begin} bytes, but their widths add up to {needed}")
    # The 8 bytes before every byte, as one number each. In those that end where one of ours ends, ours is the upper
    # part; shifting it down spreads its sign.
    before_each_byte = np.ndarray(end - begin + 1, "<i8", data, begin - 8, (1,))
    values = before_each_byte[ends] >> (64 - 8 * widths)
    narrow: np.ndarray = values.astype(dtype)
    if dtype.itemsize < 8 and (narrow != values).any():
        wrong = int(np.flatnonzero(narrow != values)[0])
        raise Damaged(f"number {wrong} is {values[wrong]}, which {dtype.name} does not hold")
    return narrow
