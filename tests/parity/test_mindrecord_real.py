"""MindRecord against the real thing: files that MindSpore wrote, and what MindSpore itself reads from them."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import mindrecord, registry
from gptworks.data.formats.contents import Contents
from gptworks.errors import DataError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "mindrecord"


def unzip(name: str, folder: Path) -> Path:
    file = folder / name
    file.write_bytes(gzip.decompress((FIXTURES / f"{name}.gz").read_bytes()))
    return file


def expected(name: str) -> tuple[np.ndarray, list[int]]:
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return arrays["tokens"], arrays["sizes"].tolist()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("one_int32", np.int32),
        ("one_int64", np.int64),  # every width, with both signs
        ("gpt2", np.int64),
        ("pages", np.int64),  # blob pages before and after the raw page
        ("mixed", np.int32),  # float, bytes and scalar fields around it
        ("no_rows", np.int32),
        ("version2", np.int32),
    ],
)
def test_what_mindspore_wrote(name: str, dtype: type, tmp_path: Path) -> None:
    tokens, sizes = expected(name)
    located = registry.locate(unzip(f"{name}.mindrecord", tmp_path))
    assert located.format.NAME == "mindrecord"
    contents = located.format.read(located.main)
    assert contents.tokens.dtype == dtype
    assert contents.tokens[:].tolist() == tokens.tolist()
    assert contents.sizes.tolist() == sizes
    assert contents.documents.tolist() == list(range(len(sizes) + 1))
    assert contents.is_rows and contents.has_documents


def test_shards_are_datasets_of_their_own_and_together_all_rows(tmp_path: Path) -> None:
    for number in range(2):
        unzip(f"shards.mindrecord{number}", tmp_path)
    found = registry.locate_all(tmp_path)
    assert [each.main.name for each in found] == ["shards.mindrecord0", "shards.mindrecord1"]
    rows = []
    for each in found:
        contents = each.format.read(each.main)
        rows += np.split(contents.tokens[:], np.cumsum(contents.sizes)[:-1])
    tokens, sizes = expected("shards")
    needed = np.split(tokens, np.cumsum(sizes)[:-1])
    assert sorted(row.tolist() for row in rows) == sorted(row.tolist() for row in needed)


def test_a_field_that_is_no_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'field input_ids is {"type": "int32"}, needed an int32 or int64 array'):
        mindrecord.read(unzip("no_arrays.mindrecord", tmp_path))


def test_the_same_rows_give_the_bytes_of_mindspore(tmp_path: Path) -> None:
    tokens, sizes = expected("gpt2")
    contents = Contents(tokens, np.array(sizes), np.arange(len(sizes) + 1))
    theirs = unzip("gpt2.mindrecord", tmp_path)
    (tmp_path / "ours").mkdir()
    ours, index = mindrecord.write(tmp_path / "ours" / "gpt2", contents, None)
    assert ours.read_bytes() == theirs.read_bytes()
    with closing(sqlite3.connect(index)) as database:
        assert "\n".join(database.iterdump()) + "\n" == (FIXTURES / "gpt2.sql").read_text()


def test_real_openwebtext_rows(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "fixtures" / "mindspore"
    file = tmp_path / "owt8.mindrecord"
    file.write_bytes(gzip.decompress((folder / "owt8.mindrecord.gz").read_bytes()))
    contents = mindrecord.read(file)
    needed = np.load(folder / "owt8.expected.npy")
    assert contents.sizes.tolist() == [needed.shape[1]] * needed.shape[0]
    assert np.array_equal(contents.tokens[:].reshape(needed.shape), needed)
