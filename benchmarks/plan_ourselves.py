"""Claim: what plan/memory.py and plan/communication.py say of our own training is what happens.

    python benchmarks/plan_ourselves.py [memory] [traffic] [simulator] [--case NAME ...]

memory      Real steps on the CPU, in fresh processes: the most tensor bytes that are alive (counted operator by
            operator), and the growth of the resident set from before the model is built to its highest. Predicted
            within 5 % of both. For the second, malloc gives each freed tensor back to the system; in training it keeps
            what is below 32 MB for reuse, which is faster and leaves holes: `--kept` measures that instead.
traffic     The bytes of a step, counted, are those of the formula, for every layout of the tests of the parallel code.
simulator   Closed form and simulator (simulate/step.py) within 5 % of each other on 20 layouts.
"""

import argparse
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from competitors import machine

from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import InitConfig, ModelConfig, OptimConfig, ParallelConfig, PrecisionConfig, ScalerConfig
from gptworks.plan.memory import RankMemory, memory

LIMIT = 0.05
ROOT = Path(__file__).resolve().parents[1]
MB = 1e6


@dataclass(frozen=True)
class Case:
    name: str
    layout: str = "1"
    model: dict[str, Any] = field(default_factory=dict)
    parallel: dict[str, Any] = field(default_factory=dict)
    rows: int = 10
    accumulation: int = 1
    compute: str = "fp32"
    recompute: str = "none"

    @property
    def shape(self) -> ModelConfig:
        return ModelConfig(**MODEL | self.model)

    @property
    def known(self) -> ParallelConfig:
        return ParallelConfig(**vars(Layout.parse(self.layout)) | self.parallel)

    @property
    def batch(self) -> BatchPlan:
        data = Layout.parse(self.layout).data_parallel
        return BatchPlan(self.rows * self.accumulation * data, self.rows, self.accumulation, data)


# Several hundred MB each, so that what the process itself needs is small beside it; a few seconds each.
MODEL = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "vocab_size": 4096, "max_positions": 256}
TINY = {"num_layers": 4, "hidden_size": 32, "num_heads": 4, "vocab_size": 256, "max_positions": 16}
DROPOUT = {"dropout_embed": 0.1, "dropout_hidden": 0.1}
CASES = [
    Case("fp32"),
    Case("accumulation", accumulation=2, rows=8),
    Case("bf16, dropout", model=DROPOUT, compute="bf16", rows=8),
    Case("recompute", recompute="full", rows=16),
    Case("attention dropout", model=DROPOUT | {"dropout_attention": 0.1}, rows=4),
    Case("fsdp2 zero 3", "fsdp2", compute="bf16", rows=8),
    Case("fsdp2 zero 1", "fsdp2", parallel={"zero": 1}, accumulation=2, rows=6),
    Case("tp2", "tp2", rows=12),
    Case("pp2", "pp2", accumulation=4, rows=6),
]


def predicted(case: Case) -> list[RankMemory]:
    precision = PrecisionConfig.model_validate({"compute": case.compute})
    length = case.shape.max_positions
    return memory(case.shape, case.known, case.batch, length, precision=precision, recompute=case.recompute)


# One rank, in a process of its own


