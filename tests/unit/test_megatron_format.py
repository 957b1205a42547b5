"""The bytes of .bin/.idx: read and written exactly, and never believed when they are damaged."""

import io
import struct
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gptworks.data.formats import megatron
from gptworks.errors import DataError

HEADER_SIZE = 34
DTYPES = [np.uint8, np.int8, np.int16, np.int32, np.int64, np.uint16]

# Documents of one to three sequences of up to six tokens, every sequence possibly empty.
documents_of_sequences = st.lists(
    st.lists(st.lists(st.integers(0, 127), max_size=6), min_size=1, max_size=3), min_size=0, max_size=8
)


def index_of(documents: list[list[list[int]]], dtype: type = np.uint16) -> megatron.Index:
    sizes = [len(sequence) for document in documents for sequence in document]
    borders = np.cumsum([0, *(len(document) for document in documents)])
    return megatron.Index(np.dtype(dtype), np.array(sizes, np.int32), borders.astype(np.int64))


def idx_bytes(index: megatron.Index) -> bytes:
    file = io.BytesIO()
    megatron.write_index(file, index)
    return file.getvalue()


def write_pair(folder: Path, idx: bytes, bin_: bytes) -> Path:
    (folder / "s.idx").write_bytes(idx)
    (folder / "s.bin").write_bytes(bin_)
    return folder / "s"


# Three documents of 2, 1 and 2 sequences.
SMALL = [[[1, 2, 3], [4]], [[5, 6, 7, 8]], [[9], [10, 11]]]
SMALL_TOKENS = np.arange(1, 12, dtype=np.uint16).tobytes()


def test_bytes_of_a_small_index() -> None:
    """Written out by hand from the format's description."""
    expected = (
        b"MMIDIDX\x00\x00"
        + (1).to_bytes(8, "little")
        + b"\x08"
        + (5).to_bytes(8, "little")
        + (4).to_bytes(8, "little")
        + b"".join(size.to_bytes(4, "little") for size in (3, 1, 4, 1, 2))
        + b"".join(offset.to_bytes(8, "little") for offset in (0, 6, 8, 16, 18))
        + b"".join(border.to_bytes(8, "little") for border in (0, 2, 3, 5))
    )
    assert idx_bytes(index_of(SMALL)) == expected
    assert len(expected) == HEADER_SIZE + 5 * 12 + 4 * 8


@given(documents_of_sequences, st.sampled_from(DTYPES))
def test_what_is_written_is_read_back(documents: list[list[list[int]]], dtype: type) -> None:
    index = index_of(documents, dtype)
    tokens = np.array([t for document in documents for sequence in document for t in sequence], dtype=dtype)
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pair(Path(folder), idx_bytes(index), tokens.tobytes())
        found = megatron.read_index(prefix)
        mapped = megatron.map_tokens(prefix, found)
        assert (found.dtype, found.num_tokens) == (np.dtype(dtype), len(tokens))
        assert found.sizes.tolist() == index.sizes.tolist()
        assert found.documents.tolist() == index.documents.tolist()
        assert mapped.tolist() == tokens.tolist() and mapped.dtype == dtype


def test_dtype_follows_megatrons_rule() -> None:
    assert megatron.dtype_for(65499) == np.uint16
    assert megatron.dtype_for(65500) == np.int32


def test_a_prefix_may_have_dots(tmp_path: Path) -> None:
    for suffix, data in ((".idx", idx_bytes(index_of(SMALL))), (".bin", SMALL_TOKENS)):
        (tmp_path / f"v1.5{suffix}").write_bytes(data)
    assert megatron.read_index(tmp_path / "v1.5").num_tokens == 11


def test_files_with_a_modes_array_are_read(tmp_path: Path) -> None:
    index = megatron.read_index(write_pair(tmp_path, idx_bytes(index_of(SMALL)) + bytes(5), SMALL_TOKENS))
    assert index.documents.tolist() == [0, 2, 3, 5]


