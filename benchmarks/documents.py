"""Claim: where attention stays within documents (data.reset_attention), a step on the CPU that goes from document to
document is at least 1.3x as fast as one with a mask of all pairs of tokens, at 8 documents in a window.

    python benchmarks/documents.py [--documents 8] [--rounds 7]

4 layers x 256, windows of 1,024 tokens, 2 rows: four steps of gptworks take turns in one process. `attention alone`
is that of one layer, forward and backward.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from competitors import machine
from peers import gptworks_step

from gptworks import cpu
from gptworks.config import ModelConfig
from gptworks.model import documents, masks

ROWS = 2
MODEL = ModelConfig(num_layers=4, hidden_size=256, num_heads=8, vocab_size=4096, max_positions=1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(machine())
    cpu.settle()
    length = MODEL.max_positions
    segments = (torch.arange(length) * args.documents // length).repeat(ROWS, 1)
    tokens = torch.randint(0, MODEL.vocab_size, (ROWS, length + 1), generator=torch.Generator().manual_seed(1))

    def step(*, native: bool, dense: bool) -> Callable[[], None]:
        made = gptworks_step(MODEL, native=native, segments=segments)
        by_documents = masks._is_by_documents

        def run() -> None:
            masks._is_by_documents = (lambda given: False) if dense else by_documents
            try:
                made(tokens[:, :-1], tokens[:, 1:])
            finally:
                masks._is_by_documents = by_documents

        return run

    runs = {
        "dense mask": step(native=False, dense=True),
        "by document, torch": step(native=False, dense=False),
        "by document, C++ blocks": step(native=True, dense=False),
        "attention alone, dense mask": attention(segments, dense=True),
        "attention alone, by document": attention(segments, dense=False),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds + 1):
        for name, run in runs.items():
            before = time.perf_counter()
            run()
            if number:  # the first of each warms up
                times[name].append(time.perf_counter() - before)
    print(f"\n{args.documents} documents in each of {ROWS} windows of {length} tokens, {args.rounds} rounds")
    base = ""
    for name, each in times.items():
        base = name if name.endswith("dense mask") else base
        low, median, high = statistics.quantiles(each, n=4)
        ratio = statistics.median(times[base]) / median
        print(f"  {name:<30}{median * 1e3:>9.1f} ms{(high - low) / median / 2:>8.1%} spread{ratio:>8.2f}x dense")


def attention(segments: torch.Tensor, *, dense: bool) -> Callable[[], None]:
    shape = (ROWS, MODEL.max_positions, MODEL.num_heads, MODEL.head_size)
    q, k, v = (torch.randn(shape).requires_grad_() for _ in range(3))
    first = masks.first_seen(segments, 0)

    def run() -> None:
        heads = [each.transpose(1, 2) for each in (q, k, v)]
        if dense:
            mask = masks.seen_from(first)
            mixed = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask)
        else:
            mixed = documents.attend_by_document(*heads, first, 0.0)
        mixed.sum().backward()

    return run


if __name__ == "__main__":
    main()
