"""Datasets written by megatron-core, PaddleNLP and FleetX themselves: read, and written again to the same bytes.

The files in tests/fixtures/datasets were made by the scripts beside them.
"""

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import megatron, paddle, paddle_npz, registry, tnt
from gptworks.data.formats.contents import Contents
from gptworks.data.store import Store

FIXTURES = Path(__file__).parents[1] / "fixtures" / "datasets"
HELD = runpy.run_path(str(FIXTURES / "documents.py"))
DOCUMENTS, LARGE = HELD["DOCUMENTS"], HELD["LARGE"]


def documents_in(contents: Contents) -> list[list[list[int]]]:
    ends = np.cumsum(contents.sizes)
    sequences = [
        contents.tokens[end - size : end].tolist() for end, size in zip(ends, contents.sizes.tolist(), strict=True)
    ]
    borders = contents.documents.tolist()
    return [sequences[begin:end] for begin, end in itertools.pairwise(borders)]


@pytest.mark.parametrize(
    ("name", "format_", "dtype", "documents"),
    [
        ("megatron_mmap", megatron, "uint16", DOCUMENTS),
        ("megatron_modes", megatron, "uint16", DOCUMENTS),
        ("megatron_int32", megatron, "int32", LARGE),
        ("paddlenlp_mmap", megatron, "uint16", DOCUMENTS),
        ("paddlenlp_lazy", tnt, "int32", LARGE),
        ("paddlenlp_lazy_uint16", tnt, "uint16", DOCUMENTS),
        ("paddlenlp_lazy_merged", tnt, "int32", LARGE + LARGE),
    ],
)
def test_written_by_others(name: str, format_: registry.Format, dtype: str, documents: list) -> None:
    store = Store(FIXTURES / name)
    assert store.located.format is format_
    assert store.contents.tokens.dtype == dtype
    assert documents_in(store.contents) == documents


@pytest.mark.parametrize(("name", "vocab"), [("megatron_mmap", 65499), ("megatron_int32", None)])
def test_our_megatron_pair_has_the_bytes_of_megatron_cores_builder(
    name: str, vocab: int | None, tmp_path: Path
) -> None:
    documents = DOCUMENTS if name == "megatron_mmap" else LARGE
    sequences = [sequence for document in documents for sequence in document]
    contents = Contents(
        np.array([t for sequence in sequences for t in sequence], np.int32),
        np.array([len(sequence) for sequence in sequences]),
        np.cumsum([0, *map(len, documents)]),
    )
    for file in megatron.write(tmp_path / name, contents, vocab):
        assert file.read_bytes() == (FIXTURES / file.name).read_bytes()


def test_paddlenlps_mmap_pair_has_the_bytes_of_megatrons(tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        theirs = (FIXTURES / f"paddlenlp_mmap{suffix}").read_bytes()
        assert theirs == (FIXTURES / f"megatron_mmap{suffix}").read_bytes()


def test_our_tnt_differs_from_paddlenlps_only_in_the_width_of_sizes(tmp_path: Path) -> None:
    bin_, idx = tnt.write(tmp_path / "s", tnt.read(FIXTURES / "paddlenlp_lazy.idx"), None)
    assert bin_.read_bytes() == (FIXTURES / "paddlenlp_lazy.bin").read_bytes()
    theirs = (FIXTURES / "paddlenlp_lazy.idx").read_bytes()
    sizes_at, count = 56 + 2 * 3 * 8, 2
    sizes = np.frombuffer(theirs, "<i4", count, sizes_at).astype("<i8").tobytes()
    assert idx.read_bytes() == theirs[:sizes_at] + sizes + theirs[sizes_at + 4 * count :]


def test_fleetxs_pair_is_read_and_written_to_the_same_bytes(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "fixtures" / "paddle" / "fleetx-gpt2-owt100" / "owt100"
    store = Store(source)
    assert store.located.format is paddle and isinstance(store.tokens, np.memmap)
    assert (len(store.tokens), store.num_documents, store.tokens.dtype) == (100571, 100, np.uint16)
    ends = store.document_starts[1:]
    assert all(store.tokens[end - 1 : end][0] == 50256 for end in ends)
    for file in paddle.write(tmp_path / "owt100", store.contents, 50257):
        assert file.read_bytes() == (source.parent / file.name).read_bytes()


def test_paddlenlps_way_of_reading_reads_what_we_write(tmp_path: Path) -> None:
    """PaddleNLP maps _ids.npy with np.load and takes lens and docs of _idx.npz as they are."""
    contents = megatron.read(FIXTURES / "megatron_mmap.idx")
    paddle.write(tmp_path / "s", contents, 50257)
    ids = np.load(tmp_path / "s_ids.npy", mmap_mode="r")
    index = np.load(tmp_path / "s_idx.npz")
    assert ids.dtype == np.uint16 and ids.tolist() == contents.tokens[:].tolist()
    assert index["lens"].dtype == np.int32 and index["lens"].tolist() == contents.sizes.tolist()
    assert index["docs"].dtype == np.int64 and index["docs"].tolist() == contents.documents.tolist()


def test_the_older_paddle_reader_reads_what_we_write(tmp_path: Path) -> None:
    contents = megatron.read(FIXTURES / "megatron_mmap.idx")
    (file,) = paddle_npz.write(tmp_path / "train.data.json", contents, 50257)
    with np.load(file) as data:
        assert data["ids"].dtype == data["lens"].dtype == np.uint16
        assert data["ids"].tolist() == contents.tokens[:].tolist()
        assert data["lens"].tolist() == [sum(map(len, document)) for document in DOCUMENTS]