def test_a_pair_written_by_megatron(shared_data: Path) -> None:
    prefix = shared_data / "fixtures" / "megatron-mmididx" / "meg-gpt2-openwebtext_text_document"
    index = megatron.read_index(prefix)
    tokens = megatron.map_tokens(prefix, index)
    assert (len(index.documents) - 1, index.dtype) == (1000, np.uint16)
    assert int(tokens.max()) < 5000
    raw = prefix.with_suffix(".idx").read_bytes()
    assert idx_bytes(index) == raw


# Damage. `refused` means DataError that names the file: no other exception, no guess, no large allocation.


def refused(prefix: Path, expected: str) -> str:
    with pytest.raises(DataError) as caught:
        megatron.map_tokens(prefix, megatron.read_index(prefix))
    message = str(caught.value)
    assert str(prefix) in message
    assert expected in message
    return message


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_half_of_a_pair(missing: str, tmp_path: Path) -> None:
    prefix = write_pair(tmp_path, idx_bytes(index_of(SMALL)), SMALL_TOKENS)
    prefix.with_suffix(missing).unlink()
    refused(prefix, f"s{missing}: no such file. Needed: the pair")


def test_every_truncation_of_the_index_is_refused(tmp_path: Path) -> None:
    whole = idx_bytes(index_of(SMALL))
    for length in range(len(whole)):
        refused(write_pair(tmp_path, whole[:length], SMALL_TOKENS), f"s.idx: {length} bytes, but ")
    for more in (1, 4, 6, 8):  # five more would be a modes array
        refused(write_pair(tmp_path, whole + bytes(more), SMALL_TOKENS), f"s.idx: {len(whole) + more} bytes, but ")


def test_every_other_size_of_the_tokens_is_refused(tmp_path: Path) -> None:
    idx = idx_bytes(index_of(SMALL))
    for length in [*range(len(SMALL_TOKENS)), len(SMALL_TOKENS) + 1, len(SMALL_TOKENS) + 2]:
        prefix = write_pair(tmp_path, idx, (SMALL_TOKENS * 2)[:length])
        refused(prefix, f"s.bin: {length} bytes, but s.idx describes 22")


@pytest.mark.parametrize(
    ("documents", "dtype"),
    [
        (SMALL, np.uint16),
        (SMALL, np.int32),
        (SMALL, np.uint8),
        ([[[7]]] * 8, np.uint16),  # lengths at which one wrong count looks like a modes array
        ([[[7]]] * 13, np.uint16),
    ],
    ids=["uint16", "int32", "uint8", "eight", "thirteen"],
)
def test_every_flipped_bit_of_the_index_is_refused(documents, dtype: type, tmp_path: Path) -> None:
    """All of them: header, sizes, offsets. A document border may move to another that is possible in itself."""
    index = index_of(documents, dtype)
    whole = idx_bytes(index)
    prefix = write_pair(tmp_path, whole, np.zeros(index.num_tokens, dtype).tobytes())
    borders_at = HEADER_SIZE + 12 * len(index.sizes)
    accepted = 0
    with prefix.with_suffix(".idx").open("r+b", buffering=0) as file:
        for bit in range(8 * len(whole)):
            place = bit // 8
            file.seek(place)
            file.write(bytes([whole[place] ^ 1 << bit % 8]))
            try:
                found = megatron.read_index(prefix)
            except DataError as error:
                assert str(prefix) in str(error)
            else:
                accepted += 1
                assert place >= borders_at, f"bit {bit} of the header, the sizes or the offsets was believed"
                assert found.documents[0] == 0 and found.documents[-1] == len(found.sizes)
                assert (np.diff(found.documents) >= 0).all()
            file.seek(place)
            file.write(whole[place : place + 1])
    assert accepted < 3 * len(index.documents)
    assert prefix.with_suffix(".idx").read_bytes() == whole


@hypothesis_settings(max_examples=3 * hypothesis_settings().max_examples)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=160).map(lambda data: b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, 8) + data)
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pair(Path(folder), data, SMALL_TOKENS)
        try:
            index = megatron.read_index(prefix)
        except DataError:
            return
        assert index.num_tokens * index.dtype.itemsize == len(SMALL_TOKENS)


