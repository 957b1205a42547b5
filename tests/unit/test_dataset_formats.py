"""Each dataset format: its bytes, what it is recognised by, what it refuses."""

import json
import struct
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptworks.data.formats import contents as contents_module
from gptworks.data.formats import llmc, megatron, nanogpt, npy, paddle, paddle_npz, registry, tnt
from gptworks.data.formats.contents import Contents, bare_stream
from gptworks.errors import DataError

# Three documents of 2, 1 and 2 sequences.
SMALL = [[[1, 2, 3], [4]], [[5, 6, 7, 8]], [[9], [10, 11]]]
SHARD = struct.Struct("<256i")


def contents_of(documents: list[list[list[int]]], dtype: str = "<u2") -> Contents:
    tokens = np.array([t for document in documents for sequence in document for t in sequence], dtype)
    sizes = np.array([len(sequence) for document in documents for sequence in document], np.int64)
    return Contents(tokens, sizes, np.cumsum([0, *(len(document) for document in documents)]).astype(np.int64))


def longs(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def shorts(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


def array(kind: str, count: int, data: bytes) -> bytes:
    """A .npy from numpy's description of it: the numbers begin at a multiple of 64."""
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': ({count},), }}"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", 118) + text.ljust(117).encode() + b"\n" + data


def zip_of(file: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(file, "w", compression) as opened:
        for name, data in members.items():
            opened.writestr(f"{name}.npy", data)
    return file


def members_of(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as opened:
        return {name: opened.read(name) for name in opened.namelist()}


def refused(format_: registry.Format, main: Path, *expected: str) -> str:
    with pytest.raises(DataError) as caught:
        format_.read(main)
    for text in (str(main.parent), *expected):
        assert text in str(caught.value)
    return str(caught.value)


def same(found: Contents, needed: Contents) -> bool:
    return (
        found.tokens[: len(found.tokens)].tolist() == needed.tokens[: len(needed.tokens)].tolist()
        and found.sizes.tolist() == needed.sizes.tolist()
        and found.documents.tolist() == needed.documents.tolist()
    )


# The bytes of a small dataset, written out by hand from the description of each format.


def test_bytes_of_a_small_tnt(tmp_path: Path) -> None:
    bin_, idx = tnt.write(tmp_path / "s", contents_of(SMALL), 300)
    assert (bin_.name, idx.name) == ("s.bin", "s.idx")
    assert bin_.read_bytes() == struct.pack("<11i", *range(1, 12))
    assert idx.read_bytes() == (
        b"TNTIDX\x00\x00"
        + longs(1, 4, 4, 5, 5, 4)
        + longs(0, 1, 2, 3, 4, 5)
        + longs(0, 3, 4, 8, 9, 11)
        + longs(3, 1, 4, 1, 2)
        + longs(0, 2, 3, 5)
    )


def test_bytes_of_a_small_paddle_pair(tmp_path: Path) -> None:
    ids, idx = paddle.write(tmp_path / "s", contents_of(SMALL), 300)
    assert (ids.name, idx.name) == ("s_ids.npy", "s_idx.npz")
    assert ids.read_bytes() == array("<u2", 11, shorts(*range(1, 12)))
    assert list(members_of(idx).items()) == [
        ("lens.npy", array("<i4", 5, struct.pack("<5i", 3, 1, 4, 1, 2))),
        ("docs.npy", array("<i8", 4, longs(0, 2, 3, 5))),
    ]


def test_bytes_of_a_small_paddle_npz(tmp_path: Path) -> None:
    """Lengths are those of documents: sequences have no place in it."""
    (file,) = paddle_npz.write(tmp_path / "s", contents_of(SMALL), 300)
    assert file.name == "s_ids.npz"
    assert list(members_of(file).items()) == [
        ("ids.npy", array("<u2", 11, shorts(*range(1, 12)))),
        ("lens.npy", array("<u2", 3, shorts(4, 4, 3))),
    ]


def test_bytes_of_a_small_nanogpt_stream(tmp_path: Path) -> None:
    (file,) = nanogpt.write(tmp_path / "s", contents_of(SMALL, "<i4"), None)
    assert file.name == "s.bin" and file.read_bytes() == shorts(*range(1, 12))


def test_bytes_of_small_llmc_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmc, "SHARD_TOKENS", 4)
    shards = llmc.write(tmp_path / "s", contents_of(SMALL), 300)
    assert [shard.name for shard in shards] == ["s_000000.bin", "s_000001.bin", "s_000002.bin"]
    for shard, tokens in zip(shards, ((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11)), strict=True):
        assert shard.read_bytes() == SHARD.pack(20240520, 1, len(tokens), *[0] * 253) + shorts(*tokens)
        assert llmc.read(shard).tokens[:4].tolist() == list(tokens)


def test_shards_of_llm_c_have_a_hundred_million_tokens() -> None:
    assert llmc.SHARD_TOKENS == 100_000_000


@pytest.mark.parametrize("count", [0, 1, 11, 1000])
def test_numpy_itself_writes_the_same_bytes(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_module, "_BLOCK_TOKENS", 7)  # so that several blocks are needed
    tokens = np.arange(count, dtype=np.uint16)
    contents = bare_stream(tokens)
    sizes = contents.sizes
    np.save(tmp_path / "n_ids.npy", tokens)
    np.savez(tmp_path / "n_idx.npz", lens=sizes.astype(np.int32), docs=contents.documents)
    np.savez(tmp_path / "n_ids.npz", ids=tokens, lens=sizes.astype(np.uint16))
    for file in (*paddle.write(tmp_path / "s", contents, 300), *paddle_npz.write(tmp_path / "s", contents, 300)):
        assert file.read_bytes() == (tmp_path / file.name.replace("s_", "n_")).read_bytes()


# Round trips.

documents_of_sequences = st.lists(
    st.lists(st.lists(st.integers(0, 65499), max_size=6), min_size=1, max_size=3), max_size=8
)


@pytest.mark.parametrize("format_", [megatron, tnt, paddle], ids=lambda each: each.NAME)
@given(documents=documents_of_sequences, dtype=st.sampled_from(["<u2", "<i4", "<i8"]))
def test_tokens_sequences_and_documents_come_back(format_, documents: list, dtype: str) -> None:
    contents = contents_of(documents, dtype)
    with tempfile.TemporaryDirectory() as folder:
        written = format_.write(Path(folder) / "v1.5", contents, None)
        located = registry.locate(Path(folder) / "v1.5")
        assert located.format is format_ and sorted(located.files) == sorted(written)
        found = format_.read(located.main)
        assert same(found, contents) and found.has_documents and not found.is_rows


@given(documents=documents_of_sequences)
def test_paddle_npz_keeps_tokens_and_documents(documents: list) -> None:
    contents = contents_of(documents)
    with tempfile.TemporaryDirectory() as folder:
        (file,) = paddle_npz.write(Path(folder) / "v1.5", contents, 65499)
        assert registry.locate(Path(folder) / "v1.5").files == [file]
        joined = [[[t for sequence in document for t in sequence]] for document in documents]
        assert same(paddle_npz.read(file), contents_of(joined))


@pytest.mark.parametrize("format_", [nanogpt, llmc], ids=lambda each: each.NAME)
@given(documents=documents_of_sequences)
def test_bare_streams_keep_tokens(format_, documents: list) -> None:
    contents = contents_of(documents)
    with tempfile.TemporaryDirectory() as folder:
        (file,) = format_.write(Path(folder) / "v1.5", contents, None)
        assert registry.locate(file).main == file
        found = format_.read(file)
        assert same(found, bare_stream(contents.tokens)) and not found.has_documents


@pytest.mark.parametrize("format_", [tnt, paddle, paddle_npz, nanogpt, llmc], ids=lambda each: each.NAME)
def test_tokens_are_mapped_not_loaded(format_, tmp_path: Path) -> None:
    written = format_.write(tmp_path / "s", contents_of(SMALL), 300)
    located = registry.locate(written[0])
    tokens = located.format.read(located.main).tokens
    assert located.format is format_ and isinstance(tokens, np.memmap)
    assert tokens.tolist() == list(range(1, 12)) and tokens.dtype.byteorder in "<="


@pytest.mark.parametrize(
    ("format_", "vocab", "source", "needed"),
    [
        (paddle, 65534, "<i4", "uint16"),
        (paddle, 65535, "<u2", "int32"),
        (paddle, None, "<u2", "uint16"),
        (paddle, None, "<i4", "int32"),
        (paddle, None, "<i8", "int32"),
        (paddle_npz, 65499, "<i4", "uint16"),
        (paddle_npz, 65500, "<u2", "int32"),
        (tnt, 300, "<u2", "int32"),
        (nanogpt, 70000, "<i4", "uint16"),
        (llmc, 70000, "<i4", "uint16"),
    ],
)
def test_type_of_the_tokens(format_, vocab: int | None, source: str, needed: str, tmp_path: Path) -> None:
    written = format_.write(tmp_path / "s", contents_of(SMALL, source), vocab)
    assert format_.read(registry.locate(written[0]).main).tokens.dtype == needed


# Recognition.


@pytest.mark.parametrize(
    ("format_", "names", "main", "sidecar"),
    [
        (tnt, ["s", "s.bin", "s.idx"], "s.idx", "s.json"),
        (paddle, ["s", "s_ids.npy", "s_idx.npz"], "s_ids.npy", "s_ids.npy.json"),
        (paddle_npz, ["s", "s_ids.npz"], "s_ids.npz", "s_ids.npz.json"),
        (nanogpt, ["s.bin"], "s.bin", "s.bin.json"),
        (llmc, ["s_000000.bin"], "s_000000.bin", "s_000000.bin.json"),
    ],
    ids=lambda value: value.NAME if hasattr(value, "NAME") else "",
)
def test_names_by_which_it_is_found(format_, names: list[str], main: str, sidecar: str, tmp_path: Path) -> None:
    written = format_.write(tmp_path / "s", contents_of(SMALL), 300)
    for name in names:
        located = registry.locate(tmp_path / name)
        assert (located.format, located.main) == (format_, tmp_path / main)
        assert located.sidecar == tmp_path / sidecar and located.files == written
    assert [(each.format, each.main) for each in registry.locate_all(tmp_path)] == [(format_, tmp_path / main)]


def test_every_format_in_one_folder(tmp_path: Path) -> None:
    for format_ in (megatron, tnt, paddle, paddle_npz, nanogpt, llmc):
        folder = tmp_path / format_.NAME
        folder.mkdir()
        format_.write(folder / "s", contents_of(SMALL), 300)
    names = [each.format.NAME for each in registry.locate_all(tmp_path)]
    assert names == ["llmc", "megatron", "nanogpt", "paddle", "paddle-npz", "tnt"]
    assert list(registry.FORMATS)[:4] == ["megatron", "tnt", "paddle", "paddle-npz"]
    assert list(registry.FORMATS)[-2:] == ["nanogpt", "llmc"]


def test_a_prefix_of_several_datasets_is_ambiguous(tmp_path: Path) -> None:
    for format_ in (megatron, paddle, paddle_npz):
        format_.write(tmp_path / "s", contents_of(SMALL), 300)
    with pytest.raises(DataError) as caught:
        registry.locate(tmp_path / "s")
    listed = f"{tmp_path}/s.idx (megatron), {tmp_path}/s_ids.npy (paddle), {tmp_path}/s_ids.npz (paddle-npz)"
    assert f"names 3 datasets: {listed}. Give the file you mean." in str(caught.value)
    assert registry.locate(tmp_path / "s_ids.npz").format is paddle_npz
    assert registry.locate(tmp_path / "s_idx.npz").format is paddle
    assert registry.locate(tmp_path / "s.bin").format is megatron


def test_an_npz_of_any_name_with_exactly_these_arrays(tmp_path: Path) -> None:
    (file,) = paddle_npz.write(tmp_path / "s", contents_of(SMALL), 300)
    assert registry.locate(file.rename(tmp_path / "other.npz")).format is paddle_npz
    np.savez(tmp_path / "more.npz", ids=[1], lens=[1], extra=[1])
    np.savez(tmp_path / "half_idx.npz", ids=np.array([1], np.uint16), lens=np.array([1], np.uint16))
    (tmp_path / "broken.npz").write_bytes(b"PK")
    for name in ("more.npz", "half_idx.npz", "broken.npz"):
        assert paddle_npz.find(tmp_path / name) is None


def test_a_bare_stream_is_only_found_by_its_full_name(tmp_path: Path) -> None:
    nanogpt.write(tmp_path / "s", contents_of(SMALL), 300)
    with pytest.raises(DataError) as caught:
        registry.locate(tmp_path / "s")
    assert str(caught.value) == (
        f"{tmp_path}/s.idx: no such file. Needed: the pair s.bin and s.idx. If s.bin is a bare stream of tokens, name "
        f"it in full: {tmp_path}/s.bin."
    )
    assert nanogpt.find(tmp_path / "gone.bin") is None and llmc.find(tmp_path / "s") is None


def test_half_of_a_megatron_pair_is_not_a_bare_stream(tmp_path: Path) -> None:
    bin_, idx = megatron.write(tmp_path / "s", contents_of(SMALL), 300)
    idx.write_bytes(b"damaged")
    assert nanogpt.find(bin_) is None
    idx.unlink()
    for text in ("not json", "[" * 5000, "[]", "{}", '{"sha256": 5}', '{"sha256": {".bin": "0"}}'):
        (tmp_path / "s.json").write_text(text)
        assert nanogpt.find(bin_) == bin_
    (tmp_path / "s.json").write_text(json.dumps({"sha256": {".bin": "0", ".idx": "0"}}))
    assert nanogpt.find(bin_) is None
    with pytest.raises(DataError, match=r"s\.bin: not a dataset of a known format"):
        registry.locate(bin_)


@pytest.mark.parametrize("start", [20240520, 20240801, 20240522, 0x04034B50])
def test_other_files_called_bin_are_no_bare_streams(start: int, tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(start.to_bytes(4, "little") + bytes(100))
    assert nanogpt.find(tmp_path / "s.bin") is None


# What others write, and we only read.


def tnt_idx(
    *, magic=b"TNTIDX\0\0", version=1, code=4, element=4, n=None, s=None, dims=None, offsets=(0, 3, 4), sizes=(3, 1),
    borders=(0, 1, 2), width="q",
) -> bytes:  # fmt: skip
    n = len(sizes) if n is None else n
    dims = range(len(offsets)) if dims is None else dims
    header = struct.pack("<8s6Q", magic, version, code, element, n, len(sizes) if s is None else s, len(borders))
    return header + longs(*dims, *offsets) + struct.pack(f"<{len(sizes)}{width}", *sizes) + longs(*borders)


def tnt_pair(folder: Path, bin_: bytes = bytes(16), **values: object) -> Path:
    (folder / "s.bin").write_bytes(bin_)
    (folder / "s.idx").write_bytes(tnt_idx(**values))
    return folder / "s.idx"


@pytest.mark.parametrize("width", ["q", "i"])
@pytest.mark.parametrize(("code", "kind"), [(1, "u1"), (2, "i1"), (3, "i2"), (4, "i4"), (5, "i8"), (8, "u2")])
def test_tnt_of_both_widths_and_all_types(width: str, code: int, kind: str, tmp_path: Path) -> None:
    tokens = np.array([7, 8, 9, 10], f"<{kind}")
    found = tnt.read(tnt_pair(tmp_path, tokens.tobytes(), code=code, element=tokens.itemsize, width=width))
    assert (found.tokens[:4].tolist(), found.sizes.tolist()) == ([7, 8, 9, 10], [3, 1])
    assert found.documents.tolist() == [0, 1, 2] and found.tokens.dtype == tokens.dtype


@pytest.mark.parametrize("borders", [(0, 0, 1, 2), (0, 0, 1, 1, 2), (0, 1, 1, 2, 2)])
def test_tnt_borders_repeated_by_merging(borders: tuple[int, ...], tmp_path: Path) -> None:
    assert tnt.read(tnt_pair(tmp_path, borders=borders)).documents.tolist() == [0, 1, 2]


def test_an_empty_tnt(tmp_path: Path) -> None:
    found = tnt.read(tnt_pair(tmp_path, b"", sizes=(), offsets=(0,), borders=(0,)))
    assert (len(found.tokens), found.num_documents) == (0, 0)


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"magic": b"TNTIDY\0\0"}, "s.idx: begins with b'TNTIDY"),
        ({"version": 2}, "s.idx: version 2, needed 1"),
        ({"code": 6}, "s.idx: dtype code 6, needed one of [1, 2, 3, 4, 5, 8]"),
        ({"code": 7, "element": 8}, "s.idx: dtype code 7"),
        ({"code": 9}, "s.idx: dtype code 9"),
        ({"element": 8}, "s.idx: 8 bytes an element, but int32 (dtype code 4) has 4"),
        ({"s": 3}, "s.idx: 3 sizes for 2 sequences"),
        ({"n": 3, "s": 3}, "s.idx: 144 bytes, but its header (3 sequences, 3 document borders) needs 168 (or 156"),
        ({"dims": (0, 2, 2)}, "s.idx: the dimensions of sequence 1 begin at 2, needed 1"),
        ({"sizes": (-1, 5)}, "s.idx: sizes[0] is -1, but there are 4 tokens"),
        ({"sizes": (2**62, 1)}, f"s.idx: sizes[0] is {2**62}"),
        ({"sizes": (3, 0)}, "s.idx: sizes adds up to 3 tokens, but there are 4"),
        ({"sizes": (2, 2)}, "s.idx: sequence 1 begins at token 3, but those before it have 2"),
        ({"offsets": (0, 12, 4)}, "s.idx: sequence 1 begins at token 12"),
        ({"offsets": (0, 3, 5)}, "s.bin: 16 bytes, but s.idx describes 5 tokens of 4 bytes"),
        ({"borders": (0, 1)}, "s.idx: the document index runs from 0 to 1; needed 0 to 2"),
        ({"borders": (1, 2)}, "runs from 1 to 2; needed 0 to 2"),
        ({"borders": (0, 2, 1, 2)}, "runs from 0 to 2, falling at 2; needed 0 to 2"),
        ({"borders": ()}, "runs from nothing; needed 0 to 2"),
    ],
)
def test_a_tnt_that_contradicts_itself(wrong: dict, expected: str, tmp_path: Path) -> None:
    refused(tnt, tnt_pair(tmp_path, **wrong), expected)


