"""How large anything may grow: files, functions, lists of parameters. Read from the source itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import gptworks

SOURCE = Path(gptworks.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 80
MOST_PARAMETERS = 8


def functions(text: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function by its dotted name: of modules, of classes, and within functions."""

    def within(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}."
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield name.rstrip("."), child
            yield from within(child, name)

    yield from within(ast.parse(text), "")


def public_names() -> set[str]:
    """What `gptworks` offers to Python programs: their keyword-only parameters are settings that users choose from."""
    return set(gptworks.__all__)


def num_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert function.end_lineno
    return function.end_lineno - function.lineno + 1


def num_parameters(name: str, function: ast.FunctionDef | ast.AsyncFunctionDef, public: set[str]) -> int:
    """Without self and cls. Keyword-only ones of the public API do not count."""
    given = function.args.posonlyargs + function.args.args
    count = len(given) - bool("." in name and given and given[0].arg in {"self", "cls"})
    is_public = name.partition(".")[0] in public and not function.name.strip("_").startswith("_")
    return count if is_public else count + len(function.args.kwonlyargs)


def too_much(text: str, public: set[str]) -> list[str]:
    """What exceeds a budget in one file, in words."""
    length = len(text.splitlines())
    said = [f"{length} lines; at most {MOST_LINES_OF_A_FILE}"] if length > MOST_LINES_OF_A_FILE else []
    for name, function in functions(text):
        if (lines := num_lines(function)) > MOST_LINES_OF_A_FUNCTION:
            said.append(f"{name} has {lines} lines; at most {MOST_LINES_OF_A_FUNCTION}")
        if (count := num_parameters(name, function, public)) > MOST_PARAMETERS:
            said.append(f"{name} has {count} parameters; at most {MOST_PARAMETERS}")
    return said


def test_nothing_is_too_large() -> None:
    public = public_names()
    assert FILES
    said = {str(file.relative_to(SOURCE)): too_much(file.read_text(encoding="utf-8"), public) for file in FILES}
    assert {name: each for name, each in said.items() if each} == {}


# The reader itself

NINE = ", ".join("abcdefghi")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n" * 450, []),
        ("x = 1\n" * 451, ["451 lines; at most 450"]),
        ("def f():\n" + "    x = 1\n" * 79, []),
        ("def f():\n" + "    x = 1\n" * 80, ["f has 81 lines; at most 80"]),
        ("class A:\n    def f(self):\n" + "        x = 1\n" * 80, ["A.f has 81 lines; at most 80"]),
        (f"def f({NINE}): ...", ["f has 9 parameters; at most 8"]),
        (f"def f(a, *, {NINE[3:]}): ...", ["f has 9 parameters; at most 8"]),
        (f"class A:\n    def f(self, {NINE[3:]}): ...", []),
        (f"def f():\n    async def g({NINE}): ...", ["f.g has 9 parameters; at most 8"]),
        (f"def offered(a, *, {NINE[3:]}): ...", []),
        (f"def offered({NINE}): ...", ["offered has 9 parameters; at most 8"]),
        (f"class offered:\n    def f(self, *, {NINE}): ...", []),
    ],
)
def test_what_is_too_large_is_seen(text: str, said: list[str]) -> None:
    assert too_much(text, {"offered"}) == said
