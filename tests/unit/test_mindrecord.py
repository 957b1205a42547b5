"""The bytes of MindRecord: read and written exactly, and never believed when they are damaged."""

import itertools
import json
import sqlite3
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gptworks.data.formats import mindrecord, mindrecord_integers, mindrecord_writer, registry
from gptworks.data.formats.contents import Contents
from gptworks.errors import DataError

HEADER_SIZE, PAGE_SIZE = 16384, 32768
int64s = st.one_of(st.integers(-200, 200), st.integers(-70000, 70000), st.integers(-(2**63), 2**63 - 1))


def contents_of(rows: list[list[int]], dtype: type = np.int64) -> Contents:
    tokens = np.array([token for row in rows for token in row], dtype)
    return Contents(tokens, np.array([len(row) for row in rows], np.int64), np.arange(len(rows) + 1))


def rows_of(contents: Contents) -> list[list[int]]:
    ends = np.cumsum(contents.sizes)
    return [contents.tokens[end - size : end].tolist() for size, end in zip(contents.sizes, ends, strict=True)]


def unpack(packed: bytes, dtype: type = np.int64) -> list[int]:
    data = np.frombuffer(b"\xff" * 8 + packed, np.uint8)  # what stands before must not matter
    return mindrecord_integers.unpack(data, 8, len(data), np.dtype(dtype)).tolist()


def file_of(
    folder: Path,
    rows: list[bytes],
    *,
    change: Callable[[dict], object] = lambda header: None,
    fields: dict[str, object] | None = None,
) -> Path:
    """A file put together from the description: the bytes of each row, and the header changed at will."""
    fields = fields or {"input_ids": {"shape": [-1], "type": "int64"}}
    page = b"".join(struct.pack("<Q", len(row)) + row for row in rows)
    header = {
        "header_size": HEADER_SIZE,
        "page": [
            {"page_id": 0, "page_size": len(page), "page_type": "BLOB_DATA", "start_row_id": 0, "end_row_id": len(rows)}
        ],
        "page_size": PAGE_SIZE,
        "schema": [{"blob_fields": sorted(fields), "desc": "", "schema": fields}],
        "version": "3.0",
    }
    header = change(header) or header
    text = json.dumps(header).encode()
    file = folder / "x.mindrecord"
    file.write_bytes((struct.pack("<Q", len(text)) + text).ljust(HEADER_SIZE, b"\0") + page)
    return file


# Packed integers


def test_packed_integers_by_hand() -> None:
    """Written out from the description: widths 1, 2, 4, 8, then 1."""
    expected = (
        b"\x00\x00\x00\x05"
        + bytes([0b00_01_10_11, 0b00_00_00_00])
        + b"\xff"
        + b"\x00\x01"
        + b"\x40\x9c\x00\x00"
        + b"\x00\x00\x00\x00\x00\x01\x00\x00"
        + b"\x07"
    )
    numbers = [-1, 256, 40000, 2**40, 7]
    assert mindrecord_integers.pack(np.array(numbers)) == expected
    assert unpack(expected) == numbers


@given(st.lists(int64s, max_size=40))
def test_integers_are_packed_and_unpacked(numbers: list[int]) -> None:
    packed = mindrecord_integers.pack(np.array(numbers, np.int64))
    assert unpack(packed) == numbers
    widths = [next(w for w in (1, 2, 4, 8) if -(2 ** (8 * w - 1)) <= n < 2 ** (8 * w - 1)) for n in numbers]
    assert len(packed) == 4 + (len(numbers) + 3) // 4 + sum(widths)


def test_a_number_too_wide_for_its_field_is_not_cut_off(tmp_path: Path) -> None:
    rows = [mindrecord_integers.pack(np.array(row)) for row in ([1], [5, 2**31])]
    file = file_of(tmp_path, rows, fields={"input_ids": {"shape": [-1], "type": "int32"}})
    contents = mindrecord.read(file)
    assert contents.tokens[:1].tolist() == [1]
    with pytest.raises(DataError, match=r"x\.mindrecord: row 1, field input_ids: number 1 is 2147483648, which int32"):
        contents.tokens[:]


# Writing