@pytest.mark.parametrize("format_", [megatron, tnt], ids=lambda each: each.NAME)
def test_borders_whose_differences_wrap_around(format_, tmp_path: Path) -> None:
    """Each step looks like a rise when subtracted in 64 bits."""
    (tmp_path / "s.bin").write_bytes(bytes(16))
    borders = (0, 2**63 - 1, -(2**63), -1, 2)
    idx = tnt_idx(borders=borders)
    if format_ is megatron:
        header = struct.pack("<9sQBQQ", megatron.MAGIC, 1, 4, 2, len(borders))
        idx = header + struct.pack("<2i", 3, 1) + longs(0, 12, *borders)
    (tmp_path / "s.idx").write_bytes(idx)
    refused(format_, tmp_path / "s.idx", "s.idx: the document index", "rising order")


def paddle_pair(folder: Path, *, ids: bytes | None = None, **members: bytes) -> Path:
    (folder / "s_ids.npy").write_bytes(array("<u2", 4, shorts(7, 8, 9, 10)) if ids is None else ids)
    arrays = {"lens": array("<i4", 2, struct.pack("<2i", 3, 1)), "docs": array("<i8", 3, longs(0, 1, 2)), **members}
    zip_of(folder / "s_idx.npz", **{name: data for name, data in arrays.items() if data})
    return folder / "s_ids.npy"


