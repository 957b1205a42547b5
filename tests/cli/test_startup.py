"""What is imported when: help and config errors must answer at once."""

import subprocess
import sys
from pathlib import Path

import pytest

import gptworks

HEAVY = (
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "pydantic",
    "rich",
    "numpy",
    "tokenizers",
    "yaml",
    "transformers",
    "safetensors",
)


def imported(code: str, *args: str) -> set[str]:
    """Which of the heavy packages a new process has imported after running the code."""
    report = f"""
import sys
try:
    exec({code!r})
except SystemExit as end:
    assert not end.code, end.code
print("IMPORTED", *(name for name in {HEAVY!r} if name in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", report, *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


MAIN = "from gptworks.cli.main import main; assert main(sys.argv[1:]) == 0"


@pytest.mark.parametrize("args", [["--help"], ["train", "--help"], ["--version"], ["completion", "bash"]])
def test_help_imports_nothing_heavy(args: list[str]) -> None:
    assert imported(MAIN, *args) == set()


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert imported("import gptworks; gptworks.__version__; dir(gptworks)") == set()


def test_config_show_does_not_import_torch(recipe: Path) -> None:
    for args in (["show", "-c", str(recipe)], ["check", "-c", str(recipe)], ["schema"], ["presets"]):
        found = imported(MAIN, "config", *args)
        assert "pydantic" in found
        assert not found & {"torch", "numpy", "rich", "tokenizers", "transformers"}, args


def test_the_control_group() -> None:
    """The way of looking does see torch when it is there."""
    assert {"torch", "pydantic"} <= imported("import gptworks; gptworks.GPT")


@pytest.mark.slow
def test_reading_a_checkpoint_alone_does_without_the_tools_of_many_ranks() -> None:
    """They take half as long to import as torch itself."""
    found = imported("import gptworks.checkpoint.pretrained, gptworks.generate.text")
    assert "torch" in found and "torch.distributed.tensor" not in found


FIRST_STEP = """
import sys
from gptworks.checkpoint import folder
from gptworks.cli.main import main

def save(*args, **kwargs):
    sys.exit()

folder.CheckpointFolder.save = save
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_first_step_is_done_without_what_only_checkpoints_and_compilers_need(recipe: Path, tmp_path: Path) -> None:
    """Together they take as long to import as torch itself."""
    found = imported(FIRST_STEP, "train", "-c", str(recipe), "train.steps=1", "--out", str(tmp_path / "run"))
    assert "loss" in (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "torch" in found and not found & {"torch.distributed.tensor", "torch._dynamo"}


def test_version() -> None:
    done = subprocess.run([sys.executable, "-m", "gptworks", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"gptworks {gptworks.__version__}\n"


def test_help_names_every_verb() -> None:
    from gptworks.cli.main import VERBS

    done = subprocess.run([sys.executable, "-m", "gptworks", "--help"], capture_output=True, text=True, check=True)
    words = " ".join(done.stdout.split())  # a long name has a line of its own
    for name, module in VERBS.items():
        assert f" {name} {module.HELP}" in words


def test_an_unknown_public_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'Trainr'. Public names: GPT, "):
        gptworks.Trainr  # noqa: B018
