"""Claim: a training step of gptworks is at least as fast as those of nanoGPT, of transformers and of a plain loop, at
three sizes of GPT-2, and as those of transformers for a small Llama.

    GPTWORKS_NANOGPT=nanoGPT/model.py \\
    python benchmarks/train.py [--size large middle llama small] [--compiled] [--dropout 0.1] [--seconds 60] [--busy]

Each competitor lives in a process of its own, as it would in use; all are started first and then take turns, so that
the noise of the machine meets them alike. The spread is that of the middle half of the turns. `of products` compares a
step with the matrix products of its linear layers and head, of the same shapes, that do nothing else: at 100 % the
step would be nothing but them. The last column is the peak resident memory of each process.

--busy: for a machine on which others work. One thread each, and the processor's time instead of the clock's: what a
step costs, without what threads wait for each other.
"""

import argparse
import os
import resource
import statistics
import sys
import time

import torch
from competitors import Race, machine
from peers import BF16, COMPILED, EAGER, PRODUCTS

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
    "llama": (
        {
            "num_layers": 4,
            "hidden_size": 256,
            "num_heads": 8,
            "num_kv_heads": 4,
            "vocab_size": 4096,
            "max_positions": 256,
            "norm": "rmsnorm",
            "positions": "rope",
            "mlp": "swiglu",
            "bias": "none",
        },
        8,
        2,
    ),
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
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    peer = next(peer for peer in [*EAGER, *COMPILED, BF16, PRODUCTS] if peer.name == name)
    tokens, labels = batch_of(size)
    step = peer.make(model_of(size, dropout))
    for _ in range(2):
        step(tokens, labels)
    print("ready", flush=True)
    turns = SIZES[size][2]
    for _ in sys.stdin:
        before = clock()
        for _ in range(turns):
            step(tokens, labels)
        seconds = (clock() - before) / turns
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
    print(f"\n{size}: {SIZES[size][0]}, {SIZES[size][1]} rows, dropout {dropout}, {rounds} rounds")
    show(batch_of(size)[0].numel(), {name: times[name] for name in race.names}, memory)
    race.show_left_out()
    race.close()


def show(tokens: int, times: dict[str, list[float]], memory: dict[str, float]) -> None:
    medians = {name: statistics.median(each) for name, each in times.items()}
    alone = medians.get(PRODUCTS.name)
    peers = [name for name in medians if not name.startswith("gptworks") and name != PRODUCTS.name]
    fastest = min((medians[name] for name in peers), default=None)
    print(f"  {'':<28}{'median tok/s':>14}{'spread':>8}{'x fastest peer':>16}{'of products':>13}{'peak GB':>9}")
    for name, median in medians.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        ratio = f"{fastest / median:.2f}" if fastest else "no peer"
        share = f"{alone / median:.0%}" if alone else ""
        speed = f"{tokens / median:>14,.0f}{(high - low) / median / 2:>8.1%}{ratio:>16}{share:>13}"
        print(f"  {name:<28}{speed}{memory[name]:>9.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--compiled", action="store_true", help="the compiled variants take part as well")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="per size")
    parser.add_argument("--busy", action="store_true", help="one thread each, processor time")
    parser.add_argument("--only", nargs="+", default=[], help="competitors, by their names in the table")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*args.work, args.dropout)
        return
    print(machine())
    if args.busy:
        os.environ["OMP_NUM_THREADS"] = "1"
        print("--busy: one thread each, processor time")
    peers = [*EAGER, *(COMPILED if args.compiled or args.only else []), BF16, PRODUCTS]
    for size in args.size:
        is_gpt2 = model_of(size, 0.0).norm == "layernorm"
        names = [peer.name for peer in peers if peer.is_any_kind or is_gpt2]
        names = [name for name in names if not args.only or name in args.only]
        compare(size, names, args.dropout, args.seconds)


if __name__ == "__main__":
    main()