def test_a_paddle_pair_without_docs(tmp_path: Path) -> None:
    for more in ({}, {"sents": array("<i8", 3, longs(0, 3, 4))}):
        found = paddle.read(paddle_pair(tmp_path, docs=b"", **more))
        assert (found.sizes.tolist(), found.documents.tolist()) == ([3, 1], [0, 1, 2])


@pytest.mark.parametrize("kind", ["|u1", "|i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8"])
def test_paddle_tokens_of_other_whole_numbers(kind: str, tmp_path: Path) -> None:
    tokens = np.array([7, 8, 9, 10], kind)
    main = paddle_pair(tmp_path)
    np.save(main, tokens)
    assert paddle.read(main).tokens[:].tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("version", [(2, 0), (3, 0)])
def test_later_versions_of_npy(version: tuple[int, int], tmp_path: Path) -> None:
    main = paddle_pair(tmp_path)
    with main.open("wb") as file:
        np.lib.format.write_array(file, np.array([7, 8, 9, 10], np.uint16), version=version)
    assert paddle.read(main).tokens[:].tolist() == [7, 8, 9, 10]


def test_a_compressed_index(tmp_path: Path) -> None:
    main = paddle_pair(tmp_path)
    np.savez_compressed(tmp_path / "s_idx.npz", lens=np.array([1, 3]), docs=np.array([0, 2]))
    assert paddle.read(main).documents.tolist() == [0, 2]


