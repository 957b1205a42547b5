"""gptworks plan: memory, time and cost of a layout before anything runs; --search finds the best one."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.cli import options, plan_options, plan_report
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.plan.report import Report
    from gptworks.plan.request import Request
    from gptworks.plan.search import SearchResult
    from gptworks.plan.workload import LayoutChoice

HELP = "memory, time and cost of a layout; --search finds the best one"
add_arguments = plan_options.add_arguments


def run(args: argparse.Namespace) -> int:
    request = plan_options.read_request(args)
    if args.search:
        return _search(args, request)
    if request.devices > 1 and not request.has_layout:
        result, notes = request.search()
        if not result.fits:
            return _nothing(args, request, result)
        choice = result.fits[0].choice
        notes.append(f"no layout is given: this is the fastest of {len(result.fits):,} that fit (--search lists them).")
    else:
        choice, notes = request.configured_layout(str(args.config or "config"))
    return _under_rules(args, request, choice) if args.rules else _one_layout(args, request, choice, notes)


def _one_layout(args: argparse.Namespace, request: "Request", choice: "LayoutChoice", notes: list[str]) -> int:
    from gptworks.plan.report import report

    made = report(
        request.workload,
        choice,
        *request.here,
        tokens=plan_options.tokens_of(args, request, choice.batch.global_size),
        price=args.price,
        notes=[*notes, *plan_options.notes_on_cpus(args, request)],
        hardware=request.hardware,
    )
    best = request.best_of_all(made) if not made.fits and request.devices > 1 else None
    if args.save:
        _save(args, request, made)
    answer = made.as_dict() | {"saved": args.save, "search": {"seconds": best.time.total} if best else None}
    if not args.json:
        plan_report.show_layout(made, best)
        if args.save:
            print(f"\nThis layout is in {args.save}: gptworks train -c {args.save}")
    if args.simulate:
        answer["simulated"] = _simulate(args, made)
    if args.json:
        print(json.dumps(answer))
    return 0


def _simulate(args: argparse.Namespace, made: "Report") -> list[dict[str, Any]]:
    from gptworks.simulate.compare import compare

    chosen = [f"{key}={json.dumps(value)}" for key, value in made.choice.settings().items()]
    config = options.load_config(args, *chosen, shape_of=options.shape_of_checkpoint).config
    compared = compare(config, made)
    if not args.json:
        plan_report.show_simulation(compared, made)
    return [each.as_dict() for each in compared]


def _under_rules(args: argparse.Namespace, request: "Request", choice: "LayoutChoice") -> int:
    from gptworks.simulate.systems.predict import predict

    system, device = args.rules, request.here[0]
    parts = predict(system, request.workload, choice, device.name)
    needed = sum(parts.values()) * 2**20 if parts else None
    if args.json:
        answer = {"rules": system, "device": device.name, "needed": needed, "memory": device.memory, "parts": parts}
        print(json.dumps(answer))
        return 0
    if needed is None:
        print(f"{system} would not fit on a {device.name}: its allocator runs out of memory")
        return 0
    print(f"{system} would take {needed / 2**30:.1f} GiB of a {device.name}, as nvidia-smi shows it:")
    for name, amount in (parts or {}).items():
        print(f"  {name:<36}{amount / 1024:>8.2f} GiB")
    print("Its own allocations, not those of gptworks: leave out --rules for these.")
    return 0


def _search(args: argparse.Namespace, request: "Request") -> int:
    from gptworks.plan.report import report

    plan_options.refuse_indivisible(request)
    result, notes = request.search()
    if not result.fits:
        return _nothing(args, request, result)
    tokens = plan_options.tokens_of(args, request, request.global_size)
    notes += plan_options.notes_on_cpus(args, request)
    if args.price is not None and not tokens:
        notes.append("--price: how many tokens? Say --tokens, or train.tokens or train.steps, for what it costs.")
    reports = [
        report(request.workload, fit.choice, *request.here, tokens=tokens, price=args.price)
        for fit in result.fits[: args.top or 10]
    ]
    if args.save:
        _save(args, request, reports[0])
    if args.json:
        answer: dict[str, Any] = {
            "looked_at": result.looked_at,
            "fits": len(result.fits),
            "found": [each.as_dict() for each in reports],
            "notes": notes,
            "saved": args.save,
        }
        if args.rejected:
            answer["rejected"] = [each.as_dict() for each in result.rejected]
        print(json.dumps(answer))
        return 0
    plan_report.show_layouts(reports, result, notes, with_rejected=args.rejected)
    if args.save:
        print(f"\nThe first is in {args.save}: gptworks train -c {args.save}")
    else:
        print("\n--save FILE.yaml writes the first for `gptworks train -c`.")
    return 0


def _nothing(args: argparse.Namespace, request: "Request", result: "SearchResult") -> int:
    """Says what would be needed."""
    devices, name = request.devices, request.here[0].name
    nearest, more = result.nearest, request.fewest_devices()
    if args.json:
        answer: dict[str, Any] = {"looked_at": result.looked_at, "fits": 0, "found": [], "fewest_devices": more}
        answer["nearest"] = nearest.as_dict() if nearest else None
        if args.rejected:
            answer["rejected"] = [each.as_dict() for each in result.rejected]
        print(json.dumps(answer))
        return 2
    if args.rejected:
        plan_report.show_rejected(result.rejected)
    lines = [f"--search: none of {result.looked_at:,} layouts of {devices} x {name} fits."]
    if nearest is not None:
        lines.append(f"  nearest: {nearest.layout}: {nearest.text}")
    elif result.rejected:
        lines.append(f"  such as {result.rejected[0].layout}: {result.rejected[0].text}")
    if more is not None:
        lines.append(f"  {more} x {name} would be enough.")
    elif request.fixed:
        kept = " ".join(f"{key}={value}" for key, value in request.fixed.items())
        lines.append(f"  More of them do not help as long as it is {kept}. Leave some of it to the search.")
    else:
        lines.append("  More of them do not help. Needed: a larger device, a smaller model, or another batch.")
    raise UsageError("\n".join(lines))


def _save(args: argparse.Namespace, request: "Request", made: "Report") -> None:
    from gptworks.plan.saved import as_yaml

    tokens = plan_options.parse_count(args.tokens, "--tokens") if args.tokens is not None else None
    text = as_yaml(request.loaded, made, tokens)
    try:
        with Path(args.save).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--save: {args.save} cannot be written: {error.strerror}.") from None
