"""Megatron's dataset files, as OneFlow's document uses them. Rows of the conformance list: S1-02."""

from pathlib import Path

import numpy as np
import pytest

from gptworks.data.formats import registry
from gptworks.data.store import Store

FIXTURES = Path(__file__).parents[1] / "fixtures" / "datasets"
IMPLEMENTATIONS = {
    "mmap": ("megatron", b"MMIDIDX\0\0"),
    "cached": ("tnt", b"TNTIDX\0\0"),
    "lazy": ("tnt", b"TNTIDX\0\0"),
}


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_s1_02_every_dataset_impl_is_written_and_read(impl: str, small_store: Path, tmp_path: Path) -> None:
    name, magic = IMPLEMENTATIONS[impl]
    source = Store(small_store)
    bin_, idx = registry.FORMATS[name].write(tmp_path / "x_text_document", source.contents, 512)
    assert (bin_.name, idx.name) == ("x_text_document.bin", "x_text_document.idx")
    assert idx.read_bytes().startswith(magic)
    found = Store(tmp_path / "x_text_document")
    assert name == found.located.format.NAME
    assert np.array_equal(found.tokens[:], source.tokens[:])
    assert np.array_equal(found.document_starts, source.document_starts) and found.num_documents == 160


def test_s1_02_mmap_output_has_the_bytes_of_megatron_cores_writer(tmp_path: Path) -> None:
    theirs = Store(FIXTURES / "megatron_mmap")
    for file in registry.FORMATS["megatron"].write(tmp_path / "megatron_mmap", theirs.contents, 50257):
        assert file.read_bytes() == (FIXTURES / file.name).read_bytes()


def test_s1_02_lazy_files_of_others_are_read() -> None:
    assert Store(FIXTURES / "paddlenlp_lazy").tokens[:].tolist() == [1, 70000, 3, 2147483647, 0]
