"""Imports point one way, and some packages never import some others: read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gptworks

SOURCE = Path(gptworks.__file__).parent
# errors < names, safe_pickle < cpu < config < tokenizer, plan, model < ...: a package imports from lower levels only.
LEVELS = [
    {"errors", "callable_package", "file_errors", "counted"},
    {"folder_lock"},
    {"names", "staging_folder", "child_process", "safe_pickle", "python_words", "limits", "durable", "json_text"},
    {"cpu"},
    {"config"},
    {"tokenizer", "plan", "model"},
    {"data", "launch"},
    {"parallel"},
    {"checkpoint"},
    {"generate"},
    {"evaluate"},
    {"export"},
    {"train"},
    {"api"},
    {"simulate", "verify", "report"},
    {"doctor", "interop"},
    {"serve", "compat"},
    {"cli"},
]
LEVEL = {name: number for number, names in enumerate(LEVELS) for name in names}
FILES = sorted(SOURCE.rglob("*.py"))


def package_of(file: Path, source: Path = SOURCE) -> str:
    return file.relative_to(source).parts[0].removesuffix(".py")


def imports(file: Path, source: Path = SOURCE) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of all imports, those inside functions and under TYPE_CHECKING too."""
    here = ("gptworks", *file.relative_to(source).parent.parts)
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", "")) in {"import_module", "__import__"}
            and node.args
            and isinstance(node.args[0], ast.Constant)
        ):
            yield node.lineno, str(node.args[0].value)


def wrong_directions(file: Path, source: Path = SOURCE) -> list[str]:
    mine = package_of(file, source)
    if mine in {"__init__", "__main__"}:  # the front door: it names what is inside, lazily
        return []
    wrong = []
    for line, name in imports(file, source):
        parts = name.split(".")
        if parts[0] != "gptworks" or parts[1] not in LEVEL or parts[1] == mine:
            continue
        if LEVEL[parts[1]] >= LEVEL[mine]:
            wrong.append(f"{file.relative_to(source)}:{line}: {mine} imports {name}")
    return wrong


def starts_with(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def test_every_package_has_a_level() -> None:
    found = {package_of(file) for file in FILES} - {"__init__", "__main__"}
    assert {"errors", "config", "model", "train", "cli"} <= found
    assert found <= LEVEL.keys()


def test_imports_point_one_way() -> None:
    assert [problem for file in FILES for problem in wrong_directions(file)] == []


def test_only_parallel_splits_and_shards() -> None:
    forbidden = ("torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed.pipelining")
    wrong = [
        f"{file.relative_to(SOURCE)}:{line}: {name}"
        for file in FILES
        if package_of(file) != "parallel"
        for line, name in imports(file)
        if starts_with(name, *forbidden) and not name.endswith("._clear_sharding_prop_cache")  # at the end of a group
    ]
    assert wrong == []


def test_only_launch_creates_a_process_group() -> None:
    wrong = [
        str(file.relative_to(SOURCE))
        for file in FILES
        if "init_process_group" in file.read_text(encoding="utf-8") and file != SOURCE / "launch" / "process_group.py"
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("model", ("torch.distributed",)),
        ("config", ("torch", "numpy")),
        ("plan", ("torch",)),
        ("errors", ("torch", "pydantic", "numpy")),
    ],
)
def test_what_a_package_never_imports(package: str, forbidden: tuple[str, ...]) -> None:
    files = [file for file in FILES if package_of(file) == package]
    assert files
    wrong = [
        f"{file}:{line}: {name}" for file in files for line, name in imports(file) if starts_with(name, *forbidden)
    ]
    assert wrong == []


def test_verbs_import_heavy_packages_inside_functions_only() -> None:
    wrong = []
    for file in FILES:
        if package_of(file) != "cli":
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
                allowed = ("gptworks.cli", "gptworks.counted", "gptworks.errors", "gptworks.python_words")
                wrong += [
                    f"{file.name}:{node.lineno}: {name}"
                    for name in names
                    if name != "gptworks" and not starts_with(name, *allowed) and not _is_standard(name)
                ]
    assert wrong == []


def _is_standard(name: str) -> bool:
    import sys

    return name.partition(".")[0] in sys.stdlib_module_names


def test_no_file_is_a_drawer_for_odds_and_ends() -> None:
    banned = {"utils", "util", "common", "helpers", "helper", "misc", "manager"}
    names = {part.removesuffix(".py") for file in FILES for part in file.relative_to(SOURCE).parts}
    assert not names & banned


# The reader of imports itself


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("import gptworks.cli.main", True),
        ("from gptworks.cli import main", True),
        ("from gptworks import cli", True),
        ("from ..cli import main", True),
        ("from .. import cli", True),
        ("def f():\n    from gptworks.cli.main import main", True),
        ("if TYPE_CHECKING:\n    import gptworks.train.run", True),
        ("import_module('gptworks.cli.main')", True),
        ("from gptworks.plan import sizes", True),
        ("from gptworks.config.schema import ModelConfig", False),
        ("from gptworks.model.loss import IGNORED", False),
        ("import torch", False),
        ("# from gptworks.cli import main", False),
    ],
)
def test_a_wrong_import_is_seen(text: str, seen: bool, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "gpt.py"
    file.write_text(text)
    assert bool(wrong_directions(file, tmp_path)) is seen
