"""Claim: guessed tokens that are read ahead make text that repeats itself at least 1.5x as fast, and no other text less
than 0.95x as fast; the text is the same.

    python benchmarks/speculate.py [--model DIR] [--draft DIR] [--rounds 5] [--weights fp32 int8]

Without a model: the shape of GPT-2 124M with random weights. Text that repeats itself: greedy, which such a model soon
does by itself. Text that does not: drawn with temperature 1. With and without guesses take turns.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch
from competitors import machine

from gptworks import cpu
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.generate.engine import continue_tokens
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.inference import store_weights
from gptworks.parallel.build import FreshWeights, build_gpt

NEW = 192
TEXTS = {
    "repeats itself": (GenerateConfig(strategy="greedy", max_new_tokens=NEW, ignore_eod=True), 1.5),
    "does not": (GenerateConfig(strategy="sampling", max_new_tokens=NEW, ignore_eod=True), 0.95),
}


def load(folder: str | None, kind: str) -> GPT:
    if folder is not None:
        from gptworks.checkpoint.pretrained import PretrainedGPT

        return PretrainedGPT.from_pretrained(folder, device="cpu", weights=kind)
    cfg = ModelConfig()
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(), cfg.num_layers, 1))
    store_weights(model.eval(), kind)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint (default: random weights)")
    parser.add_argument("--draft", type=Path, help="a smaller model with the same vocabulary")
    parser.add_argument("--weights", nargs="+", default=["fp32", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    cpu.settle()
    print(machine())
    prompt = torch.randint(0, 50_000, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    ways = ["", "ngram", *([str(args.draft)] if args.draft else [])]
    for kind in args.weights:
        model = load(args.model, kind)
        for name, (cfg, target) in TEXTS.items():
            times: dict[str, list[float]] = {way: [] for way in ways}
            texts: dict[str, list[int]] = {}
            for _ in range(args.rounds):
                for way in ways:
                    before = time.perf_counter()
                    found = continue_tokens(model, [prompt], cfg.model_copy(update={"speculate": way}))
                    times[way].append(time.perf_counter() - before)
                    texts[way] = found[0][0].tokens
            for way in ways[1:]:
                ratios = [plain / guessed for plain, guessed in zip(times[""], times[way], strict=True)]
                spread = f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
                same = "the same text" if texts[way] == texts[""] else "ANOTHER TEXT"
                print(f"  {kind}, text that {name}, {way}: {spread}, target {target}x; {same}")


if __name__ == "__main__":
    main()
