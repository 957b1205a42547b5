"""Claim: `gptworks --help` answers in under 0.3 s and `gptworks config show` in under 0.7 s, `gptworks plan` of a
layout in about half a second; torch is not imported.

Beside them, as a measure of the machine: an empty Python process, and `import torch`. They take turns.
"""

import statistics
import subprocess
import sys
import time

from competitors import machine

GPT3 = ["parallel.pp=16", "parallel.tp=8", "batch.global_size=1536", "batch.micro_size=1", "precision.compute=bf16"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "gptworks --help": [sys.executable, "-m", "gptworks", "--help"],
    "gptworks config show": [sys.executable, "-m", "gptworks", "config", "show", "--preset", "gpt2"],
    "gptworks plan": [sys.executable, "-m", "gptworks", "plan", "--preset", "175B", "--device", "a100-80g", *GPT3],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def main() -> None:
    print(machine())
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(7):
        for name, command in COMMANDS.items():
            before = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            times[name].append(time.perf_counter() - before)
    for name, measured in times.items():
        print(f"{name:<26} median {statistics.median(measured):.2f} s, best {min(measured):.2f} s")


if __name__ == "__main__":
    main()
