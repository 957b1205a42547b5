"""What gptworks plan prints: one layout, a list of them, why others are out, a simulation beside the plan."""

from typing import TYPE_CHECKING

from gptworks.cli import tables
from gptworks.cli.plan_options import MANY

if TYPE_CHECKING:
    from gptworks.plan.rejections import Rejected
    from gptworks.plan.report import Report
    from gptworks.plan.search import Fit, SearchResult
    from gptworks.plan.time import StepTime
    from gptworks.simulate.compare import Comparison

_EXAMPLES = 3  # of each reason


def show_layout(made: "Report", best: "Fit | None") -> None:
    from gptworks.plan.memory import TERMS

    _head(made)
    capacity = made.device.capacity
    print(f"\nmemory of one device, GiB; {made.device.name} has {_gib(capacity)} for tensors:")
    titles = ["stage", "layers", "in flight", *TERMS, "peak", "in the", "used"]
    rows = [
        [
            str(each.pp_rank),
            str(each.layers),
            str(each.in_flight),
            *(_gib(getattr(each, name)) for name in TERMS),
            _gib(each.peak),
            each.moment,
            f"{each.peak / capacity:.0%}",
        ]
        for each in made.memories
    ]
    tables.show(titles, rows, [each.peak / capacity for each in made.memories])
    total = made.time.total
    print(f"\na step takes {_seconds(total)}:")
    parts = {name: seconds for name, seconds in made.parts_of_a_step().items() if seconds}
    rows = [[name, _seconds(seconds), f"{seconds / total:.0%}"] for name, seconds in parts.items()]
    tables.show(["", "time", "share"], rows, [seconds / total for seconds in parts.values()])
    speed = made.tokens_per_second
    kind = made.workload.precision.compute
    peak = f"{made.device.peak[kind] / 1e12:,.4g} TFLOP/s, {kind}"
    each = speed / made.devices
    print(f"\nspeed       {speed:,.0f} tokens/s, {each:,.0f} of each device; MFU {made.mfu:.0%} (of {peak})")
    if made.days is not None and made.device_hours is not None and made.tokens is not None:
        print(f"tokens      {_many(made.tokens)} take {_long(made.days)}, {_hours(made.device_hours)} device-hours")
    if made.cost is not None:
        print(f"cost        {made.cost:,.0f} at {made.price:g} for a device and hour")
    elif made.price is not None:
        print("cost        how many tokens? Say --tokens, or train.tokens or train.steps")
    if not made.fits:
        print(f"\nDOES NOT FIT: {_gib(made.needed - capacity)} GiB too much. The smallest changes:")
        for change, time in zip(made.changes, made.times, strict=True):
            print(f"  {change.words}  ({_gib(change.needed)} GiB, {_paced(made, time)})")
        if not made.changes:
            print("  none of micro-batch, recomputation, sharding, more devices and half the model helps")
        if best is not None:
            print(f"Of all layouts, --search: {best.choice}  ({_paced(made, best.time)})")
    _notes(made.notes)


def _paced(made: "Report", time: "StepTime") -> str:
    days = made.days_at(time)
    return f"{_seconds(time.total)} a step" + (f", {days:,.1f} days" if days is not None else "")


def show_layouts(reports: "list[Report]", result: "SearchResult", notes: list[str], *, with_rejected: bool) -> None:
    """The best of a search, as a table."""
    best = reports[0]
    _head(best, with_layout=False)
    print(f"\n{len(result.fits):,} of {result.looked_at:,} layouts fit; the fastest:")
    titles = ["", "layout", "zero", "stages", "micro", "accumulate", "recompute", "GiB", "s/step", "tokens/s", "MFU"]
    titles += ["days"] if best.tokens else []
    titles += ["cost"] if best.cost is not None else []
    tables.show(titles, [[str(number), *_row(each)] for number, each in enumerate(reports, 1)])
    _notes([*notes, *best.notes])
    if with_rejected:
        print(f"\n{len(result.rejected):,} rejected:")
        show_rejected(result.rejected)
    elif result.rejected:
        print(f"\n{len(result.rejected):,} were rejected: --rejected says why.")