def test_bytes_of_one_row(tmp_path: Path) -> None:
    """Written out by hand from the format's description."""
    file, index = mindrecord.write(tmp_path / "v1.5", contents_of([[7, 300]]), None)
    assert (file.name, index.name) == ("v1.5.mindrecord", "v1.5.mindrecord.db")
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert data[8 + length : HEADER_SIZE] == bytes(HEADER_SIZE - 8 - length)
    ids = b"\x00\x00\x00\x02" + b"\x10" + b"\x07" + b"\x2c\x01"
    ones = b"\x00\x00\x00\x02" + b"\x00" + b"\x01" + b"\x01"
    row = b"".join(len(each).to_bytes(8, "big") + each for each in (ones, ids, ids))
    blob = len(row).to_bytes(8, "little") + row
    raw = (5).to_bytes(8, "little") + b"\x81\xa2id\x00"
    assert data[HEADER_SIZE:] == blob.ljust(PAGE_SIZE, b"\0") + raw
    group = {"row_group_ids": [{"id": 0, "offset": 0}], "page_type_id": 0, "shard_id": 0, "start_row_id": 0}
    int64 = {"shape": [-1], "type": "int64"}
    assert header == {
        "header_size": HEADER_SIZE,
        "index_fields": None,
        "page": [
            {"end_row_id": 1, "page_id": 0, "page_size": len(blob), "page_type": "BLOB_DATA", **group},
            {"end_row_id": 0, "page_id": 1, "page_size": len(raw), "page_type": "RAW_DATA", **group},
        ],
        "page_size": PAGE_SIZE,
        "compression_size": 3 * 16 - len(ones) - 2 * len(ids),
        "schema": [
            {
                "blob_fields": ["attention_mask", "input_ids", "labels"],
                "desc": "lm-schema",
                "schema": {"attention_mask": int64, "input_ids": int64, "labels": int64},
            }
        ],
        "shard_addresses": ["v1.5.mindrecord"],
        "shard_id": 0,
        "statistics": None,
        "version": "3.0",
    }
    with closing(sqlite3.connect(index)) as database:
        assert database.execute("SELECT * FROM INDEXES").fetchall() == [(0, 1, 0, 13, 0, 0, 0, len(blob))]
        assert database.execute("SELECT NAME FROM SHARD_NAME").fetchall() == [("v1.5.mindrecord",)]


@given(st.lists(st.lists(int64s, min_size=1, max_size=9), max_size=9))
def test_what_is_written_is_read_back(rows: list[list[int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, _ = mindrecord.write(Path(folder) / "s", contents_of(rows), None)
        contents = mindrecord.read(file)
        assert rows_of(contents) == rows
        assert contents.documents.tolist() == list(range(len(rows) + 1))
        assert contents.is_rows


def test_rows_of_many_pages_and_what_the_index_says_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindrecord_writer, "USUAL_PAGE", PAGE_SIZE)
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50257, size).tolist() for size in [*rng.integers(1, 900, 60), *[1] * 5000]]
    file, index = mindrecord.write(tmp_path / "s", contents_of(rows, np.uint16), None)
    contents = mindrecord.read(file)
    assert len(mindrecord.read_header(file).pages) > 8
    assert rows_of(contents) == rows
    # The index names the same bytes as the pages, and raw rows that are there.
    data = file.read_bytes()
    pages_at = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["header_size"]
    with closing(sqlite3.connect(index)) as database:
        found = database.execute("SELECT * FROM INDEXES ORDER BY ROW_ID").fetchall()
    assert [row[0] for row in found] == list(range(len(rows)))
    assert len({row[1] for row in found}) > 1, "one raw page is too few for this test"
    for _, raw_page, raw, raw_end, group, page, start, end in found:
        assert group == page
        at = pages_at + PAGE_SIZE * page + start
        assert struct.unpack_from("<Q", data, at) == (end - start - 8,)
        at = pages_at + PAGE_SIZE * raw_page
        assert data[at + raw : at + raw_end] == mindrecord_writer.NO_SCALARS


def test_tokens_are_read_a_block_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gptworks.data.formats import contents as contents_module

    monkeypatch.setattr(contents_module, "_BLOCK_TOKENS", 4)
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12], [13], [14, 15], [16]]
    file, _ = mindrecord.write(tmp_path / "s", contents_of(rows), None)
    assert rows_of(mindrecord.read(file)) == rows


