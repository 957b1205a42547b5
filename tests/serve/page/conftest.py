"""A real browser before a real server. Skipped, with a reason, where there is no chromium or no playwright."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gptworks.cli.main import main

ROOT = Path(__file__).resolve().parents[3]
AXE = ROOT / "runs" / "axe-core" / "axe.min.js"  # `make test-page` puts it there
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def trained_run(small_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with a checkpoint of every second."""
    run = tmp_path_factory.mktemp("page") / "tiny"
    command = [f"data.path={small_store}", "data.seq_len=32", "model.num_layers=1", "model.hidden_size=32"]
    command += ["model.num_heads=2", "model.vocab_size=512", "model.max_positions=96", "batch.global_size=4"]
    command += ["run.device=cpu", "evaluate.every=2", "evaluate.batches=1", "checkpoint.every=2", "optim.lr=0.05"]
    command += ["optim.warmup_steps=0"]
    assert main(["train", *command, "train.steps=4", "train.log_every=1", "--out", str(run)]) == 0
    return run


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Of the module only: while it is open, the thread of the tests has an event loop that others stumble over."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = os.environ.get("GPTWORKS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        pytest.skip("chromium is not installed: make test-page installs Debian's where that is allowed")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, headless=True, args=FLAGS)
        yield opened
        opened.close()


class Pages:
    """Opens pages, each in a browser without memory, and keeps what they complain about."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser
        self.contexts: list[Any] = []
        self.complaints: list[str] = []

    def open(self, url: str, **options: Any) -> Any:
        context = self.browser.new_context(**{"viewport": {"width": 1280, "height": 900}, "locale": "en-US", **options})
        context.set_default_timeout(20_000)
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.goto(url)
        page.wait_for_selector("#run:enabled, #key[open]")
        return page

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def close(self) -> None:
        """Before the server goes: pages ask again for the cards of their models."""
        for context in self.contexts:
            context.close()
        self.contexts = []

    def expect_refusals(self) -> None:
        """At the end: the browser tells of every answer above 400 on its console, and these were meant."""
        self.close()
        assert any(text.startswith("Failed to load resource") for text in self.complaints)
        self.complaints = [text for text in self.complaints if not text.startswith("Failed to load resource")]


@pytest.fixture
def pages(browser: Any) -> Iterator[Pages]:
    found = Pages(browser)
    yield found
    found.close()
    assert found.complaints == []


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Lets the small model write as slowly as a large one."""
    from gptworks.generate.scheduler import Scheduler

    step = Scheduler.step

    def set_pause(seconds: float) -> None:
        def slow(self: Scheduler) -> Any:
            time.sleep(seconds)
            return step(self)

        monkeypatch.setattr(Scheduler, "step", slow)

    return set_pause


@pytest.fixture
def axe() -> Callable[[Any], list[str]]:
    """What axe-core finds wrong with a page: rule and elements."""
    if not AXE.is_file():
        pytest.skip("axe-core is not here: make test-page fetches it from npm")
    text = AXE.read_text(encoding="utf-8")

    def violations(page: Any) -> list[str]:
        page.evaluate(text)
        found = page.evaluate("async () => (await axe.run()).violations")
        return [f"{each['id']}: {[node['html'][:150] for node in each['nodes']][:3]}" for each in found]

    return violations
