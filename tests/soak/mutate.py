"""Damage to bytes, of the kinds that disks, copies, editors and attackers do."""

import random
import struct

_NUMBERS = [0, 1, 0x7F, 0x80, 0xFF, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1]
_WORDS = [
    b"\0",
    b"\xff\xff\xff\xff",
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"[" * 3000,
    b'{"a":' * 2000,
    b"&a [*a]",
    b"*a",
    b"<<: *a",
    b"!!python/object/apply:os.system",
    b"\xed\xa0\x80",
    b"\\ud800",
    b"\t",
    b"\r",
    b"../../etc/passwd",
    b"'",
    b'"',
    b"%s%n",
    b"cos\nsystem\n",
    b"\x80\x02",
    b"\xf0\x9f\x98\x80",
    b"9" * 5000,
    b"\x1f\x8b",
    b"PK\x03\x04",
    b":",
    b"- ",
    b"\n\n",
]


def mutated(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """`data` with one to four pieces of damage; some of them put in pieces of `other`."""
    for _ in range(chance.choice([1, 1, 1, 2, 4])):
        data = chance.choice(_KINDS)(data, other, chance)
    return data


def _place(data: bytes, chance: random.Random) -> int:
    """Near the ends more often: that is where headers, counts and indexes are."""
    if not data:
        return 0
    kind = chance.random()
    near = min(len(data), 512)
    if kind < 0.4:
        return chance.randrange(near)
    return len(data) - 1 - chance.randrange(near) if kind < 0.6 else chance.randrange(len(data))


def _flip(data: bytes, other: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.choice([1, 1, 3, 20]) if data else 0):
        changed[_place(data, chance)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def _number(data: bytes, other: bytes, chance: random.Random) -> bytes:
    number, layout = chance.choice(_NUMBERS), chance.choice(["<B", "<H", "<I", "<Q", ">I", ">Q"])
    piece = struct.pack(layout, number & (256 ** struct.calcsize(layout) - 1))
    at = _place(data, chance)
    return data[:at] + piece + data[at + len(piece) :]


def _cut(data: bytes, other: bytes, chance: random.Random) -> bytes:
    return data[: _place(data, chance)]


def _remove(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    return data[:at] + data[at + chance.choice([1, 2, 8, 100, 4096]) :]


def _repeat(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    piece = data[at : at + chance.choice([1, 8, 100, 2000])]
    return data[:at] + piece * chance.choice([1, 2, 50]) + data[at:]


def _zero(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at, size = _place(data, chance), chance.choice([4, 64, 512, 4096])
    return data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]


def _insert(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at = _place(data, chance)
    return data[:at] + chance.choice(_WORDS) + data[at:]


def _splice(data: bytes, other: bytes, chance: random.Random) -> bytes:
    at, there = _place(data, chance), _place(other, chance)
    return data[:at] + other[there : there + chance.choice([16, 512, 1 << 20])] + data[at + 16 :]


def _digits(data: bytes, other: bytes, chance: random.Random) -> bytes:
    """Another number where a text has one."""
    places = [at for at, byte in enumerate(data[:20000]) if 48 <= byte < 58]
    if not places:
        return _flip(data, other, chance)
    at = chance.choice(places)
    return data[:at] + str(chance.choice([*_NUMBERS, -1, 10**30])).encode() + data[at + 1 :]


_KINDS = [_flip, _flip, _number, _number, _cut, _remove, _repeat, _zero, _insert, _insert, _splice, _digits]
