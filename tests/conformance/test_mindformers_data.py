"""MindFormers GPT2's data: what its document promises, in our own words. Rows of the conformance list: S4-..."""

from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import registry
from gptworks.data.formats.contents import Contents

SEQUENCE = 64


@pytest.fixture(scope="module")
def stream(corpus_file: Path, small_tokenizer) -> np.ndarray:
    """The whole text encoded at once, as the document's script does with WikiText-2."""
    return np.array(small_tokenizer.encode(corpus_file.read_text(encoding="utf-8")), np.uint16)


@pytest.mark.parametrize("row", [SEQUENCE + 1, SEQUENCE], ids=["training", "evaluation"])
def test_s4_01_text_cut_into_rows_is_written_and_read_as_mindrecord(
    stream: np.ndarray, row: int, tmp_path: Path
) -> None:
    """Rows of S + 1 to train and of S to evaluate, one after the other and sharing no token; the rest is dropped."""
    count = len(stream) // row
    needed = stream[: count * row].reshape(count, row)
    assert count > 100
    cut = Contents(needed.reshape(-1), np.full(count, row), np.arange(count + 1), is_rows=True)
    registry.FORMATS["mindrecord"].write(tmp_path / "wiki", cut, 512)
    located = registry.locate(tmp_path / "wiki")
    assert [file.name for file in located.files] == ["wiki.mindrecord", "wiki.mindrecord.db"]
    contents = located.format.read(located.main)
    assert contents.is_rows
    assert contents.num_documents == count
    assert contents.sizes.tolist() == [row] * count
    assert np.array_equal(contents.tokens[:].reshape(count, row), needed)
    assert contents.tokens[5 * row : 6 * row].tolist() == needed[5].tolist()
