"""Claim: memory per card as published for three other systems, predicted within 10 % from the facts of their code.

    python benchmarks/plan_memory.py [--only NAME ...] [--parts]

46 figures (benchmarks/published/memory.toml): OneFlow and Megatron-LM on V100-16G (DLPerf, 18 cases each), PaddleFleetX
on V100-32G (2), PaddleFleetX and its references on A100-40G (4 each). The rules are in gptworks.simulate.systems; none
of their constants is fitted to a row. --parts prints what each prediction is made of. Takes some minutes.
"""

import argparse
import statistics
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptworks.simulate.systems.case import Case, Parts
from gptworks.simulate.systems.deepspeed import deepspeed
from gptworks.simulate.systems.fleetx import fleetx
from gptworks.simulate.systems.megatron import megatron
from gptworks.simulate.systems.oneflow import oneflow

PUBLISHED = Path(__file__).parent / "published" / "memory.toml"
WITHIN = 0.10

SYSTEMS = {
    "oneflow": oneflow,
    "megatron-2021": lambda case: megatron(case, 2021),
    "megatron-2022": lambda case: megatron(case, 2022),
    "fleetx": fleetx,
    "deepspeed": deepspeed,
}

# Figures that the rules do not reach, each with the arithmetic that says why.
MISSES = {
    ("MP_1x32x1_16_3072x32", "megatron-2021"): (
        "below what must be there: 32 layer inputs of 192 MiB = 6144, 18 bytes x 125 M parameters = 2147, "
        "context 1007, NCCL 144: 9442 > 8834; the allocator is at the end of the card and gives memory back "
        "several times a step: the figure was read after one of these"
    ),
    ("175B tp8 pp16", "fleetx"): (
        "16 bytes x 1.45 G parameters = 22136, context 1687 and NCCL 744 leave 10345 of 34912 for the step; whole "
        "layers recomputed need 3288 and make the allocator hold 2819 more, the core alone does not fit on the card: "
        "4238 are not explained by any setting"
    ),
}


@dataclass(frozen=True)
class Row:
    name: str
    system: str
    published: float  # MiB
    parts: Parts | None  # None: the prediction does not fit on the card
    note: str

    @property
    def predicted(self) -> float:
        return sum(self.parts.values()) if self.parts else float("inf")

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


def published() -> list[dict[str, Any]]:
    return tomllib.loads(PUBLISHED.read_text())["row"]


def predict(system: str, case: Case) -> Parts | None:
    try:
        return SYSTEMS[system](case)
    except MemoryError:
        return None


def rows(only: list[str] | None = None) -> Iterator[Row]:
    for line in published():
        if only and not any(word in line["name"] for word in only):
            continue
        settings = line.get("open", [{}])
        figures = line["published"]
        cases = [Case(**line["case"], **setting) for setting in settings]
        parts = {(system, i): predict(system, case) for system in figures for i, case in enumerate(cases)}
        candidates = {key: Row(line["name"], key[0], figures[key[0]], value, "") for key, value in parts.items()}
        for system, figure in figures.items():
            note, chosen = MISSES.get((line["name"], system), ""), 0
            if len(settings) > 1:  # the setting is chosen by the other system's figure, never by this one
                (other,) = figures.keys() - {system}
                chosen = min(range(len(settings)), key=lambda i: abs(candidates[other, i].error))
                told = ", ".join(f"{key} {value}" for key, value in settings[chosen].items())
                note = f"{told}, by the figure of {other}" + (f"; {note}" if note else "")
            yield Row(line["name"], system, figure, parts[system, chosen], note)


def summary(found: list[Row]) -> str:
    errors = sorted((abs(row.error), row.name, row.system) for row in found)
    inside = sum(error <= WITHIN for error, _, _ in errors)
    worst = errors[-1]
    return (
        f"{inside} of {len(found)} within {WITHIN:.0%}; median error {statistics.median(e for e, _, _ in errors):.1%}, "
        f"worst {worst[0]:.1%} ({worst[1]}, {worst[2]})"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", help="only rows whose name holds one of these words")
    parser.add_argument("--parts", action="store_true", help="what each prediction is made of")
    options = parser.parse_args()
    found: list[Row] = []
    print(f"{'case':<26}{'system':<15}{'published':>10}{'predicted':>11}{'error':>8}  note (MiB)")
    for row in rows(options.only):
        found.append(row)
        figures = f"{row.published:>10.0f}{row.predicted:>11.0f}{row.error:>+8.1%}"
        print(f"{row.name:<26}{row.system:<15}{figures}  {row.note}", flush=True)
        if options.parts and row.parts:
            print("    " + ", ".join(f"{name} {value:.0f}" for name, value in row.parts.items()))
    print(summary(found))
    unexplained = [row for row in found if abs(row.error) > WITHIN and (row.name, row.system) not in MISSES]
    return 1 if unexplained else 0


if __name__ == "__main__":
    raise SystemExit(main())