NPY = array("<u2", 4, shorts(7, 8, 9, 10))


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"ids": b""}, "s_ids.npy: begins with b'', needed b'\\x93NUMPY'"),
        ({"ids": b"\x93NUMPY"}, "s_ids.npy: version cut off, needed 1.0"),
        ({"ids": NPY.replace(b"Y\x01", b"Y\x04")}, "s_ids.npy: version 4.0, needed 1.0"),
        ({"ids": NPY[:60]}, "s_ids.npy: a header of 118 bytes, but 50 are there"),
        ({"ids": b"\x93NUMPY\x02\x00" + b"\xff" * 40}, f"s_ids.npy: a header of {2**32 - 1} bytes, but 36 are there"),
        ({"ids": NPY.replace(b"{", b"(")}, "s_ids.npy: header b\"('descr'"),
        ({"ids": NPY.replace(b"<u2", b"<f2")}, "s_ids.npy: numbers of type '<f2', needed little-endian whole"),
        ({"ids": NPY.replace(b"<u2", b">u2")}, "s_ids.npy: numbers of type '>u2'"),
        ({"ids": NPY.replace(b"'<u2'", b"'|O' ")}, "s_ids.npy: numbers of type '|O'"),
        ({"ids": NPY.replace(b"(4,), }  ", b"(2, 2), }")}, "s_ids.npy: shape (2, 2), needed one dimension"),
        ({"ids": NPY.replace(b"(4,)", b"()  ")}, "s_ids.npy: shape (), needed one dimension"),
        ({"ids": NPY.replace(b"(4,)", b"(5,)")}, "s_ids.npy: 136 bytes, but 5 numbers of type uint16 need 138"),
        ({"ids": NPY[:-1]}, "s_ids.npy: 135 bytes, but 4 numbers"),
        ({"ids": NPY + b"\0"}, "s_ids.npy: 137 bytes, but 4 numbers"),
        ({"lens": b""}, "s_idx.npz: no array 'lens'; it has docs"),
        ({"docs": b"", "dots": NPY}, "s_idx.npz: no array 'docs'; it has dots, lens"),
        ({"lens": array("<f4", 2, bytes(8))}, "s_idx.npz, array lens: numbers of type '<f4'"),
        ({"lens": array("<i4", 3, bytes(8))}, "array lens: 136 bytes, but 3 numbers of type int32 need 140"),
        ({"lens": array("<i4", 2, struct.pack("<2i", 5, -1))}, "s_idx.npz: lens[1] is -1"),
        ({"lens": array("<i4", 2, struct.pack("<2i", 3, 2))}, "s_idx.npz: lens adds up to 5 tokens, but there are 4"),
        ({"lens": array("<u8", 2, struct.pack("<2Q", 2**64 - 1, 5))}, f"s_idx.npz: lens[0] is {2**64 - 1}"),
        ({"docs": array("<i8", 2, longs(0, 1))}, "s_idx.npz: docs runs from 0 to 1; needed 0 to 2"),
        ({"docs": array("<u8", 3, b"\0" * 8 + b"\xff" * 8 + longs(2))}, "docs runs from 0 to 2, falling at 2"),
    ],
)
def test_a_paddle_pair_that_contradicts_itself(wrong: dict, expected: str, tmp_path: Path) -> None:
    refused(paddle, paddle_pair(tmp_path, **wrong), expected)


