"""docs/from: the tables and commands are what the code says today; both languages show the same."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from gptworks.interop import registry
from gptworks.interop.settings import Settings

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "from"
SYSTEMS = ["fleetx", "paddlenlp", "gpt-3", "oneflow", "mindformers", "megatron", "nanogpt"]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tables", FOLDER / "make_tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [f"{system}{ending}" for system in ["README", *SYSTEMS] for ending in (".md", ".zh.md")]
)
def test_pages_are_fresh(maker: ModuleType, name: str) -> None:
    written = (FOLDER / name).read_text(encoding="utf-8")
    assert written == maker.filled(written, name.endswith(".zh.md")), "stale: run `python docs/from/make_tables.py`"


def test_every_system_has_a_page_with_its_commands_and_keys(maker: ModuleType) -> None:
    assert set(registry.NAMES) <= set(maker.COMMANDS) == set(SYSTEMS)
    for system in SYSTEMS:
        text = (FOLDER / f"{system}.md").read_text(encoding="utf-8")
        assert f"<!-- commands: {system} -->" in text and f"<!-- keys: {system} " in text


@pytest.mark.parametrize("system", ["README", *SYSTEMS])
def test_the_translation_has_the_same_commands_and_tables(maker: ModuleType, system: str) -> None:
    ours, theirs = ((FOLDER / f"{system}{ending}").read_text(encoding="utf-8") for ending in (".md", ".zh.md"))

    def commands(text: str) -> list[str]:
        lines = [
            line
            for block in re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
            for line in block.splitlines()
        ]
        return [re.sub(r"\s+#.*", "", line) for line in lines]

    assert commands(theirs) == commands(ours)
    markers = re.compile(r"<!-- (?!end).*? -->")
    assert markers.findall(theirs) == markers.findall(ours)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.md")))
def test_links_lead_somewhere(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    assert targets
    assert [target for target in targets if not (FOLDER / target).exists()] == []


def test_every_key_of_the_code_is_in_its_table(maker: ModuleType) -> None:
    for system in registry.NAMES:
        text = (FOLDER / f"{system}.md").read_text(encoding="utf-8")
        listed = set()
        for cell in re.findall(r"`([^`]+)`", "\n".join(line for line in text.splitlines() if line.startswith("| `"))):
            prefix, braces, rest = cell.partition("{")
            listed |= {prefix + last for last in rest.rstrip("}").split(", ")} if braces else {cell}
        for number, command in enumerate(maker.COMMANDS[system], 1):
            if f"<!-- keys: {system} {number} -->" in text:
                with maker.empty_folder(), maker.watched({}) as made:
                    maker.translation(system, command)
                assert made and all(set(settings.keys) <= listed for settings in made)


def test_what_a_key_becomes_is_asked_of_the_code(maker: ModuleType) -> None:
    with maker.empty_folder():
        rows = {name: rest for names, *rest in maker.rows("fleetx", 1, False) for name in names}
    assert rows["Model.num_layers"] == ["`24`", "`model.num_layers`", ""]
    assert rows["Model.hidden_dropout_prob"][1] == "`model.dropout_hidden`, `model.dropout_embed`"  # by a rule
    assert rows["Generation.num_beams"][1] == "`generate.num_beams`"  # beside decode_strategy only
    assert Settings.__init__.__qualname__ == "Settings.__init__"  # put back


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["a"], "`a`"),
        (["A.b.x", "A.b.y"], "`A.b.{x, y}`"),
        (["A.x", "B.x", "B.y"], "`A.x`, `B.{x, y}`"),
        (["--x", "--y"], "`--x`, `--y`"),
    ],
)
def test_neighbours_share_their_prefix(maker: ModuleType, names: list[str], shown: str) -> None:
    assert maker.together(names) == shown
