"""Folders that Hugging Face `datasets` wrote, as `prepare` reads them; fixtures/hf_datasets/make_hf_datasets.py."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from gptworks.data import corpus, hf_folder, row_files
from gptworks.data.prepare import PrepareJob, prepare
from gptworks.data.store import Store
from gptworks.data.text_blocks import TextRules
from gptworks.data.text_files import TextStream
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

pytest.importorskip("pyarrow")
FOLDERS = Path(__file__).parents[1] / "fixtures" / "hf_datasets"


def numbers(*inputs: Path, key: str = "title") -> list[int]:
    """Which of the twelve rows are read."""
    found = corpus.read_documents([str(each) for each in inputs], TextRules((key,)), corpus.Skipped(strict=True))
    return [int(text.removeprefix("t")) for (text,) in found]


@pytest.mark.parametrize(
    ("folder", "expected"),
    [
        ("saved", range(8)),
        ("chosen", [5, 3, 1]),
        ("splits", range(8)),
        ("splits/test", range(8, 12)),
        ("built-parquet", range(8)),
        ("built-arrow", range(8)),
        ("built-parquet/json-validation.parquet", range(8, 12)),
    ],
)
def test_the_rows_are_those_that_were_saved(folder: str, expected: "range | list[int]") -> None:
    assert numbers(FOLDERS / folder) == list(expected)


def test_a_store_of_it_says_which_split_was_not_read(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["Story on Monday Anna found map"], 300)
    summary = prepare(PrepareJob([str(FOLDERS / "splits")], tmp_path / "s", tokenizer, append_eod=True))
    store = Store(tmp_path / "s")
    first = tokenizer.decode(store.tokens[: store.document_starts[1] - 1])
    assert first == "Story 0: on Monday Anna found map 0.\nShe took it home." and store.num_documents == 8
    place = FOLDERS / "splits"
    assert summary.notes == [f"{place}: the split train is read, and not test: name {place / 'test'} for that"]
    assert not summary.skipped.count and not summary.skipped.passed_over


def test_within_a_folder_of_other_text_and_beside_caches(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "splits", tmp_path / "all" / "b")
    shutil.copytree(FOLDERS / "saved", tmp_path / "all" / "c")
    shutil.copy(FOLDERS / "splits" / "test" / "data-00000-of-00001.arrow", tmp_path / "all" / "c" / "cache-1.arrow")
    (tmp_path / "all" / "a.jsonl").write_text('{"title": "77"}\n', encoding="utf-8")
    (tmp_path / "all" / "z.jsonl").write_text('{"title": "99"}\n', encoding="utf-8")
    assert numbers(tmp_path / "all") == [77, *range(8), *range(8), 99]
    assert len(hf_folder.notes([str(tmp_path / "all")])) == 1


def test_a_folder_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for theirs, ours in (("train", "train-00000-of-00001"), ("validation", "test-00000-of-00001")):
        shutil.copy(FOLDERS / "built-parquet" / f"json-{theirs}.parquet", tmp_path / "data" / f"{ours}.parquet")
    (tmp_path / "README.md").write_text("---\nlicense: mit\ndataset_info:\n  features: []\n---\n# Stories\n")
    assert numbers(tmp_path) == list(range(8))
    (tmp_path / "README.md").write_text("# Only text\n")  # and then all that is there is read, README too
    skipped = corpus.Skipped(strict=False)
    assert len(list(corpus.read_documents([str(tmp_path)], TextRules(("title",)), skipped))) == 13


def test_the_name_of_a_file_says_its_split_and_of_a_folder_only_the_whole_name(tmp_path: Path) -> None:
    for theirs, ours in (("train", "train_v2/train-0"), ("validation", "train_v2/test-0"), ("train", "train/0000")):
        (tmp_path / ours).parent.mkdir(exist_ok=True)
        shutil.copy(FOLDERS / "built-parquet" / f"json-{theirs}.parquet", tmp_path / f"{ours}.parquet")
    (tmp_path / "dataset_info.json").write_text("{}")
    found = hf_folder.recognise(tmp_path)
    assert found is not None and [str(file.relative_to(tmp_path)) for file in found.files] == [
        "train/0000.parquet",
        "train_v2/train-0.parquet",
    ]


def test_what_is_wrong_with_such_a_folder(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS / "saved", tmp_path / "a")
    (tmp_path / "a" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: no such file, though state\.json names it"):
        numbers(tmp_path / "a")
    shutil.copytree(FOLDERS / "splits", tmp_path / "b")
    (tmp_path / "b" / "dataset_dict.json").write_text(json.dumps({"splits": ["test", "dev"]}))
    with pytest.raises(DataError, match=r"has the splits test, dev, and none is called train\. Name one: .*b/test"):
        numbers(tmp_path / "b")
    (tmp_path / "b" / "dataset_dict.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_dict\.json: not JSON"):
        numbers(tmp_path / "b")
    shutil.copytree(FOLDERS / "chosen", tmp_path / "c")
    file = tmp_path / "c" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(DataError, match=r"data-00000-of-00001\.arrow: not a readable arrow file"):
        numbers(tmp_path / "c")
    with pytest.raises(DataError, match=r"no column 'body'\. Columns: text, title, n\. Choose one with --key"):
        numbers(FOLDERS / "saved", key="body")
    state = json.loads((FOLDERS / "chosen" / "state.json").read_text())
    (tmp_path / "c" / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "i.arrow"}]}))
    with pytest.raises(DataError, match="chosen by an index"):
        numbers(tmp_path / "c")


def arrow_stream(path: Path, texts: list[str]) -> bytes:
    import pyarrow

    table = pyarrow.table({"text": texts})
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return path.read_bytes()


def read_texts(path: Path) -> list[str]:
    found = corpus.read_documents([str(path)], TextRules(), corpus.Skipped(strict=True))
    return [text for document in found for text in document]


def test_an_arrow_file_whose_texts_lie_elsewhere_is_refused(tmp_path: Path) -> None:
    """Offsets of texts that lead out of the file, or backwards: the library itself would read what lies there."""
    texts = ["one text", "a second one", "the third of them"]
    whole = arrow_stream(tmp_path / "a.arrow", texts)
    assert read_texts(tmp_path / "a.arrow") == texts
    offsets = np.cumsum([0, *map(len, texts)], dtype="<i4").tobytes()
    assert whole.count(offsets) == 1
    for wrong in ([0, 8, 20, 1 << 30], [0, 20, 8, 37], [-8, 8, 20, 37]):
        (tmp_path / "a.arrow").write_bytes(whole.replace(offsets, np.array(wrong, "<i4").tobytes()))
        with pytest.raises(DataError, match=r"a\.arrow: not a readable arrow file \(.*[Oo]ffset"):
            read_texts(tmp_path / "a.arrow")


class Asked(io.BufferedReader):
    """Notes how many bytes are asked for at once."""

    most = 0

    def read(self, size: int | None = -1) -> bytes:
        self.most = max(self.most, size or 0)
        return super().read(min(size or 0, 1 << 20))


def test_an_arrow_file_that_says_it_is_long_takes_no_memory(tmp_path: Path) -> None:
    """The length of its first message is two gigabytes, which a read of so many bytes would set aside."""
    whole = arrow_stream(tmp_path / "a.arrow", ["one text"])
    assert whole[:4] == b"\xff" * 4
    file = Asked(io.BytesIO(whole[:4] + (2**31 - 1).to_bytes(4, "little") + whole[8:]))
    with pytest.raises(DataError, match=r"a\.arrow: not a readable arrow file"):
        list(row_files.rows(TextStream("a.arrow", "arrow", file, lambda: 0), ("text",)))
    assert 0 < file.most <= 4 << 20


def test_an_arrow_file_whose_columns_are_no_text(tmp_path: Path) -> None:
    whole = arrow_stream(tmp_path / "a.arrow", ["one text"])
    assert whole.count(b"text") > 1
    (tmp_path / "a.arrow").write_bytes(whole.replace(b"text", b"te\xf8t", 1))
    with pytest.raises(DataError, match=r"a\.arrow: not a readable arrow file"):
        read_texts(tmp_path / "a.arrow")
