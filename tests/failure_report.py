"""What a person needs who reads of a failed test: the commands it started, the ends of its logs, how to repeat it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_LINES = 30  # of a log
_LOGS = 8
_started: list[str] = []
_Popen_init = subprocess.Popen.__init__


def note(command: str) -> None:
    """For what starts processes without subprocess."""
    _started.append(command[:2000])


def _noted(self: "subprocess.Popen[Any]", args: Any, *rest: Any, **options: Any) -> None:
    words = args if isinstance(args, str) else " ".join(str(word) for word in args)
    note(f"cd {options['cwd']} && {words}" if options.get("cwd") else words)
    _Popen_init(self, args, *rest, **options)


subprocess.Popen.__init__ = _noted  # type: ignore[method-assign]


def pytest_runtest_logstart() -> None:
    _started.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield  # type: ignore[assignment]
    if report.failed:
        if _started:
            report.sections.append(("commands that it started", "\n".join(_started[-_LOGS:])))
        report.sections += _ends_of_logs(item)
        report.sections.append(("to repeat it", _repeat(item)))
    return report


def _ends_of_logs(item: pytest.Item) -> list[tuple[str, str]]:
    folder = getattr(item, "funcargs", {}).get("tmp_path")
    logs = sorted(folder.rglob("*.log"), key=lambda path: path.stat().st_mtime_ns) if folder else []
    return [(f"end of {path}", _end(path)) for path in logs[-_LOGS:]]


def _end(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LINES:])


def _repeat(item: pytest.Item) -> str:
    command = f'python -m pytest -m "" "{item.nodeid}"'
    if item.get_closest_marker("hypothesis"):
        command += f" --hypothesis-profile={item.config.getoption('--hypothesis-profile') or 'few'}"
        command += "   # the examples are a function of the test: no seed"
    elif seed := _seed():
        command += f"   # torch's seed at the end: {seed}"
    return command


def _seed() -> int | None:
    import sys

    torch = sys.modules.get("torch")
    return int(torch.initial_seed()) if torch else None
