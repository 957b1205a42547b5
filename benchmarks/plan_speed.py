"""Predicted against published speed of GPT training.

    python benchmarks/plan_speed.py            # the table: predicted by the fit, and by a fit that did not see the row
    python benchmarks/plan_speed.py --parts    # and where the time goes
    python benchmarks/plan_speed.py --readings # what other readings of unprinted settings would give

Rows, with the source of each setting: benchmarks/published/speed.toml. Errors are those of the printed number
(tokens/s, TFLOP/s, samples/s or ms). "left out": the row, and any that repeats the same case, was not in the fit that
predicts it. Rows quoted from memory or not credible are printed in brackets, and neither fitted nor counted.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any

from plan_fit import Case, alike, cases, error, fit, predicted, published, rates, rounded

from gptworks.plan.time import seconds

UNITS = {"ms": "ms", "tokens": "tokens/s", "samples": "samples/s", "tflops": "TFLOP/s"}


@dataclass(frozen=True)
class Row:
    table: str
    case: str
    program: str
    unit: str
    published: float
    predicted: float
    error: float  # of the fit to all rows
    left_out: float  # of a fit without this row
    counted: bool
    parts: dict[str, float]  # share of the step


def rows(*, leave_out: bool = True) -> list[Row]:
    found = cases()
    values = fit(found)
    shown = rounded(values)
    return [
        Row(
            case.table,
            case.name,
            case.program,
            UNITS[case.unit],
            case.measured,
            case.printed(predicted(shown, case)),
            error(shown, case),
            error(fit(_without(found, case), values), case) if leave_out and case.counted else error(shown, case),
            case.counted,
            _parts(shown, case),
        )
        for case in found
    ]


# Settings that the tables do not print, read differently: (what, table, cases, what changes in those rows).
READINGS: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
    ("micro-batch 1 without pipeline", "Megatron, H100", ("1.7B", "7.1B", "16B", "32B"), {"micro": 1}),
    ("no interleaving", "Megatron, H100", ("70B", "119B", "177B", "314B", "462B"), {"virtual": 1}),
    ("1.3B recomputes all", "FleetX, A100", ("1.3B",), {"recompute": "full"}),
    ("175B recomputes all, no sequence split", "FleetX, A100", ("175B",), {"recompute": "full", "sequence": False}),
    ("stages of equal length in LiBai", "LiBai, V100", (), {"stages": {}}),
    ("gradients travel in fp16 in LiBai", "LiBai, V100", (), {"facts": {"libai-2022": {"gradient": 2}}}),
    ("sends are scattered in Megatron", "DLPerf, V100", (), {"facts": {"megatron-2021": {"scattered_sends": True}}}),
]


def other_readings() -> list[tuple[str, str, list[float], list[float]]]:
    """What is read differently, table, errors of the rows it is about, errors of all rows; fitted anew each time."""
    found = []
    for what, name, about, change in READINGS:
        tables = published()
        for table in tables:
            if table["name"] == name:
                table["rows"] = [row | change if not about or row["case"] in about else row for row in table["rows"]]
        here = cases(tables)
        values = fit(here)
        changed = [case for case in here if case.table == name and (not about or case.name in about)]
        found.append((what, name, [error(values, c) for c in changed], [error(values, c) for c in here if c.counted]))
    return found


def tables_left_out() -> dict[str, list[float]]:
    """Errors of each table's rows by a fit to the other tables: what to expect of a machine and a program not seen."""
    found = cases()
    errors = {}
    for table in dict.fromkeys(case.table for case in found if case.counted):
        # Cases that are not counted do not weigh, but keep each number known, at what is expected of it.
        others = [_unseen(case) if case.table == table else case for case in found]
        values = fit(others)
        errors[table] = [error(values, case) for case in found if case.table == table]
    return errors


def _unseen(case: Case) -> Case:
    return replace(case, counted=False)


def _without(found: list[Case], left_out: Case) -> list[Case]:
    return [_unseen(case) if alike(case, left_out) else case for case in found]


def _parts(values: dict[str, float], case: Case) -> dict[str, float]:
    time = seconds(case.step, rates(values, case), case.device, case.precision)
    parts = {"compute": time.compute, "recompute": time.recompute, "bubble": time.bubble, "update": time.optimizer}
    return {name: part / time.total for name, part in (parts | time.communication).items() if part > 0.005 * time.total}


def _shown(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def summary(errors: list[float]) -> str:
    sizes = sorted(abs(e) for e in errors)
    return f"median {statistics.median(sizes):.1%}, worst {sizes[-1]:.1%}"


def main(arguments: list[str] | None = None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--parts", action="store_true", help="show what the time is made of")
    options.add_argument("--readings", action="store_true", help="read unprinted settings differently, and fit anew")
    asked = options.parse_args(arguments)
    if asked.readings:
        for what, name, of_rows, of_all in other_readings():
            print(f"{what:40} {name:16} these rows: {summary(of_rows)}; all: {summary(of_all)}")
        return 0
    found = rows()
    table = ""
    for row in found:
        if row.table != table:
            table = row.table
            of_table = [r for r in found if r.table == table and r.counted]
            print(f"\n{table} ({row.unit})" + (f": {summary([r.error for r in of_table])}" if of_table else ""))
            print(f"{'case':30} {'program':14} {'published':>10} {'predicted':>10} {'error':>7} {'left out':>9}")
        left_out = f"{row.left_out:+9.1%}" if row.counted else "(not counted)"
        parts = " ".join(f"{name} {share:.0%}" for name, share in row.parts.items()) if asked.parts else ""
        numbers = f"{_shown(row.published):>10} {_shown(row.predicted):>10}"
        line = f"{row.case:30} {row.program:14} {numbers} {row.error:+7.1%}"
        print(f"{line} {left_out} {parts}".rstrip())
    counted = [row for row in found if row.counted]
    print(f"\n{len(counted)} rows, by the fit to all:        {summary([row.error for row in counted])}")
    print(f"{len(counted)} rows, each left out of its fit: {summary([row.left_out for row in counted])}")
    print("\nA whole table left out, all numbers of its device and programs as expected beforehand:")
    for name, errors in tables_left_out().items():
        print(f"  {name:18} {summary(errors)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
