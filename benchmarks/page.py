"""The page of `gptworks serve` in chromium on loopback: its first paint, and its frames while tokens stream in.

    python benchmarks/page.py [--loads 20] [--rate 100] [--tokens 1500]

The server is a process of its own with an untrained model of two layers, slowed down to `--rate` tokens a second. First
paint and first contentful paint are the browser's own entries, from the beginning of the navigation, in a context
without a cache. Frames are the gaps between callbacks of requestAnimationFrame while the text grows, and long tasks are
the browser's own entries (tasks above 50 ms). The peer is a page of one line from the same server: what of the figures
is the machine's and not the page's.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]
CONTEXT = 4096


def write_model(folder: Path) -> None:
    import torch

    from gptworks.checkpoint.systems import huggingface
    from gptworks.config.schema import InitConfig, ModelConfig
    from gptworks.launch.world import World
    from gptworks.parallel.build import FreshWeights, build_gpt
    from gptworks.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained("gpt2")
    cfg = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=50257, max_positions=CONTEXT)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.2), 2, seed=1))
    huggingface.save(folder, cfg, dict(model.named_parameters()), eod_id=tokenizer.eod_id)
    tokenizer.save(folder)


def serve(folder: str, rate: float) -> None:
    """In a process of its own: steps come no faster than `rate` a second."""
    import time

    from gptworks.cli.main import main
    from gptworks.generate.scheduler import Scheduler

    step, last = Scheduler.step, [0.0]

    def paced(self: Scheduler) -> Any:
        time.sleep(max(0.0, last[0] + 1 / rate - time.monotonic()))
        last[0] = time.monotonic()
        return step(self)

    Scheduler.step = paced  # type: ignore[method-assign]
    main(["serve", "--model", folder, "--port", "0", "--max-batch", "2"])


PAINT = """() => new Promise(done => {
  const look = () => {
    const found = performance.getEntriesByType("paint");
    if (found.length < 2) { setTimeout(look, 5); return; }
    done(Object.fromEntries(found.map(each => [each.name, each.startTime])));
  };
  look();
})"""

FRAMES = """() => {
  window.gaps = []; window.longTasks = [];
  const note = list => longTasks.push(...list.getEntries().map(each => each.duration));
  new PerformanceObserver(note).observe({entryTypes: ["longtask"]});
  let last = performance.now();
  const next = now => { gaps.push(now - last); last = now; if (!window.isOver) requestAnimationFrame(next); };
  requestAnimationFrame(next);
}"""


def first_paint(browser: Any, url: str) -> dict[str, float]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.goto(url)
    found = page.evaluate(PAINT)
    context.close()
    return found


def frames(browser: Any, url: str, tokens: int) -> dict[str, Any]:
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{url}#prompt=The&max_tokens={tokens}&ignore_eos=true&seed=1")
    page.click("#run:enabled")
    page.wait_for_selector('.token[data-at="5"]')
    page.evaluate(FRAMES)
    begun = page.evaluate("performance.now()")
    page.wait_for_selector(".facts:not(:empty)", timeout=600_000)
    seconds = (page.evaluate("window.isOver = true, performance.now()") - begun) / 1000
    gaps, tasks = page.evaluate("[gaps, longTasks]")
    count = page.evaluate("document.querySelector('.tokens').view.tokens.length")
    return {"gaps": gaps, "tasks": tasks, "rate": count / seconds, "count": count}


def shown(name: str, values: list[float]) -> str:
    ordered = sorted(values)
    p95 = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"{name:34} median {statistics.median(values):6.1f} ms, 95 % {p95:6.1f}, most {ordered[-1]:6.1f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, default=20)
    parser.add_argument("--rate", type=float, default=100)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.rate)
        return 0
    from playwright.sync_api import sync_playwright

    program = os.environ.get("GPTWORKS_CHROMIUM") or shutil.which("chromium")
    if program is None:
        print("chromium is not installed", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        command = [sys.executable, __file__, "--serve", folder, "--rate", str(args.rate)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            url = next(line for line in server.stdout if "look into it at" in line).split()[-1]
            with sync_playwright() as driver:
                browser = driver.chromium.launch(executable_path=program, headless=True, args=FLAGS)
                first_paint(browser, url)  # the browser's own first time
                paints, plain = [], []
                for _ in range(args.loads):
                    paints.append(first_paint(browser, url))
                    plain.append(first_paint(browser, f"{url}health"))
                print(shown("page, first paint", [each["first-paint"] for each in paints]))
                print(shown("page, first contentful paint", [each["first-contentful-paint"] for each in paints]))
                print(shown("one line of JSON, first paint", [each["first-paint"] for each in plain]))
                found = frames(browser, url, args.tokens)
                print(shown(f"frames, {found['count']} tokens at {found['rate']:.0f}/s", found["gaps"]))
                slow = sum(gap > 50 for gap in found["gaps"])
                print(f"frames above 50 ms: {slow} of {len(found['gaps'])}; long tasks: {len(found['tasks'])}")
                browser.close()
        finally:
            server.terminate()
            server.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
