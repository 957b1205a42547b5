"""What a command prints, where its block says it goes: `> file`, `2>&1`, `| tee file`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.interop.shell_block import Started


@contextmanager
def redirected(started: "Started") -> Iterator[None]:
    """At the level of the process, so that those it starts write there too."""
    targets: dict[int, int] = {}  # stream -> the file it goes to
    if started.output:
        targets[1] = _opened(started, started.output, appends=started.appends)
    if started.errors:
        targets[2] = _opened(started, started.errors, appends=started.appends_errors)
    elif started.output and started.errors_too:
        targets[2] = os.dup(targets[1])
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {stream: os.dup(stream) for stream in targets}
    copier = None
    if started.output and started.on_screen:
        # tee itself: a thread of ours would not outlive a fork, and ranks are forks.
        copier = subprocess.Popen(["tee", "-a", started.output], stdin=subprocess.PIPE, start_new_session=True)
        assert copier.stdin is not None
        for stream in (1, 2) if started.errors_too and not started.errors else (1,):
            os.dup2(copier.stdin.fileno(), targets[stream])
    try:
        for stream, target in targets.items():
            os.dup2(target, stream)
            os.close(target)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for stream, before in kept.items():
            os.dup2(before, stream)
            os.close(before)
        if copier is not None and copier.stdin is not None:
            copier.stdin.close()
            copier.wait()


def _opened(started: "Started", name: str, *, appends: bool) -> int:
    """Opens the file and makes its folder, which answers a mkdir in the block."""
    how = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if appends else os.O_TRUNC)
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        return os.open(name, how, 0o666)
    except OSError as error:
        raise UsageError(f"{started.where}: {name}: cannot be written ({error.strerror}).") from None
