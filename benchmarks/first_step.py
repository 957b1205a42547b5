"""Claim: `gptworks train` has done its first step in under 5 s.

    python benchmarks/first_step.py [--rounds 5]

The preset `tiny` (7.2M parameters with GPT-2's vocabulary) on a store that is prepared already, from the start of the
process to the line of step 1. Beside it, as a measure of the machine, `import torch`. The C++ functions are built in a
run before, which is shown by itself.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from competitors import machine


def first_step(folder: Path, number: int) -> float:
    """Seconds until the line of step 1."""
    command = [sys.executable, "-m", "gptworks", "train", "--preset", "tiny", f"data.path={folder / 'corpus'}"]
    command += ["train.steps=1", "train.log_every=1", "evaluate.every=0", f"run.out={folder / str(number)}"]
    before = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as started:
        assert started.stdout is not None
        lines = []
        for line in started.stdout:
            lines.append(line)
            if line.startswith("step 1/"):
                seconds = time.perf_counter() - before
                started.communicate()
                return seconds
    sys.exit("no first step:\n" + "".join(lines[-5:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare = ["prepare", "sample:python-docs", "--out", str(folder / "corpus"), "--tokenizer", "gpt2"]
        subprocess.run([sys.executable, "-m", "gptworks", *prepare], check=True, capture_output=True)
        print(f"first run, in which C++ functions may have to be built: {first_step(folder, 0):.2f} s")
        times: dict[str, list[float]] = {"import torch": [], "train to its first step": []}
        for number in range(1, args.rounds + 1):
            before = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            times["import torch"].append(time.perf_counter() - before)
            times["train to its first step"].append(first_step(folder, number))
    for what, each in times.items():
        print(f"{what:<26} median {statistics.median(each):.2f} s ({min(each):.2f} to {max(each):.2f})")


if __name__ == "__main__":
    main()
