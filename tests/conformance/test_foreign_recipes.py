"""Recipes in the words of other systems and in ours: what a command is translated to is the recipe beside it."""

from pathlib import Path

import foreign_runs as foreign
import pytest

from gptworks.config.load import from_dict, load

FOLDER = Path(__file__).resolve().parents[2] / "recipes" / "foreign"
COMMANDS = sorted(FOLDER.glob("*/command_*.txt"))


def test_s1_04_the_recipes_of_the_documents_scripts_are_here() -> None:
    names = {f"{file.parent.name}/{file.stem}" for file in COMMANDS}
    assert {"oneflow/command_117M", "oneflow/command_345M", "oneflow/command_1n8d_2x4x1"} <= names


@pytest.mark.parametrize("file", COMMANDS, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_s1_04_the_recipe_is_what_the_command_means(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = file.with_name(file.name.replace("command_", "gptworks_")).with_suffix(".yaml")
    found = foreign.translate(capsys, file.read_text(encoding="utf-8"), "--cwd", str(tmp_path))["config"]
    assert from_dict(found) == load(recipe)