def test_a_large_row_gets_a_large_page(tmp_path: Path) -> None:
    rows = [[1], list(range(40000, 60000)), [2]]
    file, _ = mindrecord.write(tmp_path / "s", contents_of(rows, np.uint16), None)
    assert rows_of(mindrecord.read(file)) == rows


def test_a_sequence_that_no_page_holds_is_refused(tmp_path: Path) -> None:
    sizes = np.array([5, 20_000_000])
    tokens = np.broadcast_to(np.int64(1), int(sizes.sum()))
    with pytest.raises(DataError, match=r"sequence 1 has 20000000 tokens.*at most 268435456. Cut the tokens into rows"):
        mindrecord.write(tmp_path / "s", Contents(tokens, sizes, np.arange(3)), None)


def test_a_sequence_without_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sequence 1 has no tokens"):
        mindrecord.write(tmp_path / "s", contents_of([[1], [], [2]]), None)


def test_ids_that_no_int64_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"token 1 is id {2**63}, which int64 does not hold"):
        mindrecord.write(tmp_path / "s", contents_of([[1, 2**63]], np.uint64), None)


def test_an_index_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(path: Path) -> None:
        raise sqlite3.OperationalError("disk is full")

    monkeypatch.setattr(mindrecord_writer.sqlite3, "connect", connect)
    with pytest.raises(DataError, match=r"s\.mindrecord\.db: cannot be written \(disk is full\)"):
        mindrecord.write(tmp_path / "s", contents_of([[1]]), None)


# Finding


def test_found_by_prefix_and_file_but_not_by_its_index(tmp_path: Path) -> None:
    file, index = mindrecord.write(tmp_path / "s", contents_of([[1]]), None)
    assert mindrecord.find(tmp_path / "s") == mindrecord.find(file) == file
    assert mindrecord.find(index) is None
    assert mindrecord.files(file) == [file, index]
    assert mindrecord.sidecar(file) == tmp_path / "s.mindrecord.json"
    index.unlink()
    assert mindrecord.files(file) == [file]
    for name, found in [("s.mindrecord12", True), ("s.mindrecordx", False), ("s.bin", False)]:
        copy = tmp_path / name
        copy.write_bytes(file.read_bytes())
        assert (mindrecord.find(copy) == copy) is found
        copy.unlink()
    assert [each.main for each in registry.locate_all(tmp_path)] == [file]


@pytest.mark.parametrize("start", [b"", b"{", b"12345678", b"12345678[", b"\x1f\x8b compressed"])
def test_other_files_of_that_name_are_not_found(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "s.mindrecord").write_bytes(start)
    assert mindrecord.find(tmp_path / "s") is None
    assert mindrecord.find(tmp_path / "missing") is None


# Reading


@given(st.lists(st.integers(0, 3), max_size=5))
def test_any_slice_is_right_and_unpacks_only_the_rows_it_touches(sizes: list[int]) -> None:
    """Rows without tokens too: others write them."""
    owners = [row for row, size in enumerate(sizes) for _ in range(size)]
    flat = [1000 * number for number in range(len(owners))]
    rows = [[token for token, owner in zip(flat, owners, strict=True) if owner == row] for row in range(len(sizes))]
    with tempfile.TemporaryDirectory() as folder:
        file = file_of(Path(folder), [mindrecord_integers.pack(np.array(row, np.int64)) for row in rows])
        contents = mindrecord.read(file)
        assert contents.sizes.tolist() == sizes
        assert len(contents.tokens) == len(flat)
        touched: list[int] = []
        unpack_row = contents.tokens._row
        contents.tokens._row = lambda row: touched.append(row) or unpack_row(row)
        bounds = [None, *range(-len(flat) - 1, len(flat) + 2)]
        for where in itertools.starmap(slice, itertools.product(bounds, bounds)):
            touched.clear()
            assert contents.tokens[where].tolist() == flat[where]
            assert {row for row in touched if rows[row]} == set(owners[where])


