"""Several GPUs at work together, tried as a run would use them: two ranks, a sum, a sharded step, save and resume.

    python -m gptworks.doctor.gpus launch FOLDER DEVICE RANKS     the launcher of the ranks
    python -m gptworks.doctor.gpus rank FOLDER DEVICE RANKS       one of them

All of it happens in processes of their own with a time limit: whatever dies or hangs there is a finding here.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gptworks.doctor.finding import Finding, note, problem

LIMIT = 300.0  # seconds for all of it; on a new machine most of that is the first start of CUDA and NCCL
_TIMEOUT = 60  # seconds after which the ranks themselves say who hangs
_STAGES = ("gpus: ranks meet", "gpus: all-reduce", "gpus: sharded step, saved", "gpus: resumed")
_DONE = "done.jsonl"
_FIX = (
    "Every run on several GPUs will fail like this. Look at nvidia-smi and at the driver; NCCL_DEBUG=INFO tells more."
)


def findings(device: str = "cuda", limit: float = LIMIT) -> list[Finding]:
    """device: cuda; or cpu, where the same is tried with two processes and gloo."""
    import torch

    count = torch.cuda.device_count() if device == "cuda" else 2
    if not count:
        return problem("gpus", "no CUDA device answers", "Look at nvidia-smi, the driver, and CUDA_VISIBLE_DEVICES.")
    ranks = min(2, count)
    with tempfile.TemporaryDirectory(prefix="gptworks-gpus-") as name:
        folder = Path(name)
        _write_tokens(folder / "tokens.bin")
        failure = _launched(folder, device, ranks, limit)
        done = folder / _DONE
        lines = [json.loads(line) for line in done.read_text().splitlines()] if done.exists() else []
    findings = [Finding(stage, "ok", text) for stage, text in zip(_STAGES, lines, strict=False)]
    if len(lines) < len(_STAGES):
        findings += problem(_STAGES[len(lines)], failure or "ended without a word", _FIX)
    elif failure:
        findings += problem("gpus: end", failure, _FIX)
    if ranks == 1:
        findings += note("gpus", "one device only: what several do together was not tried")
    return findings


def _launched(folder: Path, device: str, ranks: int, limit: float) -> str:
    """Empty where all went well, else the last words."""
    command = [sys.executable, "-m", "gptworks.doctor.gpus", "launch", str(folder), device, str(ranks)]
    try:
        # Killed when the limit is over; its ranks end with it.
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer for {limit:g} s"
    if done.returncode == 0:
        return ""
    words = done.stderr.strip().removeprefix("error: ") or f"ended with exit code {done.returncode}"
    return " ".join(words.splitlines()[-3:])


def _write_tokens(path: Path) -> None:
    """Enough for some steps, in nanoGPT's format: bare numbers."""
    import numpy as np

    np.random.default_rng(0).integers(0, 64, 2048).astype("<u2").tofile(path)


def _config(folder: Path, device: str, ranks: int, steps: int) -> Any:
    from gptworks.config.load import from_dict

    model = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 64, "max_positions": 16}
    return from_dict(
        {
            "model": model,
            "data": {"path": str(folder / "tokens.bin"), "seq_len": 16},
            "batch": {"global_size": 2 * ranks},
            "parallel": {"fsdp": ranks, "timeout": _TIMEOUT},
            "train": {"steps": steps},
            "checkpoint": {"portable": False},
            "run": {"device": device, "out": str(folder / "run"), "threads": 1},
        }
    )


def _launch(folder: Path, device: str, ranks: int) -> int:
    from gptworks.errors import GPTWorksError
    from gptworks.launch import supervise

    command = ("-m", "gptworks.doctor.gpus", "rank", str(folder), device, str(ranks))
    preload = ("gptworks.train.run",)
    try:
        return supervise.run(supervise.Job(command, ranks, folder / "logs", quiet=True, preload=preload))
    except GPTWorksError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _rank(folder: Path, device: str, ranks: int) -> None:
    import torch
    from torch import distributed

    from gptworks.launch import process_group
    from gptworks.train.loop import train

    def tell(text: str) -> None:
        if world.is_main:
            with (folder / _DONE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(text) + "\n")

    cfg = _config(folder, device, ranks, steps=1)
    world = process_group.start(cfg.parallel, cfg.run)
    backend = process_group.backend_of(world.device) if ranks > 1 else "one process"
    tell(f"{ranks} on {world.device.type} ({backend})")
    numbers = torch.full((1024,), world.rank + 1.0, device=world.device)
    if ranks > 1:
        distributed.all_reduce(numbers)
    expected = ranks * (ranks + 1) / 2
    if set(numbers.tolist()) != {expected}:
        raise ValueError(f"all-reduce gave {numbers.unique().tolist()[:4]}, needed {expected}")
    tell(f"{ranks} ranks added up {numbers.numel():,} numbers")
    first = train(cfg)
    tell(f"step {first.step} with fsdp {ranks}")
    second = train(_config(folder, device, ranks, steps=2), resume_from="auto")
    if (first.step, second.step) != (1, 2):
        raise ValueError(f"resumed to step {second.step} from {first.step}, needed 2 from 1")
    tell(f"went on from the checkpoint to step {second.step}")


def main(role: str, folder: str, device: str, ranks: str) -> int:
    if role == "launch":
        return _launch(Path(folder), device, int(ranks))
    from gptworks.launch.reporting import reporting

    with reporting():
        _rank(Path(folder), device, int(ranks))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
