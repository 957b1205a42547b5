"""Claim: reading training samples costs next to nothing.

    python benchmarks/read.py [--gigabytes 1] [--windows 20000] [--step]

Random windows of 1,025 tokens from a store on disk, as training reads them (sample order, copy to int64), cold (the
system is told to forget the file) and warm; peer: nanoGPT's loader, which copies rows from random places of a memory
map. --step: the loader's share of a real training step of the 124M model (minutes on a small machine).
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np
from competitors import machine

SEQ_LEN = 1024


def make_store(folder: Path, gigabytes: float) -> Path:
    from gptworks.data.formats import megatron
    from gptworks.data.formats.contents import Contents

    tokens = int(gigabytes * 1e9) // 2
    generator = np.random.default_rng(1)
    sizes = generator.integers(200, 2000, tokens // 1100)
    sizes[-1] += max(0, tokens - sizes.sum())
    data = np.lib.format.open_memmap(folder / "random.npy", "w+", np.uint16, (int(sizes.sum()),))
    for start in range(0, len(data), 1 << 24):
        data[start : start + (1 << 24)] = generator.integers(0, 50257, len(data[start : start + (1 << 24)]))
    megatron.write(folder / "store", Contents(data, sizes, np.arange(len(sizes) + 1)), 50257)
    (folder / "random.npy").unlink()
    return folder / "store"


def forget(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def ours(prefix: Path, windows: int, batch: int) -> float:
    from gptworks.config import DataConfig
    from gptworks.data.dataset import Dataset

    samples = Dataset(DataConfig(path=(str(prefix),), seq_len=SEQ_LEN, split=(1, 0, 0)), vocab_size=50257).samples(
        "train"
    )
    before = time.perf_counter()
    for first in range(0, windows, batch):
        samples.at(first, batch)
    return windows / (time.perf_counter() - before)


def nanogpt(prefix: Path, windows: int, batch: int) -> float:
    import torch

    before = time.perf_counter()
    for _ in range(0, windows, batch):
        data = np.memmap(prefix.with_suffix(".bin"), np.uint16, "r")
        places = torch.randint(len(data) - SEQ_LEN, (batch,))
        torch.stack([torch.from_numpy(data[i : i + SEQ_LEN].astype(np.int64)) for i in places])
        torch.stack([torch.from_numpy(data[i + 1 : i + 1 + SEQ_LEN].astype(np.int64)) for i in places])
    return windows / (time.perf_counter() - before)


def share_of_a_step(prefix: Path) -> None:
    import torch

    from gptworks import cpu
    from gptworks.config import BatchConfig, DataConfig, ModelConfig
    from gptworks.config.derive import solve_batch
    from gptworks.data.dataset import Dataset
    from gptworks.data.loader import Batches
    from gptworks.model import GPT

    cpu.settle()
    model = GPT(ModelConfig(num_layers=12, hidden_size=768, num_heads=12, vocab_size=50304, max_positions=1024))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dataset = Dataset(DataConfig(path=(str(prefix),), seq_len=SEQ_LEN, split=(1, 0, 0)), vocab_size=50304)
    plan = solve_batch(BatchConfig(global_size=1, micro_size=1), 1)
    batches = Batches(dataset.samples("train"), plan, dataset.eod_policy, vocab_size=50304)
    loading, whole = [], []
    for _ in range(4):
        before = time.perf_counter()
        (batch,) = batches.next_step()
        loaded = time.perf_counter()
        model(batch.tokens, **batch.keywords()).backward()
        optimizer.step()
        optimizer.zero_grad()
        loading.append(loaded - before)
        whole.append(time.perf_counter() - before)
    share = min(loading[1:]) / min(whole[1:])
    print(f"124M, one row of 1,024: step {min(whole[1:]):.2f} s, loader {min(loading[1:]) * 1e3:.2f} ms: {share:.4%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--windows", type=int, default=20000)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--step", action="store_true")
    args = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        prefix = make_store(Path(folder), args.gigabytes)
        file = prefix.with_suffix(".bin")
        print(f"{file.stat().st_size / 1e9:.2f} GB store, windows of {SEQ_LEN + 1} tokens, batches of {args.batch}")
        if args.step:
            share_of_a_step(prefix)
            return
        for name, read in (("gptworks", ours), ("nanoGPT's loader", nanogpt)):
            forget(file)
            cold = read(prefix, args.windows // 20, args.batch)
            for start in range(0, file.stat().st_size, 1 << 26):
                np.fromfile(file, np.uint8, 1 << 26, offset=start)
            warm = max(read(prefix, args.windows, args.batch) for _ in range(3))
            print(f"  {name:18} cold {cold:10,.0f} windows/s   warm {warm:10,.0f} windows/s")


if __name__ == "__main__":
    main()
