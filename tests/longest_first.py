"""Files that take long are begun first, so that no process is left alone with one of them at the end.

durations.json has the seconds of those that take more than one, as they were when it was written:
`python -m pytest -n 2 --record-durations`. A file that is not in it comes after them.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

DURATIONS = Path(__file__).with_name("durations.json")
EVERYTHING = pytest.StashKey[dict[str, set[str]]]()  # tests that were found, before some are chosen, and their marks


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[EVERYTHING] = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
    seconds = json.loads(DURATIONS.read_text(encoding="utf-8"))
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], 0))


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a test that waits for what it started leaves its core to the others."""
    return len(os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)) + 1


class _Recorder:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        before = json.loads(DURATIONS.read_text(encoding="utf-8")) if DURATIONS.exists() else {}
        found = {name: round(seconds) for name, seconds in self.seconds.items()}
        kept = {name: seconds for name, seconds in {**before, **found}.items() if seconds > 1}
        DURATIONS.write_text(json.dumps(dict(sorted(kept.items(), key=lambda pair: -pair[1])), indent=1) + "\n")
