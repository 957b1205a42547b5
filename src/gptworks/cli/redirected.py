"""What a command prints, where its block says it goes: `> file`, `2>&1`, `| tee file`."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.interop.shell_block import Started


@contextmanager
def redirected(started: "Started") -> Iterator[None]:
    """At the level of the process, so that those it starts write there too."""
    if not started.output:
        yield
        return
    how = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if started.appends else os.O_TRUNC)
    try:
        file = os.open(started.output, how, 0o666)
    except OSError as error:
        raise UsageError(f"{started.where}: {started.output}: cannot be written ({error.strerror}).") from None
    streams = [1, 2] if started.errors_too else [1]
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {stream: os.dup(stream) for stream in streams}
    copier = None
    if started.shown:
        # tee itself: a thread of ours would not outlive a fork, and ranks are forks.
        copier = subprocess.Popen(["tee", "-a", started.output], stdin=subprocess.PIPE, start_new_session=True)
        assert copier.stdin is not None
        target = copier.stdin.fileno()
    else:
        target = file
    try:
        for stream in streams:
            os.dup2(target, stream)
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
        os.close(file)
