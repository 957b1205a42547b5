"""Text that every Python carries."""

import sysconfig
from pathlib import Path

import pytest

from gptworks.data import sample_corpus
from gptworks.errors import DataError


@pytest.fixture(autouse=True)
def nothing_remembered():
    """A reading is kept for the life of a process; here each test reads for itself."""
    sample_corpus.documents.cache_clear()
    yield
    sample_corpus.documents.cache_clear()


@pytest.fixture
def library(tmp_path: Path, monkeypatch) -> Path:
    """A small standard library in place of the real one, which takes seconds to read."""
    files = {
        "alpha.py": '"""About alpha."""\ndef run():\n    """Runs it."""\nclass Thing:\n    """One.\n\n    More."""\n',
        "beta/__init__.py": "x = 1\n",
        "beta/gamma.py": 'async def wait():\n    """Waits."""\n',
        "bad_syntax.py": "def (:\n",
        "latin.py": '"""Caf\xe9."""\n',
        "test/test_alpha.py": '"""Not wanted."""\n',
        "site-packages/other.py": '"""Not wanted."""\n',
        "beta/tests/test_gamma.py": '"""Not wanted."""\n',
        "notes.txt": "Not wanted.",
    }
    for name, text in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="latin-1")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib") if name == "stdlib" else None)
    return tmp_path / "lib"


def test_docs_are_the_language_reference_and_docstrings(library: Path) -> None:
    documents = list(sample_corpus.documents("sample:python-docs"))
    assert "alpha\n\nAbout alpha.\n\nrun\n\nRuns it.\n\nThing\n\nOne.\n\nMore.\n" in documents
    assert "wait\n\nWaits.\n" in documents
    assert "latin\n\nCaf\ufffd.\n" in documents
    topics = [text for text in documents if text.startswith('The "import" statement')]
    assert len(topics) == 1 and "module" in topics[0]
    assert sum(len(text) for text in documents) > 300_000
    assert not any("Not wanted" in text for text in documents)
    assert all(text.strip() for text in documents)


def test_order_is_fixed_and_mixed(library: Path) -> None:
    once = list(sample_corpus.documents("sample:python-docs"))
    sample_corpus.documents.cache_clear()
    again = list(sample_corpus.documents("sample:python-docs"))
    assert once == again
    assert once != sorted(once)
    places = [i for i, text in enumerate(once) if text.startswith(("alpha", "wait", "latin"))]
    assert places != list(range(len(once) - 3, len(once))), "docstrings stand in one block behind the topics"


def test_sources_are_whole_files(library: Path) -> None:
    documents = set(sample_corpus.documents("sample:python-source"))
    assert "x = 1\n" in documents and "def (:\n" in documents
    assert len(documents) == 5


def test_python_is_the_language_reference_and_the_sources(library: Path) -> None:
    documents = set(sample_corpus.documents("sample:python"))
    assert documents > set(sample_corpus.documents("sample:python-source"))
    assert any(text.startswith('The "import" statement') for text in documents)
    assert "wait\n\nWaits.\n" not in documents  # the source has it


@pytest.mark.slow
def test_the_real_library_is_large_enough_to_train_on() -> None:
    sizes = [len(text) for text in sample_corpus.documents("sample:python-source")]
    assert len(sizes) > 400 and sum(sizes) > 5_000_000


@pytest.mark.parametrize("name", ["sample:", "sample:pyton", "sample:PYTHON-DOCS"])
def test_no_such_sample(name: str) -> None:
    with pytest.raises(
        DataError, match=f"{name}: no such sample. Samples: sample:python, sample:python-docs, sample:python-source."
    ):
        list(sample_corpus.documents(name))


def test_python_without_a_library_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "gone"))
    with pytest.raises(DataError, match=f"has no library folder at {tmp_path / 'gone'}"):
        list(sample_corpus.documents("sample:python-docs"))