@pytest.mark.parametrize("missing", ["s_ids.npy", "s_idx.npz"])
def test_half_of_a_paddle_pair(missing: str, tmp_path: Path) -> None:
    paddle_pair(tmp_path)
    (tmp_path / missing).unlink()
    located = registry.locate(tmp_path / "s")
    refused(located.format, located.main, f"{missing}: no such file. Needed: the pair s_ids.npy and s_idx.npz")


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_paddle_npz_stored_or_compressed(compression: int, tmp_path: Path) -> None:
    lens = array("<u4", 2, struct.pack("<2I", 3, 1))  # a later tool's lens
    found = paddle_npz.read(zip_of(tmp_path / "s_ids.npz", compression, ids=NPY, lens=lens))
    assert (found.tokens[:4].tolist(), found.sizes.tolist()) == ([7, 8, 9, 10], [3, 1])
    assert isinstance(found.tokens, np.memmap) == (compression == zipfile.ZIP_STORED)


def test_paddle_npz_with_lengths_that_wrapped_around(tmp_path: Path) -> None:
    ids = np.zeros(65536 + 10, np.uint16)
    lens = np.array([65536 + 4, 6]).astype(np.uint16)
    np.savez(tmp_path / "s_ids.npz", ids=ids, lens=lens)
    text = refused(paddle_npz, tmp_path / "s_ids.npz", "lens adds up to 10 tokens, ids has 65546")
    assert "overflowed uint16" in text and "Prepare the text again" in text
    np.savez(tmp_path / "s_ids.npz", ids=ids, lens=lens - 1)
    assert "overflowed" not in refused(paddle_npz, tmp_path / "s_ids.npz", "lens adds up to 8 tokens")


