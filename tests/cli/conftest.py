"""A tiny model that trains in a moment, and the command line in this process: a new one imports torch for seconds."""

import contextlib
import io
import json
import shlex
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

RECIPE = """\
model:
  num_layers: 2
  hidden_size: 32
  num_heads: 2
  vocab_size: 512
  max_positions: 32
data:
  path: {store}
  split: '90,10'
  seq_len: 16
batch:
  global_size: 4
  micro_size: 2
optim:
  lr: 3e-3
train:
  steps: 6
  log_every: 1
checkpoint:
  every: 2
evaluate:
  every: 0
run:
  device: cpu
  threads: 1
"""


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The recipe's one thread is for its own run."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def run_main(*args: str | Path) -> Done:
    from gptworks.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as end:  # argparse
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="session")
def call() -> Callable[..., Done]:
    """call("train", ..., expect=0): one command in this process."""

    def run(*args: str | Path, expect: int = 0) -> Done:
        done = run_main(*args)
        assert done.code == expect, (
            f"gptworks {shlex.join(map(str, args))}: exit {done.code}, expected {expect}\n"
            f"--- stdout\n{done.out}\n--- stderr\n{done.err}"
        )
        return done

    return run


@pytest.fixture(scope="session")
def recipe(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 layers x 32, sequences of 16, batches of 4 in two micro-batches, 6 steps, saved every 2."""
    path = tmp_path_factory.mktemp("recipe") / "tiny.yaml"
    path.write_text(RECIPE.format(store=small_store))
    return path


@pytest.fixture(scope="session")
def _finished(recipe: Path, call: Callable[..., Done], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("finished") / "run"
    call("train", "-c", recipe, "--out", out)
    return out


@pytest.fixture
def finished(_finished: Path, tmp_path: Path) -> Path:
    """A copy of a run of the recipe that has come to its end, to do anything with."""
    return Path(shutil.copytree(_finished, tmp_path / "finished"))


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """The lines of a run, without those numbers that depend on the clock."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return [
            {
                k: v
                for k, v in line.items()
                if k not in {"tokens_per_sec", "mfu", "memory"} and not k.endswith("_seconds")
            }
            for line in lines
        ]

    return read


@pytest.fixture(scope="session")
def checked() -> Callable[[Path], int]:
    """The step of a run's newest checkpoint, after a check that it is whole."""

    def check(run: Path) -> int:
        from gptworks.checkpoint import manifest
        from gptworks.checkpoint.folder import CheckpointFolder

        latest = CheckpointFolder(run).latest()
        assert latest is not None
        found = manifest.read(latest)
        manifest.verify(latest, found)
        return found.step

    return check
