"""Fixtures for every test: a small text, a store made of it, the command line, and the real data when it is here."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No test may reach for the network, in this process or in one it starts.
os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"})
# Tiny models gain nothing from a second thread, and on a busy machine threads that wait for each other lose much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# The width of the terminal that the tests were started from is not theirs; tables are shaped by it.
os.environ.pop("COLUMNS", None)

# A shell that starts the tests in the background has Ctrl-C ignored, by them and by all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A test that hangs is ended with the stacks of its processes; one that fails shows its commands and logs; files that
# take long come first.
pytest_plugins = ["time_limit", "failure_report", "longest_first"]

# The same examples on every run: a failure in a build can be repeated at a desk. `make test` takes the few.
settings.register_profile("few", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("many", deadline=None, derandomize=True, max_examples=250)
settings.load_profile("few")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session", autouse=True)
def safe_products():
    """Tests multiply with torch directly: what that would die of is found out before, as our own code does it.

    None where no test that was collected needs torch.
    """
    from gptworks import cpu

    return cpu.settle() if "torch" in sys.modules else None


@pytest.fixture(scope="session")
def corpus_file() -> Path:
    """About 70 KB of English in 160 documents with blank lines between them."""
    return Path(__file__).parent / "fixtures" / "corpus.txt"


@pytest.fixture(scope="session")
def small_tokenizer(corpus_file: Path):
    """A byte-level BPE of 512 tokens learned from the corpus; its last id ends a document."""
    from gptworks.data import prepare
    from gptworks.data.text_blocks import TextRules

    return prepare.train_tokenizer([str(corpus_file)], 512, TextRules())


@pytest.fixture(scope="session")
def small_store(corpus_file: Path, small_tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a store of the corpus: 160 documents, each with its end marked. Read it, never write to it."""
    from gptworks.data import prepare
    from gptworks.data.text_blocks import TextRules

    prefix = tmp_path_factory.mktemp("small_store") / "small"
    rules = TextRules(keep_separator=False)
    prepare.prepare(prepare.PrepareJob([str(corpus_file)], prefix, small_tokenizer, rules=rules, append_eod=True))
    return prefix


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Real data beside the repository: other people's corpora, vocabularies and files."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the real data is not here: ../shared/data is missing beside the repository")
    return folder


@pytest.fixture(scope="session")
def held_port() -> Iterator[Callable[[], int]]:
    """held_port(): a port at which nobody listens, and which the system gives to no test that runs beside this one."""
    from gptworks.launch.nodes import HeldPort

    with ExitStack() as held:

        def hold() -> int:
            port = HeldPort()
            held.callback(port.close)
            return port.number

        yield hold


@pytest.fixture(scope="session")
def run_cli(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """run_cli("config", "show", expect=0): the command line in a process of its own."""
    from command_copies import Command, nothing

    folder = tmp_path_factory.mktemp("printed")

    def run(
        *args: str | Path,
        expect: int = 0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        before: Callable[[], Any] = nothing,
    ) -> subprocess.CompletedProcess[str]:
        command = Command([str(arg) for arg in args], folder, cwd=cwd, env=env, before=before)
        try:
            out, err = command.communicate()
        finally:
            command.kill()
        code = command.wait()
        assert code == expect, (
            f"{' '.join(command.args)}: exit {code}, expected {expect}\n--- stdout\n{out}\n--- stderr\n{err}"
        )
        return subprocess.CompletedProcess(command.args, code, out, err)

    return run