def _row(made: "Report") -> list[str]:
    choice = made.choice
    virtual = choice.parallel.virtual_stages
    row = [
        str(choice.layout),
        str(choice.parallel.zero or "-"),
        f"{choice.layout.pp} x {virtual}" if virtual > 1 else str(choice.layout.pp),
        str(choice.batch.micro_size),
        str(choice.batch.accumulation),
        choice.recompute,
        _gib(made.needed),
        f"{made.time.total:,.2f}",
        f"{made.tokens_per_second:,.0f}",
        f"{made.mfu:.0%}",
    ]
    row += [f"{made.days:,.1f}"] if made.days is not None else []
    return [*row, f"{made.cost:,.0f}"] if made.cost is not None else row


def show_rejected(rejected: "list[Rejected]") -> None:
    """By reason, the most frequent first, with some examples of each."""
    from gptworks.plan.rejections import grouped

    for group in grouped(rejected):
        members = group.members
        print(f"  {len(members):,}: {group.text}")
        for each in members[:_EXAMPLES]:
            print(f"    {each.layout}" if group.is_one_sentence else f"    {each.layout}: {each.text}")
        if len(members) > _EXAMPLES:
            print(f"    ... {len(members) - _EXAMPLES:,} more (--json has all)")


def show_simulation(compared: "list[Comparison]", made: "Report") -> None:
    from gptworks.simulate.ranks import span
    from gptworks.simulate.step import describe

    print(f"\n{describe([each.simulated for each in compared])}\n\nplanned and simulated peaks, GiB:")
    titles = ["stage", f"planned for {made.device.name}", "planned as simulated", "simulated", "difference"]
    rows = [
        [
            span(each.simulated.pp_ranks),
            _gib(each.planned_for_device),
            _gib(each.planned),
            _gib(each.simulated.peak),
            f"{100 * each.difference:.1f} %".replace("-0.0 ", "0.0 "),
        ]
        for each in compared
    ]
    tables.show(titles, rows)
    if not made.workload.on_cpu:
        print("The kernels of a GPU keep other things for attention and dropout than a CPU's, which were simulated.")


def _head(made: "Report", with_layout: bool = True) -> None:
    from gptworks.plan.sizes import num_parameters

    workload, choice, device = made.workload, made.choice, made.device
    batch = choice.batch
    tokens = batch.global_size * workload.seq_len
    machines = f"{made.machines} machines of {device.per_node}" if made.machines > 1 else "1 machine"
    print(f"model       {num_parameters(workload.model):,} parameters, {workload.precision.compute}")
    print(f"devices     {made.devices} x {device.name}, {machines}; {made.link.name}")
    if not with_layout:
        print(f"batch       {batch.global_size:,} samples of {workload.seq_len:,} tokens: {tokens:,} a step")
        return
    print(f"layout      {choice}")
    print(
        f"batch       {batch.global_size:,} = {batch.micro_size} micro-batch x {batch.accumulation} accumulation x "
        f"{batch.data_parallel} data-parallel; {tokens:,} tokens a step"
    )


def _notes(notes: list[str]) -> None:
    if notes:
        print()
    for note in notes:
        print(f"note: {note}")


def _gib(size: float) -> str:
    return f"{size / 2**30:,.2f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.1f} ms"


def _long(days: float) -> str:
    if days >= 1:
        return f"{days:,.1f} days"
    hours = 24 * days
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 10 else f"{hours:.2f}"


def _many(number: float) -> str:
    for letter in "TBMK":
        if number >= MANY[letter]:
            return f"{number / MANY[letter]:,.4g}{letter}"
    return f"{number:,.0f}"
