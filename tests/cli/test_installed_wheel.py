"""A wheel of this tree, installed where nothing of it is, prepares, trains and writes text in an empty folder."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODEL = ["model.num_layers=1", "model.hidden_size=16", "model.num_heads=2", "model.max_positions=32"]
REST = ["data.seq_len=16", "batch.global_size=2", "train.steps=2", "run.device=cpu", "run.threads=1"]


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building leaves files in the tree. Nothing is asked of the network."""
    tree = tmp_path_factory.mktemp("wheel") / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.so")
    shutil.copytree(ROOT / "src", tree / "src", ignore=left_out)
    pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", tree.parent, tree)
    (found,) = tree.parent.glob("gptworks-*.whl")
    return found


def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    source = ROOT / "src"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("gptworks/")}
    made_here = {"__pycache__", ".so"}
    needed = {
        file.relative_to(source).as_posix()
        for file in (source / "gptworks").rglob("*")
        if file.is_file() and not made_here & {file.suffix, *file.parts}
    }
    assert {"gptworks/plan/devices.toml", "gptworks/generate/kernels/read.cpp", "gptworks/py.typed"} <= needed
    assert packed == needed


@pytest.mark.slow
def test_it_prepares_trains_and_generates_in_an_empty_folder(wheel: Path, tmp_path: Path, corpus_file: Path) -> None:
    site, here = tmp_path / "site", tmp_path / "empty"
    here.mkdir()
    pip("install", "--no-deps", "--no-index", "--target", site, wheel)
    shutil.copy(corpus_file, here / "text.txt")
    # torch and the other libraries are those of this environment; of gptworks there is only what was installed.
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def run(*command: str | Path) -> str:
        done = subprocess.run(
            [str(word) for word in command],
            cwd=here, env=environment, capture_output=True, text=True, encoding="utf-8", check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run(sys.executable, "-c", "import gptworks; print(gptworks.__file__)")
    assert Path(where.strip()).is_relative_to(site)
    gptworks = site / "bin" / "gptworks"
    run(gptworks, "prepare", "text.txt", "--train-tokenizer", "300", "--append-eod", "--out", "data/text")
    trained = run(gptworks, "train", "--out", "run", "data.path=data/text", "model.vocab_size=300", *MODEL, *REST)
    assert "done: 2 steps" in trained
    said = run(gptworks, "generate", "--model", "run", "--prompt", "the", "--max-new-tokens", "3")
    assert said.startswith("the")
    assert sorted(path.name for path in here.iterdir()) == ["data", "run", "text.txt"]
