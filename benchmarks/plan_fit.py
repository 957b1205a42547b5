"""Fit the shares of plan/efficiency.toml to published speeds (benchmarks/published/speed.toml) and write the file.

    python benchmarks/plan_fit.py            # prints the fit, writes src/gptworks/plan/efficiency.toml
    python benchmarks/plan_fit.py --check    # says whether the file is what the fit gives

Few numbers, each with a meaning and an expectation from elsewhere (PRIORS): of a device generation the share of the
peak that a very large product reaches and the size at which it takes twice as long; of links the share of their speed;
of a program how many bytes it moves against those counted, and during how much of the computing messages travel.
Least squares of log(predicted / measured), each row weighing the same, with the expectations as weak further rows; so
a number that no row says anything about stays what is expected. Deterministic: the same data give the same file.
"""

import argparse
import math
import statistics
import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig
from gptworks.plan.devices import Device, device, link
from gptworks.plan.rates import Efficiency, facts
from gptworks.plan.time import Step, count, seconds
from gptworks.plan.workload import LayoutChoice, Workload

PUBLISHED = Path(__file__).parent / "published" / "speed.toml"
WRITTEN = Path(__file__).parents[1] / "src" / "gptworks" / "plan" / "efficiency.toml"

ROW_ERROR = 0.07  # how far a row may be off without meaning anything: what its settings leave open


@dataclass(frozen=True)
class Case:
    """One measured number, and the amounts of work that took the time."""

    table: str
    name: str
    program: str
    cluster: str
    unit: str
    measured: float  # as printed
    per_step: float  # printed number x seconds of a step (of ms: the number / seconds)
    device: Device
    precision: str
    step: Step
    counted: bool

    @property
    def seconds(self) -> float:
        return self.measured / 1000 if self.unit == "ms" else self.per_step / self.measured

    def printed(self, seconds: float) -> float:
        """The number that a step of so many seconds would have been printed as."""
        return seconds * 1000 if self.unit == "ms" else self.per_step / seconds


@dataclass(frozen=True)
class Prior:
    expected: float
    width: float  # of the logarithm; of a share of time (`overlap`) of the number itself
    why: str


def published() -> list[dict[str, Any]]:
    """The tables of speed.toml."""
    tables: list[dict[str, Any]] = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["tables"]
    return tables


def cases(tables: list[dict[str, Any]] | None = None) -> list[Case]:
    return [
        _case(table, row, program, measured)
        for table in (published() if tables is None else tables)
        for row in table["rows"]
        for program, measured in row["measured"].items()
    ]


