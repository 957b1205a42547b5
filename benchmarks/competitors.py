"""Competitors in processes of their own. Which of them does not start, or dies, is left out, and it is said why."""

import contextlib
import os
import platform
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence

from gptworks import cpu


class Gone(Exception):
    """The competitor is not there any more; says why."""


def machine() -> str:
    """One line, to stand beside every figure."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cap = f", {cpu.CAP}={cpu.user_cap()}" if cpu.user_cap() else ""
    return f"machine: {cpu.name()}, {cores} cores, {platform.system()}{cap}"


def reason(returncode: int, errors: str) -> str:
    """Why a process ended: the signal that killed it, else the last line it wrote about it."""
    if returncode < 0:
        return f"killed by {signal.Signals(-returncode).name}"
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return lines[-1] if lines else f"ended with exit code {returncode}"


class Competitor:
    """Says `ready` in a line when it is, then answers each line with a line."""

    def __init__(self, command: Sequence[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed with it
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)
        if (first := self._answer()) != "ready":
            self.close()
            raise Gone(f"said {first!r} instead of ready")

    def ask(self, line: str) -> str:
        with contextlib.suppress(BrokenPipeError):  # its end is seen below
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        line = self._process.stdout.readline()
        if line:
            return line.strip()
        returncode = self._process.wait()
        self._errors.seek(0)
        errors = self._errors.read()
        self.close()
        raise Gone(reason(returncode, errors))

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


class Race:
    """Those that are still taking part, in their order, and why the others are not."""

    def __init__(self, commands: Mapping[str, Sequence[str]], left_out: Mapping[str, str] | None = None) -> None:
        self.left_out = dict(left_out or {})
        self._running: dict[str, Competitor] = {}
        for name, command in commands.items():
            try:
                self._running[name] = Competitor(command)
            except Gone as error:
                self.left_out[name] = str(error)

    @property
    def names(self) -> list[str]:
        return list(self._running)

    def ask(self, name: str, line: str) -> str | None:
        """None where it died of it: it takes part no longer."""
        try:
            return self._running[name].ask(line)
        except Gone as error:
            del self._running[name]
            self.left_out[name] = str(error)
            return None

    def show_left_out(self) -> None:
        for name, why in self.left_out.items():
            print(f"  left out: {name}: {why}")

    def close(self) -> None:
        for competitor in self._running.values():
            competitor.close()
