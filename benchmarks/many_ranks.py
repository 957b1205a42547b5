"""How long do many ranks take to start, save and resume on one machine, and what does a step say beside its numbers?

    python benchmarks/many_ranks.py [--ranks 2 8 64] [--torchrun 8] [--steps 20]

Tiny ranks: a model of two layers, one sample for each rank. What is timed is starting processes, making groups and
agreeing, on however few cores there are; not computing. torchrun with the same ranks is the peer, in the same run.

Messages to the store that rank 0 keeps are counted by the kernel (`ss -i`, segments with data that have arrived at its
port, between two steps); collectives of a step by torch's profiler on rank 0. Those of a step should be as many
whatever the number of ranks, and messages to the store should follow the clock, not the steps.
"""

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SHAPE = "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.vocab_size=512 model.max_positions=16"
TEXT = (
    "data.seq_len=16 optim.lr=1e-3 train.log_every=1 evaluate.every=1000000 checkpoint.portable=false "
    "train.check_memory=off run.device=cpu run.threads=1"
)
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node"]


@dataclass
class Times:
    start: float = 0.0  # seconds to the first step
    step: float = 0.0  # of the steps after it, the mean
    end: float = 0.0  # from the last step to the end of the processes: the save, and closing
    messages: float = 0.0  # to the store, in a second of these steps


def segments(launcher: int) -> int:
    """With data, that have come to the stores which processes below this one keep."""
    words = subprocess.run(["ss", "-Htlnp"], capture_output=True, text=True, check=True).stdout
    below = _processes(launcher)
    # A store listens on every address of the machine, gloo on one.
    listening = re.findall(r"\s(?:\*|\[::\]):(\d+)\s.*?pid=(\d+)", words)
    ports = {port for port, pid in listening if int(pid) in below}
    return sum(_received(port) for port in ports)


def _received(port: str) -> int:
    words = subprocess.run(["ss", "-Htni", f"sport = :{port}"], capture_output=True, text=True, check=True).stdout
    return sum(int(count) for count in re.findall(r"data_segs_in:(\d+)", words))


def _processes(launcher: int) -> set[int]:
    found, left = set[int](), [launcher]
    while left:
        found.add(process := left.pop())
        for children in Path(f"/proc/{process}/task").glob("*/children"):
            left += [int(child) for child in children.read_text().split()]
    return found


def times(folder: Path, launcher: list[str], ranks: int, steps: int, *words: str) -> Times:
    sizes = [f"parallel.dp={ranks}", f"batch.global_size={ranks}", "parallel.timeout=600", f"train.steps={steps}"]
    settings = [*SHAPE.split(), *TEXT.split(), *sizes, f"data.path={folder / 'data'}"]
    out = folder / f"{ranks}-{'torchrun' if launcher else 'ours'}"
    command = [sys.executable, *launcher, "-m", "gptworks", "train", *settings, "--out", str(out), *words]
    metrics = out / "metrics.jsonl"

    def step() -> int:
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return json.loads(lines[-1])["step"] if lines and lines[-1].endswith("}") else 0

    before, began, found = step(), time.monotonic(), Times()
    first_step = counted = 0
    last = 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    while process.poll() is None:
        now, at = time.monotonic() - began, step()
        if not found.start and at > before:
            found.start, first_step, counted = now, at, segments(process.pid)
        elif found.start and not last and at >= steps - 1:
            found.step = (now - found.start) / (at - first_step)
            found.messages = (segments(process.pid) - counted) / (now - found.start)
        last = last or (now if at >= steps else 0.0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    found.end = time.monotonic() - began - last
    return found


def collectives(out: Path, num_steps: int) -> dict[str, float]:
    """Of a step of rank 0, by their kind."""
    trace = next((out / "profile").glob("*.json"))
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    counts = collections.Counter(name.removeprefix("gloo:") for name in names if name.startswith("gloo:"))
    return {name: count / num_steps for name, count in sorted(counts.items())}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--torchrun", type=int, nargs="*", default=[8])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gptworks-ranks-"))
    words = " ".join(f"word{i % 97} line{i % 13}" for i in range(40000))
    (folder / "text.txt").write_text("\n\n".join(words[i : i + 200] for i in range(0, len(words), 200)))
    prepare = ["prepare", str(folder / "text.txt"), "--train-tokenizer", "400", "--append-eod", "--out"]
    command = [sys.executable, "-m", "gptworks", *prepare, str(folder / "data")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(
        f"{'':10} {'ranks':>5} {'start':>7} {'step':>7} {'save':>7} {'resume':>7}  seconds, on {os.cpu_count()} cores"
    )
    cases = [("gptworks", ranks, list[str]()) for ranks in args.ranks]
    cases += [("torchrun", ranks, [*TORCHRUN, str(ranks)]) for ranks in args.torchrun]
    for name, ranks, launcher in cases:
        profiled = f"train.profile=[2,{args.steps - 1}]"
        run = times(folder, launcher, ranks, args.steps, profiled)
        print(f"{name:10} {ranks:5} {run.start:7.1f} {run.step:7.2f} {run.end:7.1f}", end=" ", flush=True)
        out = folder / f"{ranks}-{'torchrun' if launcher else 'ours'}"
        counts = collectives(out, args.steps - 2)
        told = ", ".join(f"{count:g} {kind}" for kind, count in counts.items())
        told = f"a step: {told}; store: {run.messages:.1f} messages a second"
        again = times(folder, launcher, ranks, args.steps + 3, "--resume", "auto")
        print(f"{again.start:7.1f}  {told}", flush=True)


if __name__ == "__main__":
    main()
