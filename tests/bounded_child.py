"""A command of gptworks in a child whose memory and time are bounded, and measured."""

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from load_clock import LoadClock

MB = 1 << 20


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str
    seconds: float
    peak: int  # bytes, resident, of this process (its own children are not in it)


def run(
    *args: str | Path,
    address_space: int = 0,
    seconds: float = 600,
    cwd: Path | None = None,
    env: dict[str, str] | None = None,
) -> Ended:
    """`address_space`: bytes that the child may map (RLIMIT_AS), 0 for no limit.

    After `seconds`, without those that it waits for a core, it is killed.
    """

    def bound() -> None:
        if address_space:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    command = [sys.executable, "-m", "gptworks", *map(str, args)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        started = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=err,
            stdin=subprocess.DEVNULL,
            cwd=cwd,
            preexec_fn=bound,
            env={**os.environ, **(env or {})},
        )
        clock, deadline, peak = LoadClock(lambda: [process.pid]), started + seconds, 0
        while process.poll() is None:
            peak = max(peak, _high_water(process.pid))
            if time.monotonic() > deadline:
                if (taken := clock.seconds()) > seconds:
                    process.kill()
                    break
                deadline = time.monotonic() + seconds - taken
            time.sleep(0.005)
        process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return Ended(process.returncode, *texts, time.monotonic() - started, peak)


def _high_water(pid: int) -> int:
    """The most that was resident so far. What os.wait4 says would begin with the memory of the process that forked."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)