def test_paddle_npz_refuses_a_document_too_long_for_its_lengths(tmp_path: Path) -> None:
    contents = Contents(np.zeros(65540, np.uint16), np.array([2, 65000, 538]), np.array([0, 1, 3]))
    with pytest.raises(DataError) as caught:
        paddle_npz.write(tmp_path / "s", contents, 300)
    assert "s_ids.npz: document 1 has 65538 tokens, and this format holds lengths in uint16 (up to 65535)" in str(
        caught.value
    )
    assert "--to paddle" in str(caught.value) and not list(tmp_path.iterdir())
    assert paddle_npz.read(*paddle_npz.write(tmp_path / "s", contents, 65500)).sizes.tolist() == [2, 65538]


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ({"ids": NPY}, "s_ids.npz: no array 'lens'; it has ids"),
        ({"lens": NPY}, "s_ids.npz: no array 'ids'; it has lens"),
        ({"ids": array("<f8", 1, bytes(8)), "lens": NPY}, "s_ids.npz, array ids: numbers of type '<f8'"),
        ({"ids": NPY[:-2], "lens": NPY}, "array ids: 134 bytes, but 4 numbers of type uint16 need 136"),
        ({"ids": NPY, "lens": array("<i4", 2, struct.pack("<2i", -1, 5))}, "s_ids.npz: lens[0] is -1"),
        ({"ids": NPY, "lens": NPY}, "s_ids.npz: lens[3] is 10, but there are 4 tokens"),
    ],
)
def test_a_paddle_npz_that_contradicts_itself(members: dict, expected: str, tmp_path: Path) -> None:
    for compression in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        refused(paddle_npz, zip_of(tmp_path / "s_ids.npz", compression, **members), expected)