def _case(table: dict[str, Any], row: dict[str, Any], program: str, measured: float) -> Case:
    said = {key: value for key, value in table.items() if key != "rows"} | row
    seq_len, dropout = said["seq_len"], said["dropout"]
    model = ModelConfig(
        num_layers=said["layers"],
        hidden_size=said["hidden"],
        num_heads=said["heads"],
        vocab_size=said["vocab_size"],
        max_positions=seq_len,
        dropout_hidden=dropout,
        dropout_attention=dropout,
    )
    axes = {axis: said.get(axis, 1) for axis in ("pp", "dp", "fsdp", "tp")}
    virtual = said.get("virtual", 1)
    parallel = ParallelConfig(
        **axes,
        sequence=said.get("sequence", False),
        zero=said.get("zero", 0),
        schedule="interleaved" if virtual > 1 else "1f1b",
        virtual_stages=virtual,
    )
    replicas = axes["dp"] * axes["fsdp"]
    batch = BatchPlan(said["batch"], said["micro"], said["batch"] // (said["micro"] * replicas), replicas)
    if batch.accumulation * batch.micro_size * replicas != said["batch"]:
        raise ValueError(f"{said['name']}, {said['case']}: the batch is not micro x accumulation x replicas")
    program_facts = replace(facts(program), **said.get("facts", {}).get(program, {}))
    if said.get("overlapped"):
        program_facts = replace(program_facts, overlaps=(*program_facts.overlaps, "dp"))
    card = device(said["device"])
    step = count(
        Workload(model, seq_len, PrecisionConfig(compute=said["precision"])),
        LayoutChoice(parallel, batch, said["recompute"]),
        card,
        link(said["link"], card),
        program_facts,
        layers=said.get("stages", {}).get(program),
    )
    per_step = {
        "ms": 1.0,
        "samples": said["batch"],
        "tokens": said["batch"] * seq_len,
        "tflops": _flops(model, said, seq_len) / math.prod(axes.values()) / 1e12,
    }[said["unit"]]
    return Case(
        said["name"],
        said["case"],
        program,
        said.get("cluster", ""),
        said["unit"],
        measured,
        per_step,
        card,
        said["precision"],
        step,
        said.get("counted", True),
    )


def _flops(model: ModelConfig, said: dict[str, Any], seq_len: int) -> float:
    """Of a step, as the table counts them."""
    layers, h, vocabulary = model.num_layers, model.hidden_size, model.vocab_size
    whole = said["batch"] * seq_len * layers * h * h
    if said.get("flops", "").startswith("recompute counted"):
        return 96 * whole * (1 + seq_len / (6 * h) + vocabulary / (16 * layers * h))
    return 72 * whole * (1 + seq_len / (6 * h) + vocabulary / (12 * layers * h))


# The fit


def priors(found: list[Case]) -> dict[str, Prior]:
    """What is expected of each number before any row is seen."""
    expected = {}
    for generation in sorted({case.device.generation for case in found}):
        cards = [case.device for case in found if case.device.generation == generation]
        intensity = cards[0].peak["fp16"] / cards[0].bandwidth
        expected[f"generations.{generation}.peak"] = Prior(0.75, 0.15, "of large products in vendors' libraries")
        expected[f"generations.{generation}.half"] = Prior(
            round(intensity), 0.35, "peak / bandwidth: below it, moving operands takes longer than multiplying"
        )
    expected["kernels.gap"] = Prior(4e-6, 0.5, "seconds; of CUDA kernels started one after the other")
    expected["links.inside"] = Prior(0.8, 0.15, "of NVLink, in NCCL's own tests of large messages")
    expected["links.between"] = Prior(0.85, 0.1, "of InfiniBand, likewise")
    for cluster in sorted({case.cluster for case in found} - {""}):
        expected[f"clusters.{cluster}.between"] = Prior(0.85, 0.35, "its cards are not named")
    for program in sorted({case.program for case in found}):
        expected[f"systems.{program}.elementwise"] = Prior(1.0, 0.3, "the kernels that were counted are all there are")
        if any(case.step.overlaps for case in found if case.program == program):
            expected[f"systems.{program}.overlap"] = Prior(0.8, 0.2, "all but the first and last layers")
    return expected


def rates(values: dict[str, float], case: Case) -> Efficiency:
    generation, program = f"generations.{case.device.generation}", f"systems.{case.program}"
    between = values.get(f"clusters.{case.cluster}.between", values["links.between"])
    return Efficiency(
        values[f"{generation}.peak"],
        values[f"{generation}.half"],
        values["kernels.gap"],
        values["links.inside"],
        between,
        values[f"{program}.elementwise"],
        values.get(f"{program}.overlap", 0.0),
    )


def predicted(values: dict[str, float], case: Case) -> float:
    return seconds(case.step, rates(values, case), case.device, case.precision).total


def fit(found: list[Case], start: dict[str, float] | None = None) -> dict[str, float]:
    """Gauss-Newton with halved steps; differences in place of derivatives."""
    expected = priors(found)
    names = list(expected)

    def free(name: str) -> bool:
        return not name.endswith(".overlap")

    def to_values(x: np.ndarray) -> dict[str, float]:
        return {
            name: math.exp(v) if free(name) else min(1.0, max(0.0, float(v))) for name, v in zip(names, x, strict=True)
        }

    centre = np.array([math.log(expected[n].expected) if free(n) else expected[n].expected for n in names])
    width = np.array([expected[n].width for n in names])
    counted = [case for case in found if case.counted]

    def misses(x: np.ndarray) -> np.ndarray:
        values = to_values(x)
        rows = [math.log(predicted(values, case) / case.seconds) / ROW_ERROR for case in counted]
        return np.concatenate([rows, (x - centre) / width])

    x = centre
    if start is not None:
        x = np.array([math.log(start[n]) if free(n) else start[n] for n in names])
    here = misses(x)

    def slopes_at(x: np.ndarray, here: np.ndarray) -> np.ndarray:
        found = np.empty((len(here), len(x)))
        for column in range(len(x)):
            moved = x.copy()
            moved[column] += 1e-5 if moved[column] < 0.99 else -1e-5
            found[:, column] = (misses(moved) - here) / (moved[column] - x[column])
        return found

    slopes = slopes_at(x, here)
    for _ in range(30):
        way = np.linalg.solve(slopes.T @ slopes, -slopes.T @ here)
        length = 1.0
        while length > 1e-3 and (there := misses(x + length * way)) @ there >= here @ here:
            length /= 2
        if length <= 1e-3:
            break
        gain = here @ here - there @ there
        x, here = x + length * way, there
        if gain < 1e-7 * (here @ here):
            break
        slopes = slopes_at(x, here)
    return to_values(x)


# The file


def alike(case: Case, other: Case) -> bool:
    """The same case measured twice: neither may tell the fit about the other."""
    return (case.program, case.device, case.step) == (other.program, other.device, other.step)


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def error(values: dict[str, float], case: Case) -> float:
    """Of the printed number: 0.1 = predicted 10 % above it."""
    return case.printed(predicted(values, case)) / case.measured - 1


def of_ours(values: dict[str, float]) -> dict[str, float]:
    """Nobody has published our own speed. Bytes: the mean of the Megatrons, which count and start kernels as we do, in
    PyTorch; overlap: the mean of all that overlap."""
    moved = [value for name, value in values.items() if "megatron" in name and name.endswith(".elementwise")]
    overlaps = [value for name, value in values.items() if name.endswith(".overlap")]
    return {
        "systems.ours.elementwise": math.exp(sum(map(math.log, moved)) / len(moved)),
        "systems.ours.overlap": sum(overlaps) / len(overlaps),
    }


def written(found: list[Case], values: dict[str, float]) -> str:
    """The text of efficiency.toml."""
    values = rounded(values | of_ours(values))
    for name in {name.rpartition(".")[0] for name in values if name.startswith("systems.")}:
        values.setdefault(f"{name}.overlap", 0.0)
    counted = sorted(abs(error(values, case)) for case in found if case.counted)
    lines = [
        "# Written by benchmarks/plan_fit.py from benchmarks/published/speed.toml: change those, not this.",
        "# What the numbers mean: Efficiency in plan/rates.py. Errors, each row left out: benchmarks/plan_speed.py.",
        "",
        "[fit]",
        f"rows = {len(counted)}",
        f"median_error = {statistics.median(counted):.3f}",
        f"worst_error = {counted[-1]:.3f}",
    ]
    tables: dict[str, list[str]] = {}
    for name, value in sorted(values.items()):
        table, _, key = name.rpartition(".")
        tables.setdefault(table, []).append(f"{key} = {value:g}")
    for table, entries in tables.items():
        lines += ["", f"[{table}]", *entries]
    lines += [
        "",
        "# Not fitted: the peak of a CPU is given, or measured by a product of two [1024, 1024]; the products of five",
        "# small models on one thread reached about this share of it.",
        "[generations.cpu]",
        "half = 32",
        "peak = 0.85",
    ]
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument(
        "--check", action="store_true", help="write nothing; say whether the file is what the fit gives"
    )
    asked = options.parse_args(arguments)
    found = cases()
    values = fit(found)
    for name, prior in priors(found).items():
        print(f"{name:34} {values[name]:10.4g}   expected {prior.expected:g}: {prior.why}")
    text = written(found, values)
    if asked.check:
        same = text == WRITTEN.read_text(encoding="utf-8")
        print("efficiency.toml is " + ("what the fit gives" if same else "NOT what the fit gives: run without --check"))
        return 0 if same else 1
    WRITTEN.write_text(text, encoding="utf-8")
    print(f"wrote {WRITTEN.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
