"""Claim: a training step of gptworks is at least as fast as those of transformers and of a plain loop, at three sizes.

    python benchmarks/train.py [--size large middle small] [--compiled] [--dropout 0.1] [--seconds 60]

Each competitor lives in a process of its own, as it would in use; all are started first and then take turns, so that
the noise of the machine meets them alike. The last column is the peak resident memory of each process.
"""

import argparse
import resource
import statistics
import sys
import time

import torch
from competitors import Race, machine
from peers import COMPILED, EAGER

from gptworks import cpu
from gptworks.config import ModelConfig

# name -> (model, rows per step, steps per turn)
SIZES = {
    "large": (
        {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "vocab_size": 50304, "max_positions": 1024},
        1,
        1,
    ),
    "middle": ({"num_layers": 6, "hidden_size": 384, "num_heads": 6, "vocab_size": 50304, "max_positions": 256}, 16, 1),
    "small": ({"num_layers": 4, "hidden_size": 128, "num_heads": 4, "vocab_size": 65, "max_positions": 64}, 12, 10),
}


def batch_of(size: str) -> tuple[torch.Tensor, torch.Tensor]:
    shape, rows, _ = SIZES[size]
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(0, shape["vocab_size"], (rows, shape["max_positions"] + 1), generator=generator)
    return window[:, :-1].contiguous(), window[:, 1:].contiguous()


def model_of(size: str, dropout: float) -> ModelConfig:
    names = ("dropout_embed", "dropout_hidden", "dropout_attention")
    return ModelConfig(**SIZES[size][0], **dict.fromkeys(names, dropout))


def work(size: str, name: str, dropout: float) -> None:
    """A competitor: for each line on standard input, one turn; answers seconds per step and peak memory in GB."""
    cpu.settle()
    peer = next(peer for peer in EAGER + COMPILED if peer.name == name)
    tokens, labels = batch_of(size)
    step = peer.make(model_of(size, dropout))
    for _ in range(2):
        step(tokens, labels)
    print("ready", flush=True)
    turns = SIZES[size][2]
    for _ in sys.stdin:
        before = time.perf_counter()
        for _ in range(turns):
            step(tokens, labels)
        seconds = (time.perf_counter() - before) / turns
        print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, flush=True)


def compare(size: str, names: list[str], dropout: float, seconds: float) -> None:
    race = Race({name: [sys.executable, __file__, "--work", size, name, "--dropout", str(dropout)] for name in names})
    times: dict[str, list[float]] = {name: [] for name in race.names}
    memory: dict[str, float] = {}
    deadline = time.perf_counter() + seconds
    rounds = 0
    while race.names and (time.perf_counter() < deadline or rounds < 5):
        rounds += 1
        for name in race.names:
            if (answer := race.ask(name, "go")) is not None:
                took, peak = answer.split()
                times[name].append(float(took))
                memory[name] = float(peak)
    count = batch_of(size)[0].numel()
    medians = {name: statistics.median(times[name]) for name in race.names}
    fastest = min((median for name, median in medians.items() if not name.startswith("gptworks")), default=None)
    print(f"\n{size}: {SIZES[size][0]}, {SIZES[size][1]} rows, dropout {dropout}, {rounds} rounds")
    print(f"  {'':<28}{'median tok/s':>14}{'best tok/s':>12}{'x fastest peer':>16}{'peak GB':>9}")
    for name, median in medians.items():
        ratio = f"{fastest / median:.2f}" if fastest else "no peer"
        speed = f"{count / median:>14,.0f}{count / min(times[name]):>12,.0f}{ratio:>16}"
        print(f"  {name:<28}{speed}{memory[name]:>9.2f}")
    race.show_left_out()
    race.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--compiled", action="store_true", help="the compiled variants take part as well")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="per size")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work, args.dropout)
        return
    print(machine())
    names = [peer.name for peer in EAGER + (COMPILED if args.compiled else [])]
    for size in args.size:
        compare(size, names, args.dropout, args.seconds)


if __name__ == "__main__":
    main()