def test_compression_that_numpy_does_not_use(tmp_path: Path) -> None:
    file = zip_of(tmp_path / "s_ids.npz", zipfile.ZIP_BZIP2, ids=NPY, lens=NPY)
    refused(paddle_npz, file, "array ids: compression method 12, needed 0 (none) or 8 (deflate)")


def test_a_zip_bomb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy, "_HARMLESS_BYTES", 1_000_000)
    file = zip_of(tmp_path / "s_ids.npz", zipfile.ZIP_DEFLATED, ids=array("<u2", 10**6, bytes(2 * 10**6)), lens=NPY)
    refused(paddle_npz, file, "array ids: claims to unpack to 2000128 bytes from 2", "numpy.savez")


def test_an_array_that_claims_to_reach_beyond_the_zip(tmp_path: Path) -> None:
    """Its header and the zip agree with each other, not with the file."""
    file = zip_of(tmp_path / "s_ids.npz", ids=array("<u2", 10**9, b""), lens=NPY)
    data = bytearray(file.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 20 : entry + 28] = struct.pack("<II", 2 * 10**9 + 128, 2 * 10**9 + 128)
    file.write_bytes(data)
    refused(paddle_npz, file, f"array ids: 2000000128 bytes at 0 in a zip of {len(data)}, and nothing of the kind")


