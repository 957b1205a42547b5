"""Text that every Python installation already carries: enough English to try everything without a download."""

import ast
import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

from gptworks.errors import DataError

PREFIX = "sample:"
NAMES = ("python", "python-docs", "python-source")


def check(name: str) -> None:
    if name.removeprefix(PREFIX) not in NAMES:
        raise DataError(f"{name}: no such sample. Samples: {', '.join(PREFIX + n for n in NAMES)}.")


@cache  # a vocabulary is learned from it and then it is tokenized: one reading serves both
def documents(name: str) -> tuple[str, ...]:
    """python-docs: the language reference and the library's docstrings; python-source: its sources; python: the
    language reference and the sources (which have the docstrings in them)."""
    check(name)
    kind = name.removeprefix(PREFIX)
    texts = [] if kind == "python-source" else list(_topics())
    if kind == "python-docs":
        texts += [text for path in _library_files() for text in _docstrings(path)]
    else:
        texts += [path.read_text(encoding="utf-8", errors="replace") for path in _library_files()]
    # Mixed by hash, so that a split by documents gives parts that resemble each other.
    return tuple(sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest()))


def _topics() -> Iterator[str]:
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name].strip() + "\n"


def _library_files() -> list[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    if not library.is_dir():
        raise DataError(f"{PREFIX}python: this Python ({sys.executable}) has no library folder at {library}.")
    skip = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "__pycache__"}
    return sorted(path for path in library.rglob("*.py") if not skip & set(path.relative_to(library).parts))


def _docstrings(path: Path) -> Iterator[str]:
    """One document per module: every docstring in it, each under the name of what it documents."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
    except SyntaxError:
        return  # the library ships a few files that are broken on purpose
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                title = path.stem if isinstance(node, ast.Module) else node.name
                parts.append(f"{title}\n\n{text}\n")
    if parts:
        yield "\n".join(parts)
