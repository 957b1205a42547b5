"""Every shell block of the README, the tutorial and the how-to for data is run, in order, in one empty folder."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ["docs/tutorial.md", "docs/howto/prepare.md"]
BLOCK = re.compile(r"^```shell\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
# What a test cannot do again: make targets (run outside pytest), and getting the code and installing it.
NOT_RUN = re.compile(
    r"(make\b|git clone\b|cd gptworks\b|python3? -m venv\b|(source|\.) \S*activate\b|(python3? -m )?pip install\b|uv )"
)


def commands(block: str) -> list[str]:
    """The commands of a block, each with its continuation lines, without those that are not run here."""
    found = block.replace("\\\n", "\\\0").splitlines()
    kept = [line.replace("\\\0", "\\\n") for line in found if not NOT_RUN.match(line.strip())]
    return kept if any(line.strip() and not line.strip().startswith("#") for line in kept) else []


def blocks(document: str) -> list[tuple[int, str]]:
    """(line number, text) of the blocks that have something to run."""
    text = (ROOT / document).read_text(encoding="utf-8")
    found = [(text.count("\n", 0, match.start()) + 1, commands(match["text"])) for match in BLOCK.finditer(text)]
    return [(line, "\n".join(kept)) for line, kept in found if kept]


def run_all(document: str, folder: Path) -> str:
    """What went wrong, if anything."""
    shutil.copytree(ROOT / "recipes", folder / "recipes")
    # The command line of this environment comes first.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    to_run = blocks(document)
    if not to_run:
        return f"{document} has no ```shell block with a command in it"
    for line, text in to_run:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=folder,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
            encoding="utf-8",
            check=False,
        )
        if done.returncode != 0:
            said = f"--- stdout\n{done.stdout}\n--- stderr\n{done.stderr}"
            return f"{document}:{line}: exit {done.returncode}\n{text}\n{said}"
    return ""


@pytest.mark.parametrize("document", ["README.md", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_shell_block_runs(document: str, tmp_path: Path) -> None:
    wrong = run_all(document, tmp_path)
    assert not wrong, wrong


@pytest.mark.parametrize("document", ["README", "docs/tutorial", "docs/howto/prepare"])
def test_the_translation_has_the_same_commands(document: str) -> None:
    ours, theirs = ([text for _, text in blocks(document + ending)] for ending in (".md", ".zh.md"))

    def bare(texts: list[str]) -> list[str]:
        return [re.sub(r"\s*#.*", "", line) for text in texts for line in text.splitlines() if line.strip()]

    assert bare(theirs) == bare(ours)


# The reader of blocks itself


@pytest.mark.parametrize(
    ("block", "run"),
    [
        ("make quickstart\n", []),
        ("git clone https://example.org/gptworks\ncd gptworks\nmake test\n", []),
        ("pip install -e .\n", []),
        ("python3 -m venv .venv && . .venv/bin/activate\n.venv/bin/pip install x\n", [".venv/bin/pip install x"]),
        ("# only a remark\n", []),
        ("gptworks config \\\n  show\nmake clean\necho x", ["gptworks config \\\n  show", "echo x"]),
        ("makeshift\n", ["makeshift"]),
    ],
)
def test_what_is_run(block: str, run: list[str]) -> None:
    assert commands(block) == run