def test_nanogpt_refuses_an_odd_size(tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(bytes(7))
    refused(nanogpt, tmp_path / "s.bin", "s.bin: 7 bytes, an odd number")


@pytest.mark.parametrize("format_", [nanogpt, llmc], ids=lambda each: each.NAME)
def test_ids_that_16_bits_do_not_hold_are_refused(format_, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"token 1 is id 65536, which uint16 does not hold"):
        format_.write(tmp_path / "s", contents_of([[[1, 65536]]], "<i4"), None)
    with pytest.raises(DataError, match=r"token 0 is id -1"):
        format_.write(tmp_path / "s", contents_of([[[-1]]], "<i4"), None)


def test_llmc_of_llama_3(tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(SHARD.pack(20240801, 7, 2, *[0] * 253) + struct.pack("<2I", 128000, 5))
    found = llmc.read(registry.locate(tmp_path / "s.bin").main)
    assert found.tokens[:2].tolist() == [128000, 5] and found.tokens.dtype == np.uint32


@pytest.mark.parametrize(
    ("header", "tokens", "expected"),
    [
        ((20240521, 1, 2), 4, "begins with 20240521, needed one of [20240520, 20240801]"),
        ((20240520, 2, 2), 4, "version 2, needed 1 with 20240520"),
        ((20240520, 7, 2), 4, "version 7, needed 1"),
        ((20240801, 1, 1), 4, "version 1, needed 7 with 20240801"),
        ((20240520, 1, 3), 4, "1028 bytes, but its header counts 3 tokens, 1030 bytes in all"),
        ((20240520, 1, -2), 4, "1028 bytes, but its header counts -2 tokens"),
        ((20240520, 1, 2**31 - 1), 4, f"1028 bytes, but its header counts {2**31 - 1} tokens"),
        ((20240520, 1, 2), 5, "1029 bytes, but its header counts 2 tokens"),
    ],
)
def test_a_shard_that_contradicts_itself(header: tuple, tokens: int, expected: str, tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(SHARD.pack(*header, *[0] * 253) + bytes(tokens))
    refused(llmc, tmp_path / "s.bin", f"s.bin: {expected}")


def test_a_shard_with_a_damaged_magic_is_not_read_as_a_bare_stream(tmp_path: Path) -> None:
    (tmp_path / "s.bin").write_bytes(SHARD.pack(20240521, 1, 2, *[0] * 253) + bytes(4))
    located = registry.locate(tmp_path / "s.bin")
    refused(located.format, located.main, "begins like a shard of llm.c", "20240521, needed 20240520")


@pytest.mark.parametrize("format_", [tnt, paddle_npz, nanogpt, llmc], ids=lambda each: each.NAME)
def test_a_missing_file(format_, tmp_path: Path) -> None:
    refused(format_, tmp_path / "gone.bin", "gone", "no such file")


@pytest.mark.parametrize("format_", [megatron, paddle], ids=lambda each: each.NAME)
def test_a_sequence_too_long_for_32_bits(format_, tmp_path: Path) -> None:
    contents = Contents(np.zeros(1, np.uint16), np.array([2**31]), np.array([0, 1]))
    with pytest.raises(DataError, match=r"sequence 0 has 2147483648 tokens; this format counts them in 32 bits"):
        format_.write(tmp_path / "s", contents, 300)