def resident(key: str) -> int:
    """VmRSS: now; VmHWM: the most there was."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux.")


def forget_highest() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def train(case: Case, world: Any, steps: int = 2, tracker: Any = None) -> None:
    """As the training loop does it."""
    import torch

    from gptworks.data.loader import Batch
    from gptworks.parallel.apply import FreshWeights, build
    from gptworks.train import optim
    from gptworks.train.precision import DTYPES, LossScaler
    from gptworks.train.step import train_step

    cfg = case.shape
    weights = FreshWeights(InitConfig(), cfg.num_layers, seed=1)
    compute = DTYPES[case.compute]
    part = build(cfg, world, compute, weights, parallel=case.known, recompute_mode=case.recompute)
    part.train()
    optimizer = optim.build(part, OptimConfig())
    scaler = LossScaler(ScalerConfig(), enabled=False)
    micro_batches = []
    for _ in range(case.accumulation):
        windows = torch.randint(0, cfg.vocab_size, (case.rows, cfg.max_positions + 1))
        ids = torch.arange(case.rows)
        micro_batches.append(Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), None, None, ids))
    for step in range(1, steps + 1):
        if tracker is not None:  # Adam's moments exist from the first step on; in a pipeline, stages meet in it
            tracker.peak = 0
        train_step(part, optimizer, micro_batches, world, scaler, clip=1.0, seed=1, step=step)


def measure(case: Case, rank: int, rendezvous: str, tracked: bool) -> dict[str, int]:
    import torch

    from gptworks.launch import process_group
    from gptworks.launch.world import World

    torch.set_num_threads(1)
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        process_group.keep_freed_memory()
    layout = Layout.parse(case.layout)
    world = World(torch.device("cpu"))
    if layout.world_size > 1:
        from torch import distributed

        store = distributed.FileStore(rendezvous, layout.world_size)
        world = process_group.join(layout, rank, torch.device("cpu"), store=store)
    # Kernels, connections and Python modules are loaded when first used: a tiny model first.
    train(Case(**asdict(case) | {"model": case.model | TINY}), world)
    gc.collect()
    if tracked:
        from gptworks.simulate.tracker import Tracker

        with Tracker() as tracker:
            train(case, world, tracker=tracker)
        return {"pp": world.place.pp, "tensors": tracker.peak}
    forget_highest()
    before = resident("VmRSS")
    train(case, world)
    return {"pp": world.place.pp, "resident": resident("VmHWM") - before}


# glibc's: every tensor of some size in pages of its own.
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def measured(case: Case, kept: bool = False) -> list[dict[str, int]]:
    """Of each pipeline rank the most of its ranks: tensors, resident."""
    layout = Layout.parse(case.layout)
    found = [{"tensors": 0, "resident": 0} for _ in range(layout.pp)]
    for what in ("tensors", "resident"):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--case",
                case.name,
                "--rendezvous",
                f"{folder}/rendezvous",
                "--what",
                what,
            ]
            env = os.environ | {"OMP_NUM_THREADS": "1"} | ({} if kept else GIVEN_BACK)
            started = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, env=env, text=True)
                for rank in range(layout.world_size)
            ]
            answers = [process.communicate(timeout=600)[0] for process in started]
            if any(process.returncode for process in started):
                raise SystemExit(f"{case.name}: a rank failed")
        for answer in answers:
            one = json.loads(answer.splitlines()[-1])
            found[one["pp"]][what] = max(found[one["pp"]][what], one[what])
    return found


def memory_rows(cases: list[Case], kept: bool = False) -> Iterator[tuple[list[str], bool]]:
    yield ["case", "rank", "predicted MB", "tensors MB", "", "resident MB", "", "peak in"], True
    for case in cases:
        for expected, got in zip(predicted(case), measured(case, kept), strict=True):
            errors = {what: expected.peak / got[what] - 1 for what in ("tensors", "resident")}
            row = [
                case.name,
                f"pp {expected.pp_rank}",
                f"{expected.peak / MB:.1f}",
                f"{got['tensors'] / MB:.1f}",
                f"{errors['tensors']:+.1%}",
                f"{got['resident'] / MB:.1f}",
                f"{errors['resident']:+.1%}",
                expected.moment,
            ]
            yield row, all(abs(error) <= LIMIT for error in errors.values())


# Bytes that are sent


def _forked(function: Callable[[Any], Any], layout: Layout, rank: int, rendezvous: str, results: Any) -> None:
    import torch
    from torch import distributed

    from gptworks.launch import process_group

    torch.set_num_threads(1)
    try:
        store = distributed.FileStore(rendezvous, layout.world_size)
        world = process_group.join(layout, rank, torch.device("cpu"), store=store)
        results.put((rank, function(world), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def on_ranks(layout: Layout, function: Callable[[Any], Any]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    results, found = context.Queue(), {}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_forked, args=(function, layout, rank, f"{folder}/rendezvous", results), daemon=True)
            for rank in range(layout.world_size)
        ]
        for process in processes:
            process.start()
        try:
            while len(found) < layout.world_size:
                rank, value, failure = results.get(timeout=300)
                if failure:
                    raise SystemExit(f"rank {rank} of {layout}:\n{failure}")
                found[rank] = value
        finally:
            for process in processes:
                process.join(5 if len(found) == layout.world_size else 0)
                process.kill()
    return [found[rank] for rank in range(layout.world_size)]


def traffic_rows() -> Iterator[tuple[list[str], bool]]:
    """The layouts and the counting are those of tests/distributed/test_communication.py."""
    sys.path.insert(0, str(ROOT / "tests" / "distributed"))
    import steps
    import test_communication as tests

    from gptworks.plan import communication

    yield ["layout", "micro-batches", "said of it", "ranks", "bytes of rank 0", "counted"], True
    for name, micro, parallel in [*tests.CASES, *tests.COMBINED]:
        layout = Layout.parse(name)
        case = steps.Case(micro, {"num_layers": 5}, parallel)
        agree, total = True, 0
        for place, counts in on_ranks(layout, lambda world, case=case: tests.counted(world, case)):
            expected = communication.totals(tests.terms(steps.shape(**case.model), layout, case, place))
            agree &= counts == expected
            total = total or sum(expected.values())
        said = ", ".join(f"{key}: {value}" for key, value in parallel.items())
        row = [name, str(micro), said, str(layout.world_size), f"{total:,}", "equal" if agree else "DIFFERS"]
        yield row, agree


# The simulator


GPT = {"num_layers": 24, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304, "max_positions": 1024}
SMALL = {"num_layers": 8, "hidden_size": 1024, "num_heads": 16, "vocab_size": 50304, "max_positions": 1024}
SIMULATED = [
    Case("one", model=SMALL),
    Case("one bf16", model=SMALL, compute="bf16"),
    Case("one bf16 full", model=SMALL, compute="bf16", recompute="full", accumulation=2),
    Case("one bf16 full_attn", model=SMALL, compute="bf16", recompute="full_attn"),
    Case("one untied", model=SMALL | {"tied": False}, accumulation=2),
    Case("one dropout", model=SMALL | DROPOUT, compute="bf16", accumulation=2),
    Case("one math core_attn", model=SMALL | {"attention": "math"}, compute="bf16", recompute="core_attn"),
    Case("dp4", "dp4", model=SMALL, compute="bf16", accumulation=2),
    Case("fsdp4", "fsdp4", model=SMALL, compute="bf16"),
    Case("fsdp4 zero 2", "fsdp4", model=SMALL, parallel={"zero": 2}, compute="bf16", accumulation=2),
    Case("fsdp4 zero 1", "fsdp4", model=SMALL, parallel={"zero": 1}, compute="bf16", accumulation=2),
    Case("dp2.fsdp2", "dp2.fsdp2", model=SMALL, compute="bf16", accumulation=2),
    Case("tp4", "tp4", model=SMALL, compute="bf16"),
    Case("tp4 whole sequence", "tp4", model=SMALL, parallel={"sequence": False}, compute="bf16"),
    Case("fsdp2.tp2", "fsdp2.tp2", model=SMALL, compute="bf16", recompute="full"),
    Case("pp4", "pp4", model=SMALL, compute="bf16", accumulation=8, rows=1),
    Case("pp2 gpipe", "pp2", model=SMALL, parallel={"schedule": "gpipe"}, accumulation=4, rows=1),
    Case(
        "pp2 interleaved",
        "pp2",
        model=SMALL,
        parallel={"schedule": "interleaved", "virtual_stages": 2},
        accumulation=4,
        rows=1,
    ),
    Case("pp4.tp2 zero_bubble", "pp4.tp2", model=SMALL, parallel={"schedule": "zero_bubble"}, accumulation=4, rows=1),
    Case("pp2.fsdp2.tp2", "pp2.fsdp2.tp2", model=GPT, compute="bf16", accumulation=4, rows=1),
]


def simulator_rows() -> Iterator[tuple[list[str], bool]]:
    from gptworks.config.schema import RunConfig
    from gptworks.simulate.step import simulate

    yield ["layout", "rank", "closed form MB", "simulator MB", ""], True
    for case in SIMULATED:
        layout = Layout.parse(case.layout)
        cfg = RunConfig.model_validate(
            {
                "model": MODEL | case.model,
                "data": {"seq_len": case.shape.max_positions},
                "batch": {"micro_size": case.rows, "accumulation": case.accumulation},
                "parallel": vars(layout) | case.parallel,
                "precision": {"compute": case.compute},
                "train": {"recompute": case.recompute, "steps": 2},
            }
        )
        every = predicted(case)
        for pp_rank in sorted({0, layout.pp - 1}):
            expected = every[pp_rank].peak
            found = simulate(cfg, layout.world_size, pp_rank * layout.world_size // layout.pp)
            error = expected / found.peak - 1
            row = [case.name, f"pp {pp_rank}", f"{expected / MB:.1f}", f"{found.peak / MB:.1f}", f"{error:+.1%}"]
            yield row, abs(error) <= LIMIT


PARTS: dict[str, Callable[..., Iterator[tuple[list[str], bool]]]] = {
    "memory": lambda cases=CASES, kept=False: memory_rows(cases, kept),
    "traffic": traffic_rows,
    "simulator": simulator_rows,
}


def rows() -> Iterator[list[str]]:
    for part in PARTS.values():
        yield from (row for row, _ in part())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="what to compare; all of it if not said")
    parser.add_argument("--case", nargs="*", help="names of cases of `memory`")
    parser.add_argument("--kept", action="store_true", help="let malloc keep what is freed, as in training")
    for hidden in ("--rank", "--rendezvous", "--what"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    cases = [case for case in CASES if not asked.case or case.name in asked.case]
    if asked.rank is not None:  # one of the processes that are measured
        print(json.dumps(measure(cases[0], int(asked.rank), asked.rendezvous, asked.what == "tensors")))
        return 0
    print(machine())
    all_good = True
    for name in asked.parts or (["memory"] if asked.case else list(PARTS)):
        print(f"{name}:")
        part = PARTS[name](cases, asked.kept) if name == "memory" else PARTS[name]()
        for row, good in part:
            print(
                "  " + "  ".join(cell.rjust(14) for cell in row) + ("" if good else "   <-- over the limit"), flush=True
            )
            all_good &= good
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
