"""Claim: a conversion holds no more than a few tensors, whatever the size of the checkpoint.

    python benchmarks/convert.py [--folder DIR] [--quick] [--formats hf gguf ...]

A 1.3B model (24 x 2048, 50,304 words, fp32: 5.3 GB) is written as a Hugging Face folder, converted to each format and
back, every time by the command line in a process of its own. Its peak memory (resident set, as the kernel counts it) is
at most 3 x the largest tensor + 300 MB; a `.pdparams` file, though one pickle, has the same limit: its arrays stay in
the file. What comes back from a format that keeps fp32 has the bytes that went there, by hash. Every result is removed
before the next; about 17 GB of disk are needed.
"""

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from competitors import machine
from torch import Tensor

from gptworks.checkpoint.lazy_tensor import LazyTensor
from gptworks.checkpoint.rules import our_shapes
from gptworks.checkpoint.systems import huggingface, registry
from gptworks.checkpoint.systems.contract import Weights
from gptworks.config.schema import ModelConfig

LARGE = ModelConfig(num_layers=24, hidden_size=2048, num_heads=16, vocab_size=50304, max_positions=1024)
QUICK = ModelConfig(num_layers=4, hidden_size=256, num_heads=4, vocab_size=50304, max_positions=128)
ALLOWED_MB = 300
WITHOUT_HEADS = ("mindspore", "oneflow")
NOT_EXACT = ("gguf-q8_0",)


def drawn(name: str, shape: torch.Size) -> LazyTensor:
    def read() -> Tensor:
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return torch.empty(shape).normal_(std=0.02, generator=generator)

    return LazyTensor(shape, torch.float32, read)


def converted(source: Path, target: Path, to: str, heads: int | None) -> tuple[int, float, float]:
    """(exit code, peak MB, seconds) of `gptworks convert`. `heads`: for a source that does not carry them."""
    command = [sys.executable, "-m", "gptworks", "convert", str(source), str(target), "--to", to]
    started = time.perf_counter()
    if heads is not None:
        command += ["-o", f"model.num_heads={heads}"]
    quiet = os.posix_spawn(
        sys.executable, command, os.environ, file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    )
    _, status, usage = os.wait4(quiet, 0)
    return os.waitstatus_to_exitcode(status), usage.ru_maxrss / 1024, time.perf_counter() - started


def hashes(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--formats", nargs="+", default=[name for name in registry.WRITTEN if name != "gptworks"])
    args = parser.parse_args()
    model = QUICK if args.quick else LARGE
    shapes = our_shapes(model)
    largest = max(shape.numel() for shape in shapes.values()) * 4 / 2**20
    total = sum(shape.numel() for shape in shapes.values()) * 4 / 2**20
    limit = 3 * largest + ALLOWED_MB
    print(machine())
    print(f"{model.num_layers} x {model.hidden_size}: {total:,.0f} MB in fp32, largest tensor {largest:,.0f} MB")
    failed = False
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        (folder / "hf").mkdir()
        huggingface.write(folder / "hf", Weights(model, {name: drawn(name, shape) for name, shape in shapes.items()}))
        original = hashes(folder / "hf")
        print(f"{'':24} {'peak MB':>9} {'allowed':>9} {'seconds':>8} {'MB/s':>7}")
        for to in args.formats:
            there = folder / f"there{registry.system(to).SUFFIX}"
            for label, source, target, kind in (
                (f"hf -> {to}", folder / "hf", there, to),
                (f"{to} -> hf", there, folder / "back", "hf"),
            ):
                heads = model.num_heads if source == there and to in WITHOUT_HEADS else None
                code, peak, seconds = converted(source, target, kind, heads)
                verdict = "" if code == 0 and peak <= limit else "  <- exit code " + str(code) if code else "  <- above"
                if not code and source == there and to not in NOT_EXACT and hashes(target) != original:
                    verdict += "  <- other bytes came back"
                failed |= bool(verdict)
                print(
                    f"{label:24} {peak:9,.0f} {limit:9,.0f} {seconds:8.1f} {total / seconds:7,.0f}{verdict}", flush=True
                )
            remove(there)
            remove(folder / "back")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
