"""gptworks as others start it, and the ways to end it."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from load_clock import LoadClock

from soak.campaign import Found, require

TESTS = Path(__file__).resolve().parents[1]
CORPUS = TESTS / "fixtures" / "corpus.txt"
LONGEST = 400.0  # seconds that any one command may take, without those that it waits for a core: else it hangs
NOT_COMPARED = {"tokens_per_sec", "mfu", "memory"}

ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def plant(fault: str) -> None:
    """Every Python that is started from now on has this fault: a module that Python imports before anything else."""
    folder = Path(__file__).parent / "planted" / fault
    if not folder.is_dir():
        raise SystemExit(
            f"no fault {fault!r}. Faults: {', '.join(sorted(each.name for each in folder.parent.iterdir()))}"
        )
    ENVIRONMENT["PYTHONPATH"] = str(folder)
    os.environ["PYTHONPATH"] = str(folder)  # of what is started by other means


def _recipe() -> str:
    """The tiny recipe of the tests of the command line."""
    spec = importlib.util.spec_from_file_location("cli_conftest", TESTS / "cli" / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cli_conftest"] = module
    spec.loader.exec_module(module)
    return module.RECIPE


RECIPE = _recipe()


@dataclass(frozen=True)
class Done:
    code: int
    text: str  # both streams


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-m", "gptworks", *map(str, args)]


@contextmanager
def started(words: list[str], log: Path, seconds: float = LONGEST, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; whatever is left of it and of its children is killed at the end."""
    with log.open("ab") as file:
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            stdin=subprocess.DEVNULL,
            env=ENVIRONMENT,
            start_new_session=True,
            **options,
        )
    with limited(process.pid, log, seconds, " ".join(words)):
        try:
            yield process
        finally:
            if process.poll() is None:
                kill_all(process.pid)
            process.wait()


@contextmanager
def limited(pid: int, log: Path, seconds: float, what: str) -> Iterator[None]:
    """A process is killed with its children when it takes longer than this, and that is a failure."""
    clock = LoadClock(lambda: [pid, *descendants(pid)])
    ended, is_late = threading.Event(), threading.Event()

    def watch() -> None:
        while not ended.wait(0.5):
            if clock.seconds() > seconds:
                is_late.set()
                kill_all(pid)
                return

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        if is_late.is_set():
            told = log.read_text(errors="replace")[-3000:]
            raise Found(f"{what[-300:]} had not ended after {seconds:.0f} s\n{told}")


def run(*args: str | Path, log: Path, prefix: tuple[str, ...] = (), **options: Any) -> Done:
    began = log.stat().st_size if log.exists() else 0
    with started([*prefix, *command(*args)], log, **options) as process:
        process.wait()
    with log.open("rb") as file:
        file.seek(began)
        text = file.read().decode(errors="replace")
    return Done(process.returncode, text)


def succeed(*args: str | Path, log: Path, **options: Any) -> str:
    done = run(*args, log=log, **options)
    require(done.code == 0, lambda: f"{' '.join(map(str, args))}: exit {done.code}\n{done.text[-3000:]}")
    return done.text


def require_error(done: Done, what: str) -> None:
    """An end that a user can understand: exit code 2, a sentence, no traceback."""
    told = f"{what}: exit {done.code}\n{done.text[-3000:]}"
    require(done.code == 2, told)
    require("error: " in done.text and "Traceback" not in done.text, told)


def descendants(pid: int) -> list[int]:
    """Children, and theirs. Ranks are in sessions of their own, so that a group is not all."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def kill_all(pid: int) -> None:
    """Like the end of the power supply: nobody has time for anything."""
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def require_gone(pids: list[int], seconds: float = 30.0) -> None:
    """Nobody outlives its launcher."""
    clock = LoadClock(lambda: pids)
    while alive := [pid for pid in pids if _is_alive(pid)]:
        if clock.seconds() > seconds:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            raise Found(f"{len(alive)} processes outlived their launcher by {seconds:.0f} s")
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_until(process: subprocess.Popen[bytes], arrived: Callable[[], bool]) -> bool:
    """False when the process ended before. It has a limit of its own: see `started`."""
    while not arrived():
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def lines_of(run_folder: Path) -> list[dict[str, Any]]:
    """Metrics without those numbers that depend on the clock."""
    text = (run_folder / "metrics.jsonl").read_text(encoding="utf-8")
    found = [json.loads(line) for line in text.splitlines()]
    return [
        {key: value for key, value in line.items() if key not in NOT_COMPARED and not key.endswith("_seconds")}
        for line in found
    ]


def last_step(run_folder: Path) -> int:
    try:
        whole = [line for line in (run_folder / "metrics.jsonl").read_bytes().splitlines() if line.endswith(b"}")]
        return int(json.loads(whole[-1])["step"]) if whole else 0
    except (OSError, ValueError, KeyError):
        return 0


def weights_of(run_folder: Path, step: int) -> bytes:
    return (run_folder / "checkpoints" / f"step-{step:08d}" / "portable" / "model.safetensors").read_bytes()


def small_store(folder: Path) -> Path:
    """A store of the corpus with a vocabulary of its own, made by the command line."""
    succeed(
        "prepare", CORPUS, "--train-tokenizer", "512", "--append-eod", "--out", folder / "store", log=folder / "log"
    )
    return folder / "store"


def write_recipe(folder: Path) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.format(store=small_store(folder)), encoding="utf-8")
    return path