def test_a_step_is_refused(tmp_path: Path) -> None:
    file, _ = mindrecord.write(tmp_path / "s", contents_of([[1, 2]]), None)
    with pytest.raises(ValueError, match="step 2"):
        mindrecord.read(file).tokens[::2]


ROW = mindrecord_integers.pack(np.array([1, 300, 3]))  # 4 + 1 + 1 + 2 + 1 bytes


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"\0\0\0", "row 1, field input_ids: 3 bytes, but the count alone takes 4"),
        (b"\xff\xff\xff\xff" + ROW[4:], "4294967295 numbers, which do not take 9 bytes"),
        (b"\0\0\0\1" + ROW[4:] + bytes(9), "1 numbers, which do not take 18 bytes"),
    ],
)
def test_a_damaged_row_is_refused_at_once(tmp_path: Path, row: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mindrecord.read(file_of(tmp_path, [ROW, row]))


def test_widths_that_do_not_add_up_are_refused_when_read(tmp_path: Path) -> None:
    row = ROW[:4] + b"\x00" + ROW[5:]
    contents = mindrecord.read(file_of(tmp_path, [ROW, row]))
    assert contents.tokens[:3].tolist() == [1, 300, 3]
    with pytest.raises(DataError, match="row 1, field input_ids: 3 numbers in 4 bytes, but their widths add up to 3"):
        contents.tokens[3:4]


TWO = {"a": {"type": "bytes"}, "input_ids": {"shape": [-1], "type": "int64"}}


def test_several_fields(tmp_path: Path) -> None:
    row = struct.pack(">Q", 2) + b"ab" + struct.pack(">Q", len(ROW)) + ROW
    assert rows_of(mindrecord.read(file_of(tmp_path, [row, row], fields=TWO))) == [[1, 300, 3]] * 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (struct.pack(">Q", 2) + b"ab" + struct.pack(">Q", len(ROW)) + ROW + b"x", "its fields leave 1 bytes over"),
        (struct.pack(">Q", 2) + b"ab" + struct.pack(">Q", len(ROW) + 1) + ROW, "10 bytes at byte .*row ends at"),
        (struct.pack(">Q", 2) + b"ab", "past the end of its page or row"),
        (struct.pack(">Q", 2**64 - 1) + b"ab", "18446744073709551615 bytes at byte"),
    ],
)
def test_fields_that_do_not_fill_their_row_are_refused(tmp_path: Path, row: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        mindrecord.read(file_of(tmp_path, [row], fields=TWO))


def with_page(**changes: object) -> Callable[[dict], None]:
    return lambda header: header["page"][0].update(changes)


def with_field(**changes: object) -> Callable[[dict], None]:
    return lambda header: header["schema"][0]["schema"]["input_ids"].update(changes)


def with_(**changes: object) -> Callable[[dict], None]:
    return lambda header: header.update(changes)


USED = 2 * (8 + len(ROW))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: [header], "the header is a JSON list, needed an object"),
        (with_(header_size=None), "header_size is null, needed a whole number from 16384 to 134217728"),
        (with_(header_size=2**40), "header_size is 1099511627776, needed"),
        (with_(header_size=True), "header_size is true, needed"),
        (with_(header_size=16384.0), "header_size is 16384.0, needed"),
        (with_(page_size=100), "page_size is 100, needed a whole number from 32768 to 268435456"),
        (with_(padding="x" * 20000), "header_size 16384, but the header takes 2"),
        (with_(version="4.0"), 'version "4.0", needed 3.0 or 2.0'),
        (with_(version=["3.0"] * 99), r"version \[.*\.\.\., needed 3.0"),
        (with_(schema=None), "schema null, needed a list of one object"),
        (with_(schema=[1]), r"schema \[1\], needed"),
        (with_(schema=[{"schema": {}, "blob_fields": [1]}]), "schema .*needed a list of one object"),
        (with_(schema=[{"schema": {"b": 1, "a": 1}, "blob_fields": ["a"]}]), r'no field input_ids; found \["a", "b"\]'),
        (with_(schema=[{"schema": {"input_ids": 1}, "blob_fields": ["input_ids"]}]), "field input_ids is 1, needed"),
        (with_field(type="float32"), "field input_ids is .*float32.*needed an int32 or int64 array"),
        (with_field(shape=[-1, 2]), "needed an int32 or int64 array of one dimension"),
        (lambda header: header["schema"][0].update(blob_fields=[]), "needed an int32 or int64 array"),
        (lambda header: header["schema"][0].update(blob_fields=["input_ids"] * 2), "needed an int32 or int64 array"),
        (with_(page={}), "page is {}, needed a list of objects"),
        (with_(page=[3]), r"page is \[3\], needed a list of objects"),
        (lambda header: header["page"].append(header["page"][0]), r"page\[1\].page_id 0 is there twice"),
        (with_page(page_id=1), r"page\[0\].page_id is 1, needed a whole number from 0 to 0"),
        (with_page(page_id=-1), r"page\[0\].page_id is -1"),
        (with_page(page_size=PAGE_SIZE + 1), r"page\[0\].page_size is 32769, needed"),
        (with_page(page_size=USED + 1), rf"bytes, but page\[0\] ends at byte {HEADER_SIZE + USED + 1}"),
        (with_page(page_size=USED - 1), "row 1, field input_ids: 9 bytes at byte .*ends at"),
        (with_page(page_type="OTHER"), r'page\[0\].page_type "OTHER", needed BLOB_DATA or RAW_DATA'),
        (with_page(start_row_id=1), "rows up to 0 are followed by a page from row 1"),
        (with_page(start_row_id=2**63), r"page\[0\].start_row_id is"),
        (with_page(end_row_id=2**40), r"page\[0\].end_row_id is 1099511627776, needed a whole number from 0 to 4"),
        (with_page(end_row_id=1), "1 rows end at byte .*but their page ends at"),
        (with_page(end_row_id=3), "row 2, field input_ids: it should begin at byte"),
        (with_(version="2.0"), "row 0, field input_ids: 9 bytes, which is not a whole number of int64"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, change: Callable[[dict], object], message: str) -> None:
    file = file_of(tmp_path, [ROW, ROW], change=change)
    with pytest.raises(DataError, match=message) as caught:
        mindrecord.read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (b"", "0 bytes, with a header of 0 bytes"),
        (struct.pack("<Q", 2**62) + b"{}", "10 bytes, with a header of 4611686018427387904 bytes"),
        (struct.pack("<Q", 3) + b"{}", "10 bytes, with a header of 3 bytes"),
        (struct.pack("<Q", 2) + b"{]", "the header is not JSON"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "the header is not JSON"),
        (struct.pack("<Q", 200000) + b"[" * 200000, "the header is not JSON"),
        (struct.pack("<Q", 5004) + b'{"":' + b"9" * 4999 + b"}", "the header is not JSON"),
    ],
)
def test_what_is_no_header_is_refused(tmp_path: Path, start: bytes, message: str) -> None:
    file = tmp_path / "x.mindrecord"
    file.write_bytes(start)
    with pytest.raises(DataError, match=message):
        mindrecord.read(file)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        mindrecord.read(tmp_path / "x.mindrecord")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    rows = [[1, 300, 70000, 2**40, -5], [7], list(range(100))]
    file, _ = mindrecord.write(tmp_path_factory.mktemp("sound") / "s", contents_of(rows), None)
    return file.read_bytes()


def read_all(data: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.mindrecord"
        file.write_bytes(data)
        return len(mindrecord.read(file).tokens[:])


@hypothesis_settings(max_examples=6 * hypothesis_settings().max_examples)
@given(st.data())
def test_damage_is_refused_or_harmless(sound: bytes, data: st.DataObject) -> None:
    length = 8 + int.from_bytes(sound[:8], "little")
    places = st.one_of(st.integers(0, length - 1), st.integers(HEADER_SIZE, HEADER_SIZE + 700))
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(places)] = data.draw(st.integers(0, 255))
    tracemalloc.start()
    try:
        read_all(bytes(damaged))
    except DataError as error:
        assert "x.mindrecord" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 3_000_000


@given(st.floats(0, 1, exclude_max=True))
def test_a_file_that_is_cut_off_is_refused(sound: bytes, share: float) -> None:
    with pytest.raises(DataError):
        read_all(sound[: int(len(sound) * share)])
