"""Our command line in processes of their own that do not begin at zero: a new Python takes 3 s of a core to import.

Each is a copy of one process that has imported what commands need and has done nothing else (multiprocessing's fork
server, one for each process of the tests). What is about beginning at zero, such as what is imported when, starts a new
Python; so does every shell block of the documents.
"""

import atexit
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import failure_report

PRELOAD = (
    "command_copies",
    "gptworks.cli.main",
    "gptworks.cli.train",
    "gptworks.train.run",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "numpy.random",
)
_context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    _context.set_forkserver_preload(list(PRELOAD))


def nothing() -> None:
    """What is done before most commands."""


class Command:
    """`gptworks` with these arguments, spoken to as to a subprocess.Popen. It prints to two files, or to a terminal.

    A relative path among the arguments is in `cwd`; `before` is called in the process before the command is.
    """

    def __init__(
        self,
        args: list[str],
        folder: Path,
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        terminal: str | None = None,
        before: Callable[[], Any] = nothing,
    ) -> None:
        self.args, self._terminal = ["gptworks", *args], terminal
        number = time.monotonic_ns()
        self._printed = [terminal or str(folder / f"{number}.{name}") for name in ("stdout", "stderr")]
        failure_report.note(f"cd {cwd} && {' '.join(self.args)}" if cwd else " ".join(self.args))
        where = str((cwd or Path.cwd()).absolute())
        self._process = _context.Process(
            target=_run, args=(args, self._printed, where, {**os.environ, **(env or {})}, before)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a test that hung was ended with all its processes
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> tuple[str, str]:
        """What it has printed, when it has ended."""
        self.wait()
        if self._terminal:
            return "", ""
        out, err = (Path(file).read_text(encoding="utf-8") for file in self._printed)
        return out, err


def _run(args: list[str], printed: list[str], where: str, env: dict[str, str], before: Callable[[], Any]) -> None:
    files = [(os.devnull, os.O_RDONLY), *((name, os.O_WRONLY | os.O_CREAT | os.O_NOCTTY) for name in printed)]
    for number, (name, flags) in enumerate(files):
        opened = os.open(name, flags, 0o600)
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    for number, name in ((1, "stdout"), (2, "stderr")):
        is_terminal = os.isatty(number)
        stream = open(number, "w", encoding="utf-8", closefd=False, buffering=1 if is_terminal or number == 2 else -1)  # noqa: SIM115
        setattr(sys, name, stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(where)
    sys.argv = ["gptworks", *args]
    from gptworks.cli.main import main

    try:
        before()
        code = main(args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()  # which multiprocessing leaves out
    sys.exit(code)
