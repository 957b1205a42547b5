"""Claim: a training step of a Llama by gptworks is at least as fast as by litgpt's model in the loop its users write.

    pip install litgpt
    python benchmarks/litgpt_step.py [--seconds 60] [--busy]

Both have the same shape, fused AdamW, clipping at 1 and the same tokens, and live in processes of their own that take
turns. The last column is the peak resident memory of each process.
"""

import argparse
import os
import resource
import statistics
import sys
import time

import torch
from competitors import Race, machine
from peers import Step, _plain_loop, gptworks_step
from torch import Tensor
from torch.nn.functional import cross_entropy

from gptworks import architecture, cpu
from gptworks.config import ModelConfig

ROWS = 4
MODEL = ModelConfig(
    num_layers=6,
    hidden_size=384,
    num_heads=6,
    num_kv_heads=2,
    ffn_size=1024,
    vocab_size=32000,
    max_positions=256,
    norm="rmsnorm",
    positions="rope",
    mlp="swiglu",
    bias="none",
    tied=False,
    layernorm_eps=1e-5,
)


def litgpt_step() -> Step:
    from litgpt import GPT, Config

    theirs = Config(
        name="benchmark",
        block_size=MODEL.max_positions,
        n_layer=MODEL.num_layers,
        n_embd=MODEL.hidden_size,
        n_head=MODEL.num_heads,
        n_query_groups=MODEL.num_kv_heads,
        intermediate_size=MODEL.ffn_size,
        padded_vocab_size=MODEL.vocab_size,
        norm_class_name="RMSNorm",
        norm_eps=MODEL.layernorm_eps,
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = GPT(theirs).train()
    wanted = sum(spec.size for spec in architecture.tensors(MODEL).values())
    assert sum(parameter.numel() for parameter in model.parameters()) == wanted

    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        return cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1))

    return _plain_loop(model, loss_of)


COMPETITORS = {"gptworks": lambda: gptworks_step(MODEL), "litgpt": litgpt_step}


def work(name: str) -> None:
    """A competitor: for each line on standard input, one step; answers its seconds and the peak memory in GB."""
    cpu.settle()
    generator = torch.Generator().manual_seed(1)
    window = torch.randint(0, MODEL.vocab_size, (ROWS, MODEL.max_positions + 1), generator=generator)
    tokens, labels = window[:, :-1].contiguous(), window[:, 1:].contiguous()
    step = COMPETITORS[name]()
    for _ in range(2):
        step(tokens, labels)
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    print("ready", flush=True)
    for _ in sys.stdin:
        before = clock()
        step(tokens, labels)
        print(clock() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--busy", action="store_true", help="one thread each, processor time")
    parser.add_argument("--work", choices=COMPETITORS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.work)
        return
    print(machine())
    if args.busy:
        os.environ["OMP_NUM_THREADS"] = "1"
        print("--busy: one thread each, processor time")
    race = Race({name: [sys.executable, __file__, "--work", name] for name in COMPETITORS})
    times: dict[str, list[float]] = {name: [] for name in race.names}
    memory: dict[str, float] = {}
    deadline = time.perf_counter() + args.seconds
    while race.names and (time.perf_counter() < deadline or len(times[race.names[0]]) < 5):
        for name in race.names:
            if (answer := race.ask(name, "go")) is not None:
                took, memory[name] = map(float, answer.split())
                times[name].append(took)
    print(f"{MODEL.num_layers} x {MODEL.hidden_size}, vocabulary {MODEL.vocab_size}, {ROWS} rows, fp32")
    print(f"  {'':<12}{'median tok/s':>14}{'x litgpt':>10}{'peak GB':>9}{'steps':>7}{'lowest to highest':>20}")
    medians = {name: statistics.median(times[name]) for name in race.names}
    for name, median in medians.items():
        ratio, spread = "no peer", ""
        if "litgpt" in medians:
            rounds = sorted(theirs / ours for theirs, ours in zip(times["litgpt"], times[name], strict=True))
            ratio, spread = f"{statistics.median(rounds):.2f}", f"{rounds[0]:.2f} to {rounds[-1]:.2f}"
        speed = ROWS * MODEL.max_positions / median
        print(f"  {name:<12}{speed:>14,.0f}{ratio:>10}{memory[name]:>9.2f}{len(times[name]):>7}{spread:>20}")
    race.show_left_out()
    race.close()


if __name__ == "__main__":
    main()
