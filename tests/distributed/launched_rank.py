"""What a launched rank does in the tests of the launcher: a little sum per step, saved, with mishaps on demand.

launched_rank.py FOLDER STEPS [--timeout S] [--pause S] [--slow-begin S] [--slow-save S] [--slow-end S]
                [--mishap RANK:STEP:KIND]
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import distributed

from gptworks.config.schema import RunFolderConfig
from gptworks.errors import DataError
from gptworks.launch import heartbeat, process_group, rank_env, rank_process
from gptworks.launch.reporting import reporting
from gptworks.train.run_folder import Interrupts


def train_a_little(args: argparse.Namespace) -> None:
    place = rank_env.read(os.environ)
    world_size = place.world_size
    if place.rank and args.slow_begin:
        (args.folder / "slow").touch()
        time.sleep(args.slow_begin)
    parallel = SimpleNamespace(pp=1, dp=world_size, fsdp=1, tp=1, timeout=args.timeout)
    world = process_group.start(parallel, RunFolderConfig(device="cpu"))  # type: ignore[arg-type]
    attempt = int(os.environ.get(rank_env.ATTEMPT, "0"))
    (args.folder / f"rank-{world.rank}-{attempt}.pid").write_text(str(os.getpid()))
    (args.folder / f"rank-{world.rank}.threads").write_text(str(torch.get_num_threads()))
    saved = args.folder / "saved.json"
    start = torch.tensor(json.loads(saved.read_text()) if attempt and saved.exists() else [0, 0.0], dtype=torch.float64)
    axis = world.axis("dp")
    group = axis.get_group() if axis else None
    if world_size > 1:
        distributed.broadcast(start, 0, group=group)  # a machine that was started anew knows of no attempt before
    step, value = int(start[0]), float(start[1])
    print(f"rank {world.rank} of {world_size} begins after step {step}", flush=True)
    with Interrupts() as interrupts:
        while step < args.steps:
            step += 1
            heartbeat.note(f"step {step}")
            mishap(args, world.rank, step, attempt)
            numbers = torch.tensor([float(step * (world.rank + 1)), float(interrupts.received is not None)])
            if world_size > 1:
                distributed.all_reduce(numbers, group=group)
            value = 0.9 * value + float(numbers[0])
            stop = bool(numbers[1])
            if world.is_main:
                with (args.folder / "values.jsonl").open("a") as file:
                    file.write(json.dumps([step, value]) + "\n")
                if step % 2 == 0 or stop:
                    time.sleep(args.slow_save if stop else 0)
                    (args.folder / "new.json").write_text(json.dumps([step, value]))
                    (args.folder / "new.json").replace(saved)
            if stop:
                rank_process.note_stopped()
                break
            time.sleep(args.pause)
    print(f"rank {world.rank} ends after step {step}", flush=True)


def mishap(args: argparse.Namespace, rank: int, step: int, attempt: int) -> None:
    where, _, kind = args.mishap.rpartition(":")
    if where != f"{rank}:{step}" or attempt:
        return
    if kind == "user":
        raise DataError("data/corpus: the store is too small.")
    if kind == "fault":
        raise ZeroDivisionError("division by zero")
    if kind == "exit":
        print("error: no such preset: gtp2", file=sys.stderr)
        sys.exit(2)
    if kind == "late":
        time.sleep(60)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--timeout", type=int, default=60)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--mishap", default="")
    parser.add_argument("--slow-begin", type=float, default=0.0)
    parser.add_argument("--slow-save", type=float, default=0.0)
    parser.add_argument("--slow-end", type=float, default=0.0)
    parsed = parser.parse_args()
    with reporting(parsed.folder):
        train_a_little(parsed)
    if int(os.environ.get("RANK", "0")):
        time.sleep(parsed.slow_end)  # threads and libraries that take their time to end
