"""The real MindSpore reads what we write: every row, through its reader and its dataset. See `make test-interop`."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import mindrecord, mindrecord_writer
from gptworks.data.formats.contents import Contents

pytestmark = pytest.mark.interop

# Runs in MindSpore's environment: file in, what both of its readers give out.
READ = """
import sys
import numpy as np
import mindspore.dataset
from mindspore.mindrecord import FileReader

file, out = sys.argv[1:]
reader = FileReader(file)
rows = list(reader.get_next())
reader.close()
dataset = mindspore.dataset.MindDataset(file, columns_list=["input_ids"], shuffle=False)
again = [row["input_ids"] for row in dataset.create_dict_iterator(num_epochs=1, output_numpy=True)]
fields = {name: np.concatenate([row[name] for row in rows]) for name in ("input_ids", "attention_mask", "labels")}
np.savez(out, sizes=[len(row["input_ids"]) for row in rows], dataset=np.concatenate(again),
         dataset_sizes=[len(row) for row in again], **fields)
"""


@pytest.fixture(scope="module")
def mindspore_python() -> str:
    python = os.environ.get("GPTWORKS_MINDSPORE_PYTHON")
    if not python:
        pytest.skip("GPTWORKS_MINDSPORE_PYTHON is not set: the Python of an environment with mindspore")
    return python


@pytest.mark.parametrize(
    ("sizes", "dtype", "limit"),
    [
        ([5], np.uint16, 50257),
        ([1025] * 8, np.uint16, 50257),
        ([1, 2, 3, 4, 5000], np.int32, 2**31),
        ([9] * 3, np.int64, 2**62),
        ([1025] * 9000, np.uint16, 50257),  # three pages
        ([1] * 20000, np.uint16, 50257),
        ([], np.uint16, 50257),
    ],
    ids=["one", "eight", "lengths", "wide", "pages", "short", "none"],
)
def test_every_row_arrives(mindspore_python: str, tmp_path: Path, sizes: list[int], dtype: type, limit: int) -> None:
    tokens = np.random.default_rng(7).integers(0, limit, sum(sizes)).astype(dtype)
    staging, place = tmp_path / "staging", tmp_path / "place"
    staging.mkdir()
    contents = Contents(tokens, np.array(sizes, np.int64), np.arange(len(sizes) + 1))
    mindrecord.write(staging / "ours", contents, None)
    staging.rename(place)  # as our own programs do: written elsewhere, then moved
    file, out = place / "ours.mindrecord", tmp_path / "found.npz"
    if not sizes:  # MindSpore has nothing to give; that it opens the file is all there is
        done = run(
            mindspore_python,
            "-c",
            "import sys\nfrom mindspore.mindrecord import FileReader\n"
            "print('rows', len(list(FileReader(sys.argv[1]).get_next())))",
            str(file),
        )
        assert "rows 0" in done
        return
    run(mindspore_python, "-c", READ, str(file), str(out))
    with np.load(out) as found:
        assert found["sizes"].tolist() == found["dataset_sizes"].tolist() == sizes
        for name in ("input_ids", "labels", "dataset"):
            assert found[name].dtype == np.int64
            assert np.array_equal(found[name], tokens), name
        assert found["attention_mask"].tolist() == [1] * len(tokens)


def run(*command: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_many_small_pages_arrive(mindspore_python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pages of either kind, without writing gigabytes."""
    monkeypatch.setattr(mindrecord_writer, "USUAL_PAGE", 32 << 10)
    rng = np.random.default_rng(1)
    sizes = np.array([*rng.integers(1, 900, 60), *[1] * 6000])
    tokens = rng.integers(0, 50257, int(sizes.sum())).astype(np.uint16)
    file, _ = mindrecord.write(tmp_path / "small", Contents(tokens, sizes, np.arange(len(sizes) + 1)), None)
    run(mindspore_python, "-c", READ, str(file), str(tmp_path / "found.npz"))
    with np.load(tmp_path / "found.npz") as found:
        assert found["sizes"].tolist() == found["dataset_sizes"].tolist() == sizes.tolist()
        assert np.array_equal(found["input_ids"], tokens)
        assert np.array_equal(found["dataset"], tokens)