@hypothesis_settings(max_examples=3 * hypothesis_settings().max_examples)
@given(st.lists(st.tuples(st.integers(0, 125), st.integers(0, 255)), min_size=1, max_size=4))
def test_several_wrong_bytes(changes: list[tuple[int, int]]) -> None:
    whole = idx_bytes(index_of(SMALL))
    damaged = bytearray(whole)
    for place, value in changes:
        damaged[place] = value
    with tempfile.TemporaryDirectory() as folder:
        prefix = write_pair(Path(folder), bytes(damaged), SMALL_TOKENS)
        try:
            index = megatron.read_index(prefix)
        except DataError:
            return
        # What is believed describes exactly the tokens that are there.
        assert index.sizes.sum() * index.dtype.itemsize == len(SMALL_TOKENS)
        assert (index.sizes >= 0).all() and index.documents[-1] == len(index.sizes)


@pytest.mark.parametrize("field", [0, 1])
@pytest.mark.parametrize("count", [2**31, 2**60, 2**61, 2**63, 2**64 - 1])
def test_absurd_counts_are_refused_before_anything_is_allocated(field: int, count: int, tmp_path: Path) -> None:
    counts = [5, 4]
    counts[field] = count
    whole = bytearray(idx_bytes(index_of(SMALL)))
    whole[18:34] = struct.pack("<QQ", *counts)
    prefix = write_pair(tmp_path, bytes(whole), SMALL_TOKENS)
    tracemalloc.start()
    try:
        refused(prefix, str(count))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def pack(*, magic=b"MMIDIDX\0\0", version=1, code=8, sizes=(3, 1), offsets=(0, 6), borders=(0, 1, 2)) -> bytes:
    header = struct.pack("<9sQBQQ", magic, version, code, len(sizes), len(borders))
    numbers = struct.pack(f"<{len(sizes)}i{len(offsets)}q{len(borders)}q", *sizes, *offsets, *borders)
    return header + numbers


def test_pack_makes_a_good_index(tmp_path: Path) -> None:
    assert megatron.read_index(write_pair(tmp_path, pack(), bytes(8))).sizes.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "begins with b'TNTIDX\\x00\\x00\\x00', needed b'MMIDIDX"),
        ({"version": 2}, "version 2, needed 1"),
        ({"code": 0}, "dtype code 0, needed one of [1, 2, 3, 4, 5, 8]"),
        ({"code": 6}, "dtype code 6"),
        ({"code": 7}, "dtype code 7"),
        ({"code": 255}, "dtype code 255"),
        ({"code": 4}, "sequence 1 begins at byte 6, not where sequence 0 ends"),
        ({"sizes": (-1, 5)}, "sequence 0 has -1 tokens"),
        ({"sizes": (4, 0)}, "sequence 1 begins at byte 6"),
        ({"sizes": (3, 2)}, "8 bytes, but s.idx describes 10"),
        ({"offsets": (2, 8)}, "sequence 0 begins at byte 2"),
        ({"offsets": (0, -6)}, "sequence 1 begins at byte -6"),
        ({"borders": (0, 1)}, "does not run from 0 to 2 in rising order"),
        ({"borders": (1, 2)}, "does not run from 0 to 2"),
        ({"borders": (0, 2, 1, 2)}, "does not run from 0 to 2"),
        ({"borders": (0, -1, 2)}, "does not run from 0 to 2"),
        ({"borders": (0, 1, 3)}, "does not run from 0 to 2"),
        ({"borders": ()}, "does not run from 0 to 2"),
    ],
)
def test_an_index_that_contradicts_itself(wrong: dict, expected: str, tmp_path: Path) -> None:
    refused(write_pair(tmp_path, pack(**wrong), bytes(8)), expected)


def test_sizes_that_overflow_32_bits_together(tmp_path: Path) -> None:
    """Four sequences of 2**30 tokens sum to 0 in 32 bits; the file has none of them."""
    sizes, offsets = (2**30,) * 4, tuple(2**31 * i for i in range(4))
    idx = pack(sizes=sizes, offsets=offsets, borders=(0, 4))
    refused(write_pair(tmp_path, idx, b""), f"0 bytes, but s.idx describes {2**33}")
