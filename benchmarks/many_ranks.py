"""How long do many ranks take to start, save and resume on one machine? Ours, and torchrun's in the same run.

    python benchmarks/many_ranks.py [--ranks 8 64] [--torchrun 8]

Tiny ranks: a model of two layers, one sample for each rank. What is timed is starting processes, making groups and
agreeing, on however few cores there are; not computing.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHAPE = "model.num_layers=2 model.hidden_size=16 model.num_heads=2 model.vocab_size=512 model.max_positions=16"
REST = "data.seq_len=16 optim.lr=1e-3 train.log_every=1 checkpoint.portable=false run.device=cpu run.threads=1"


def times(folder: Path, launcher: list[str], ranks: int, steps: int, resume: str) -> tuple[float, float]:
    """Seconds to the first step, and from the last one to the end of the processes: the save, and closing."""
    sizes = [f"parallel.dp={ranks}", f"batch.global_size={ranks}", "parallel.timeout=600", f"train.steps={steps}"]
    settings = [*SHAPE.split(), *REST.split(), *sizes, f"data.path={folder / 'data'}", "train.check_memory=off"]
    out = folder / f"{ranks}-{'torchrun' if launcher[0] == '-m' and 'torch' in launcher[1] else 'ours'}"
    command = [sys.executable, *launcher, "-m", "gptworks", "train", *settings, "--out", str(out), "--resume", resume]
    metrics = out / "metrics.jsonl"
    before = len(metrics.read_text().splitlines()) if metrics.exists() else 0
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    first = last = 0.0
    while process.poll() is None:
        lines = len(metrics.read_text().splitlines()) if metrics.exists() else 0
        now = time.monotonic() - began
        first = first or (now if lines > before else 0.0)
        last = last or (now if lines >= steps else 0.0)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return first, time.monotonic() - began - last


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--torchrun", type=int, nargs="*", default=[8])
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="gptworks-ranks-"))
    words = " ".join(f"word{i % 97} line{i % 13}" for i in range(40000))
    (folder / "text.txt").write_text("\n\n".join(words[i : i + 200] for i in range(0, len(words), 200)))
    prepare = ["prepare", str(folder / "text.txt"), "--train-tokenizer", "400", "--append-eod", "--out"]
    command = [sys.executable, "-m", "gptworks", *prepare, str(folder / "data")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    print(f"{'':12} {'ranks':>5} {'start':>8} {'save':>8} {'resume':>8}   seconds, on {os.cpu_count()} cores")
    cases = [("gptworks", ranks, list[str]()) for ranks in args.ranks]
    cases += [("torchrun", n, ["-m", "torch.distributed.run", "--nproc-per-node", str(n)]) for n in args.torchrun]
    for name, ranks, launcher in cases:
        start, save = times(folder, launcher or ["-X", "utf8"], ranks, 3, "never")
        resume, _ = times(folder, launcher or ["-X", "utf8"], ranks, 6, "auto")
        print(f"{name:12} {ranks:5} {start:8.1f} {save:8.1f} {resume:8.1f}", flush=True)


if __name__ == "__main__":
    main()
