"""Imports point one way, and some packages never import some others: read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gptworks

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(gptworks.__file__).parent
# errors < model_hub < cpu < config < architecture < tokenizer, plan, model < ...: imports come from lower levels only.
LEVELS = [
    {"errors", "callable_package", "file_errors", "counted", "run_paths", "tokenizer_files", "compilers"},
    {"folder_lock"},
    {
        "model_hub",
        "staging_folder",
        "child_process",
        "pickle_values",
        "python_words",
        "text_table",
        "limits",
        "durable",
        "json_text",
    },
    {"cpu", "safe_pickle"},
    {"config"},
    {"architecture", "optimizer_state"},
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
        elif isinstance(node, ast.Call) and _imports_by_string(node) and node.args:
            yield node.lineno, _beginning(node.args[0])


def _imports_by_string(call: ast.Call) -> bool:
    """Also through a function of our own that is called so, such as _module("tensor")."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in {"import_module", "__import__", "run_module", "_module", "load_module"}


def _beginning(name: ast.expr) -> str:
    """As much of the name of a module as can be read; ? where it is not known before the program runs."""
    if isinstance(name, ast.Constant):
        return str(name.value)
    if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
        return f"{name.values[0].value}?"
    return "?"


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


# Where modules are found by a name that only the running program knows, and why that is safe.
BY_STRING = {
    "__init__.py": "the front door: public names, resolved when they are asked for",
    "callable_package.py": "packages of the front door that are also functions",
    "evaluate/registry.py": "every file of evaluate/tasks",
    "interop/registry.py": "a file of interop, by the name of its system",
    "checkpoint/systems/registry.py": "a file of checkpoint/systems, by the name of its system",
    "export/registry.py": "a file of export, by the name of its target",
    "export/contract.py": "libraries of others that an extra installs",
    "launch/fork_server.py": "what the ranks will import anyway, before they are forked",
    "launch/rank_process.py": "the module that the user starts, as python -m does",
}


def imported_by_string(file: Path, source: Path = SOURCE) -> list[str]:
    return [f"{file.relative_to(source)}:{line}: {name}" for line, name in imports(file, source) if "?" in name]


def module_name(file: Path, source: Path = SOURCE) -> str:
    parts = ("gptworks", *file.relative_to(source).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def graph_of(files: list[Path], source: Path = SOURCE) -> dict[str, set[str]]:
    """Module -> modules that it imports, anywhere in the file. A package stands for its __init__ alone, and the front
    door is left out: it names what is inside."""
    known = {module_name(file, source): file for file in files}
    graph: dict[str, set[str]] = {name: set() for name in known}
    for module, file in known.items():
        for _, name in imports(file, source):
            while name and name not in known:
                name = name.rpartition(".")[0]
            if name not in {"", "gptworks", module}:
                graph[module].add(name)
    return graph


def cycles_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """Modules that reach each other, in groups."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    reached = {module: reach(module) for module in graph}
    groups = {tuple(sorted(o for o in reached[m] if m in reached[o])) for m in graph if m in reached[m]}
    return sorted(list(group) for group in groups)


def starts_with(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def test_every_package_has_a_level() -> None:
    found = {package_of(file) for file in FILES} - {"__init__", "__main__"}
    assert {"errors", "config", "model", "train", "cli"} <= found
    assert found <= LEVEL.keys()


def test_contributing_tells_the_whole_order() -> None:
    order = " <\n".join(", ".join(sorted(names)) for names in LEVELS)
    assert f"```\n{order}\n```" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["README.md", "README.zh.md"])
def test_the_tree_of_the_readme_is_complete(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    tree = text[text.index("src/gptworks/\n") : text.index("\ntests/ ")]
    needed = {f"{name}/" if (SOURCE / name).is_dir() else f"{name}.py" for name in map(package_of, FILES)}
    assert sorted(name for name in needed - {"__init__.py", "__main__.py"} if name not in tree) == []


def test_imports_point_one_way() -> None:
    assert [problem for file in FILES for problem in wrong_directions(file)] == []


def test_modules_are_imported_by_string_where_it_is_listed_only() -> None:
    by_string = {str(file.relative_to(SOURCE)): found for file in FILES if (found := imported_by_string(file))}
    assert {name: found for name, found in by_string.items() if name not in BY_STRING} == {}


def test_no_package_has_a_cycle_within() -> None:
    assert cycles_of(graph_of(FILES)) == []


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
        ("architecture", ("torch", "numpy")),
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
                light = (
                    "gptworks.counted",
                    "gptworks.run_paths",
                    "gptworks.text_table",
                    "gptworks.evaluate.registry",
                    "gptworks.evaluate.task",
                )  # help is written from them
                allowed = ("gptworks.cli", "gptworks.errors", "gptworks.python_words", *light)
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
        ("import_module(f'gptworks.cli.{name}')", True),
        ("_module('gptworks.train.run')", True),
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


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("import_module(f'gptworks.parallel.{name}')", True),
        ("importlib.import_module(name)", True),
        ("__import__(name)", True),
        ("_module(name)", True),
        ("import_module('gptworks.errors')", False),
    ],
)
def test_an_import_by_string_is_seen(text: str, seen: bool, tmp_path: Path) -> None:
    file = tmp_path / "gpt.py"
    file.write_text(text)
    assert bool(imported_by_string(file, tmp_path)) is seen


def test_a_cycle_is_seen(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    texts = {"a": "from gptworks.model import b", "b": "def f():\n    import gptworks.model.c", "c": "from . import a"}
    files = [tmp_path / "model" / f"{name}.py" for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    assert cycles_of(graph_of(files, tmp_path)) == [["gptworks.model.a", "gptworks.model.b", "gptworks.model.c"]]
    files[2].write_text("import torch")
    assert cycles_of(graph_of(files, tmp_path)) == []
