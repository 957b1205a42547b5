"""Temporary files have private modes and names that nobody can guess; what is run lies where nobody else can write."""

import ast
from pathlib import Path

import pytest

import gptworks
from gptworks.generate import kernel_library
from gptworks.interop.native_command import write_config
from gptworks.interop.translation import Translation

SOURCE = Path(gptworks.__file__).parent


def calls(file: Path) -> set[str]:
    """Dotted names of all that a file calls."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
    return found


def test_no_name_in_the_temporary_folder_is_made_by_hand() -> None:
    """mktemp gives a name that another may take first; gettempdir invites to put one together."""
    wrong = {"tempfile.mktemp", "tempfile.gettempdir", "os.tempnam", "os.tmpnam"}
    assert {str(file) for file in SOURCE.rglob("*.py") if calls(file) & wrong} == set()
    written = [file.name for file in SOURCE.rglob("*.py") if '"/tmp' in file.read_text(encoding="utf-8")]
    assert written == []


def test_a_link_in_the_way_of_a_configuration_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write into the folder could lay out a link under the name that is written next."""
    monkeypatch.setattr("os.getpid", lambda: 4711)
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / ".x.gptworks.yaml.4711").symlink_to(tmp_path / "victim")
    translation = Translation(system="megatron", program="x.py", verb="train", config={"run.out": "runs/x"})
    write_config(translation, tmp_path / "x.gptworks.yaml")
    assert (tmp_path / "victim").read_text() == "untouched"
    assert 'out: "runs/x"' in (tmp_path / "x.gptworks.yaml").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".x.gptworks.yaml.4711", "victim", "x.gptworks.yaml"]


@pytest.mark.parametrize(("mode", "shown"), [(0o777, "drwxrwxrwx"), (0o770, "drwxrwx---")])
def test_a_library_is_not_taken_from_a_folder_that_others_can_write(
    mode: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel_library.cxx_compilers():
        pytest.skip("no C++ compiler here")
    monkeypatch.setenv("GPTWORKS_HOME", str(tmp_path))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(mode)
    with pytest.raises(PermissionError, match=rf"kernels belongs to user .* mode {shown}: others could have put"):
        kernel_library.built(
            kernel_library.cxx_compilers()[0], kernel_library.INSTRUCTION_SETS[-1], lambda functions: iter(())
        )
