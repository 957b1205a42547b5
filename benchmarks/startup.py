"""Claim: `gptworks --help` answers in under 0.3 s and `gptworks config show` in under 0.7 s, `gptworks plan` of a
layout in about half a second; torch is not imported. `gptworks generate` from a checkpoint of GPT-2's 124M shape gives
its first token in under 2.5 s.

Beside them, as a measure of the machine: an empty Python process, and `import torch`. They take turns.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from competitors import machine

GPT3 = ["parallel.pp=16", "parallel.tp=8", "batch.global_size=1536", "batch.micro_size=1", "precision.compute=bf16"]
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "gptworks --help": [sys.executable, "-m", "gptworks", "--help"],
    "gptworks config show": [sys.executable, "-m", "gptworks", "config", "show", "--preset", "gpt2"],
    "gptworks plan": [sys.executable, "-m", "gptworks", "plan", "--preset", "175B", "--device", "a100-80g", *GPT3],
    "python -c 'import torch'": [sys.executable, "-c", "import torch"],
}


def write_checkpoint(folder: Path) -> None:
    """Random weights in the shape of GPT-2 124M, as Hugging Face keeps them."""
    import torch

    from gptworks.checkpoint.systems import huggingface
    from gptworks.config.schema import InitConfig, ModelConfig
    from gptworks.launch.world import World
    from gptworks.parallel.build import FreshWeights, build_gpt
    from gptworks.tokenizer import Tokenizer

    cfg, tokenizer = ModelConfig(), Tokenizer.from_pretrained("gpt2")
    weights = FreshWeights(InitConfig(), cfg.num_layers, 1)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights)
    huggingface.save(folder, cfg, {n: p.detach() for n, p in model.named_parameters()}, eod_id=tokenizer.eod_id)
    tokenizer.save(folder)


def main() -> None:
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder) / "gpt2")
        first = ["--prompt", "On Friday", "--strategy", "greedy", "--max-new-tokens", "1"]
        generate = [sys.executable, "-m", "gptworks", "generate", "--model", f"{folder}/gpt2", *first]
        commands = COMMANDS | {"gptworks generate": generate}
        subprocess.run(generate, check=True, stdout=subprocess.DEVNULL)  # builds the C++ function where it is not there
        times: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(7):
            for name, command in commands.items():
                before = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                times[name].append(time.perf_counter() - before)
    for name, measured in times.items():
        spread = f"best {min(measured):.2f} s, worst {max(measured):.2f} s"
        print(f"{name:<26} median {statistics.median(measured):.2f} s, {spread}")


if __name__ == "__main__":
    main()
