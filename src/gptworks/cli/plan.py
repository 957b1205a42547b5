"""gptworks plan: memory, time and cost of a layout before anything runs; --search finds the best one."""

import argparse
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.cli import options, tables
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.plan.devices import Device, Link
    from gptworks.plan.job import Choice, Job
    from gptworks.plan.report import Report
    from gptworks.plan.search import Fit, Found, Hardware, Rejected
    from gptworks.plan.time import StepTime

HELP = "memory, time and cost of a layout; --search finds the best one"

# Parts of a choice that a search leaves alone when they are said on the command line.
_FIXED = ("parallel.", "batch.micro_size", "batch.accumulation", "train.recompute")
_EXAMPLES = 3  # of each reason
_WORTH_SAYING = 1.05  # times as fast
_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "devices": (int, "1 or more"),
    "nodes": (int, "1 or more"),
    "top": (int, "1 or more"),
    "price": (float, "0 or more, of one device for an hour, in any currency"),
    "tflops": (float, "such as 165"),
    "bandwidth": (float, "GB/s, such as 1000"),
}
_MANY = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config_options(parser)
    where = parser.add_argument_group("devices")
    where.add_argument("--devices", metavar="N", help="how many (default: what the layout needs)")
    where.add_argument(
        "--device", default="", metavar="NAME", help="v100-16g, v100-32g, a100-40g, a100-80g, h100-80g, cpu or custom"
    )
    where.add_argument("--nodes", metavar="N", help="machines (default: as many as such devices need)")
    where.add_argument("--link", default="", metavar="NAME", help="such as nvlink3+ib-8x200, pcie or ib-100")
    where.add_argument("--memory", metavar="GB", help="custom or cpu: memory of a device, such as 24 or 24GiB")
    where.add_argument("--tflops", metavar="X", help="custom: TFLOP/s of matrix products")
    where.add_argument("--bandwidth", metavar="GB/s", help="custom: of a device's own memory")
    where.add_argument("--like", metavar="NAME", help="custom: the device whose efficiency it has (default: a100-80g)")
    budget = parser.add_argument_group("budget")
    budget.add_argument("--tokens", metavar="N", help="to train on, such as 300B or 3e11 (default: of the config)")
    budget.add_argument("--price", metavar="X", help="of one device for an hour")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--search", action="store_true", help="all layouts that fit, the fastest first; parallel.tp=2 and such stay"
    )
    search.add_argument("--top", metavar="N", help="show so many (default: 10)")
    search.add_argument("--rejected", action="store_true", help="those that do not fit or cannot run, by why")
    search.add_argument("--save", metavar="FILE", help="write the best one as YAML for `gptworks train -c`")
    parser.add_argument(
        "--simulate", action="store_true", help="also run a step of each stage on tensors without memory (needs torch)"
    )
    parser.add_argument(
        "--rules",
        choices=["fleetx", "megatron", "oneflow"],
        help="what nvidia-smi would show if that system ran it, by its allocations (needs torch)",
    )
    options.add_json_option(parser)


@dataclass(frozen=True)
class _Asked:
    args: argparse.Namespace
    loaded: Any
    job: "Job"
    devices: int
    hardware: "Hardware"  # of so many devices
    notes: list[str]  # that belong to every answer

    @property
    def config(self) -> Any:
        return self.loaded.config

    @property
    def here(self) -> "tuple[Device, Link]":
        return self.hardware(self.devices)


def run(args: argparse.Namespace) -> int:
    from gptworks.config.contradictions import OF_A_CHOICE
    from gptworks.config.schema import AXES

    _refuse_nonsense(args)
    loaded = options.load_config(args, shape_of=options.shape_of_checkpoint, without=OF_A_CHOICE)
    devices = _num_devices(args, loaded)
    hardware = partial(_hardware, args, devices)
    device, link = hardware(devices)

    from gptworks.plan.job import Job
    from gptworks.plan.report import report

    job = Job.of(loaded.config, "cpu" if device.generation == "cpu" else "cuda")
    asked = _Asked(args, loaded, job, devices, hardware, _about_cpus(args, device, devices))
    if args.search:
        return _search(asked)
    if devices > 1 and not any(f"parallel.{axis}" in loaded.origins for axis in AXES):
        found, _, notes = _searched(asked)
        if not found.fits:
            return _nothing(asked, found)
        choice = found.fits[0].choice
        notes.append(f"no layout is given: this is the fastest of {len(found.fits):,} that fit (--search lists them).")
    else:
        choice, notes = _given(asked)
    if args.rules:
        return _under_rules(asked, choice)
    tokens = _tokens(args, loaded.config, choice.batch.global_size)
    notes = [*notes, *asked.notes]
    made = report(job, choice, device, link, tokens=tokens, price=args.price, notes=notes, hardware=hardware)
    best = _best_of_all(asked, made) if not made.fits and devices > 1 else None
    if args.save:
        _save(args, loaded, made)
    told = made.as_dict() | {"saved": args.save, "search": {"seconds": best.time.total} if best else None}
    if not args.json:
        _show(made, best)
        if args.save:
            print(f"\nThis layout is in {args.save}: gptworks train -c {args.save}")
    if args.simulate:
        told["simulated"] = _simulate(args, made)
    if args.json:
        print(json.dumps(told))
    return 0


def _under_rules(asked: _Asked, choice: "Choice") -> int:
    from gptworks.simulate.systems.predict import predict

    system, card, memory = asked.args.rules, asked.here[0].name, asked.here[0].memory
    parts = predict(system, asked.job, choice, card)
    needed = sum(parts.values()) * 2**20 if parts else None
    if asked.args.json:
        print(json.dumps({"rules": system, "device": card, "needed": needed, "memory": memory, "parts": parts}))
        return 0
    if needed is None:
        print(f"{system} would not fit on a {card}: its allocator runs out of memory")
        return 0
    print(f"{system} would take {needed / 2**30:.1f} GiB of a {card}, as nvidia-smi shows it:")
    for name, amount in (parts or {}).items():
        print(f"  {name:<36}{amount / 1024:>8.2f} GiB")
    print("Its own allocations, not those of gptworks: leave out --rules for these.")
    return 0


# What is asked


def _refuse_nonsense(args: argparse.Namespace) -> None:
    for word in [*args.override, *args.overrides]:
        if "=" not in word and word.lower().endswith((".yaml", ".yml")):
            raise UsageError(f"{word}: a file is given with -c. Did you mean -c {word}?")
    for name, (kind, needed) in _NUMBERS.items():
        text = getattr(args, name)
        try:
            number = None if text is None else kind(text)
        except ValueError:
            raise UsageError(f"--{name}: {text!r} is not a number. Needed: {needed}.") from None
        setattr(args, name, number)
        if kind is int and number is not None and number < 1:
            raise UsageError(f"--{name}: {number}. Needed: {needed}.")
    if args.price is not None and not 0 <= args.price < math.inf:
        raise UsageError(f"--price: {args.price:g}. Needed: {_NUMBERS['price'][1]}.")
    if args.simulate and args.search:
        raise UsageError("--simulate: is about one layout. Save one with --save, then simulate that.")
    if args.rules and (args.search or args.simulate or args.save):
        other = next(name for name in ("search", "simulate", "save") if getattr(args, name))
        raise UsageError(f"--rules: is about the memory of one layout in another system. Leave out --{other}.")
    for name in ("top", "rejected"):
        if getattr(args, name) and not args.search:
            raise UsageError(f"--{name}: is about a search. Add --search.")
    custom = {name: getattr(args, name) for name in ("memory", "tflops", "bandwidth", "like")}
    given = [name for name, value in custom.items() if value is not None]
    if given and args.device != "custom" and (args.device, given) != ("cpu", ["memory"]):
        raise UsageError(f"--{given[0]}: describes a device of your own. Add --device custom, or leave it out.")
    if args.save and Path(args.save).exists():
        raise UsageError(f"--save: {args.save} is there already. Choose another name, or remove it.")


def _num_devices(args: argparse.Namespace, loaded: Any) -> int:
    from gptworks.config.derive import Layout
    from gptworks.config.schema import AXES

    if args.devices is not None:
        return int(args.devices)
    parallel = loaded.config.parallel
    auto = next((axis for axis in AXES if getattr(parallel, axis) == "auto"), None)
    of_a_file = [axis for axis in AXES if not loaded.origins.get(f"parallel.{axis}", "override").startswith("override")]
    if auto or (args.search and not of_a_file):
        why = f"parallel.{auto} is auto" if auto else "a search needs it"
        raise UsageError(f"--devices: not given, and {why}. Needed: how many there are.")
    return Layout.known(parallel).world_size


def _hardware(args: argparse.Namespace, asked: int, devices: int) -> "tuple[Device, Link]":
    """Of so many devices; --nodes is about as many as were asked for."""
    from gptworks.plan.devices import custom_device, device, link
    from gptworks.plan.devices import devices as known

    if not args.device:
        raise UsageError(f"--device: not given. Needed: one of {', '.join([*known(), 'custom'])}.")
    if args.device == "custom":
        if args.memory is None or args.tflops is None:
            missing = " and ".join(f"--{name}" for name in ("memory", "tflops") if getattr(args, name) is None)
            raise UsageError(f"--device custom: {missing} not given. Needed: such as --memory 24GB --tflops 165.")
        found = custom_device(
            memory=_bytes(args.memory),
            tflops=args.tflops,
            bandwidth=args.bandwidth * 1e9 if args.bandwidth is not None else None,
            like=args.like or "a100-80g",
            per_node=device(args.like or "a100-80g").per_node,
        )
    else:
        found = device(args.device)
        if args.memory is not None:
            found = replace(found, memory=int(_bytes(args.memory)), reserved=0)
    if args.nodes and asked % args.nodes:
        fitting = [n for n in range(1, asked + 1) if asked % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - args.nodes))[:2])
        raise UsageError(
            f"--nodes: {args.nodes} machines do not divide --devices {asked}; all machines have as many. "
            f"Nearest that do: {' or '.join(map(str, near))}."
        )
    most = min(devices, asked // args.nodes if args.nodes else found.per_node)
    per_node = next(n for n in range(most, 0, -1) if devices % n == 0)
    if not args.nodes and devices == asked and per_node < most:
        whole = f"{asked // most * most} or {-(-asked // most) * most}"
        raise UsageError(
            f"--devices: {asked} of them are no whole machines of {most}. Needed: {whole} devices, or --nodes with the "
            f"machines they are in, such as --nodes {asked // per_node}."
        )
    found = replace(found, per_node=per_node)
    return found, link(args.link, of=found)


def _about_cpus(args: argparse.Namespace, device: "Device", devices: int) -> list[str]:
    if device.generation != "cpu":
        return []
    notes = []
    if args.device != "custom" and args.memory is None:
        notes.append(
            f"cpu: a machine of two cores with {device.memory / 1e9:.0f} GB is assumed. Your own: --memory 64GB, or "
            "--device custom --like cpu --memory 64GB --tflops 1."
        )
    if devices > 1:
        notes.append(
            f"cpu: {devices} devices are {devices} machines, each with memory of its own. Processes of one machine "
            "share it."
        )
    return notes


def _bytes(text: str) -> float:
    found = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(GB|GiB|)\s*", text, re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if not found or not 0 < number < 1e9:
        raise UsageError(f"--memory: {text!r} is not an amount. Needed: such as 24, 24GB or 24GiB.")
    return number * (2**30 if found[2].lower() == "gib" else 1e9)


def _tokens(args: argparse.Namespace, config: Any, global_size: int) -> float | None:
    if args.tokens is not None:
        return parse_count(args.tokens, "--tokens")
    if config.train.tokens:
        return float(config.train.tokens)
    return float(config.train.steps * global_size * config.data.seq_len) or None


def parse_count(text: str, option: str) -> float:
    """300B, 3e11, 1.5T, 20M or 300_000_000_000."""
    found = re.fullmatch(
        r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([KMBGT]?|thousand|million|billion|trillion)\s*",
        text,
        re.IGNORECASE,
    )
    letter = (found[3][:2].upper().replace("TH", "K") if len(found[3]) > 1 else found[3].upper()) if found else ""
    number = float(re.sub("[_,]", "", found[1]) + (found[2] or "")) * _MANY[letter[:1]] if found else 0.0
    if not 1 <= number < math.inf:
        raise UsageError(f"{option}: {text!r} is not a number of tokens. Needed: such as 300B, 1.5T or 3e11.")
    return number


# The layout that is given


def _given(asked: _Asked) -> "tuple[Choice, list[str]]":
    """As a run would have it, also where the batch is left open; or what a run would refuse."""
    from gptworks.config import contradictions
    from gptworks.config.derive import plan_batch, solve_layout, with_layout
    from gptworks.errors import ConfigError
    from gptworks.plan.job import Choice

    config = asked.config
    layout = solve_layout(config.parallel, asked.devices, partial(contradictions.suits, config))
    parallel = with_layout(config.parallel, layout)
    problems = contradictions.find({**dict(config), "parallel": parallel})
    if problems:
        raise ConfigError(str(asked.args.config or "config"), problems)
    plan = plan_batch(config.batch, config.model, config.data.seq_len, parallel)
    choice = Choice(parallel, plan, config.train.recompute)
    return choice, _about_batch(asked, choice)


def _about_batch(asked: _Asked, choice: "Choice") -> list[str]:
    """What nobody chose, and a micro-batch that would be faster, or would fit."""
    from gptworks.plan.search import best_micro_size, timed

    batch, given = choice.batch, asked.config.batch
    if given.micro_size or given.accumulation:
        return []
    notes = [] if given.global_size else [_usual_batch(asked, batch.global_size)]
    if given.global_size and choice.layout.pp == 1:
        return notes  # one micro-batch, which has been said with the batch
    note = f"batch.micro_size is not set: {batch.micro_size} is taken, as `gptworks train` does."
    micro = best_micro_size(asked.job, choice.parallel, batch.global_size, choice.recompute, *asked.here)
    accumulation = batch.micro_size * batch.accumulation // micro
    best = replace(choice, batch=replace(batch, micro_size=micro, accumulation=accumulation))
    ratio = timed(asked.job, choice, *asked.here).total / timed(asked.job, best, *asked.here).total
    if choice.peak(asked.job) > asked.here[0].capacity >= best.peak(asked.job):
        note += f" batch.micro_size={micro} fits."
    elif ratio > _WORTH_SAYING:
        note += f" batch.micro_size={micro} is {ratio:.2f} times as fast."
    return [*notes, note]


def _usual_batch(asked: _Asked, global_size: int) -> str:
    return (
        f"batch.global_size is not set: {global_size:,} samples of {asked.job.seq_len:,} tokens are taken, which suit "
        "a model of this size."
    )


def _best_of_all(asked: _Asked, made: "Report") -> "Fit | None":
    """Of the same batch and devices, whatever the layout."""
    from gptworks.plan.search import search

    fits = search(made.job, made.device, made.link, made.devices, made.choice.batch.global_size).fits
    return fits[0] if fits else None


# Search


def _fixed(asked: _Asked) -> dict[str, Any]:
    """What was said on the command line stays."""
    values = _flat(asked.config)
    return {
        key: values[key]
        for key, origin in asked.loaded.origins.items()
        if key.startswith(_FIXED)
        and (origin.startswith("override") or key in ("parallel.sequence", "parallel.timeout"))
    }


def _searched(asked: _Asked) -> "tuple[Found, int, list[str]]":
    from gptworks.config.schema import AXES
    from gptworks.plan.search import search, usual_batch

    fixed, devices = _fixed(asked), asked.devices
    sizes = {f"parallel.{axis}": fixed.get(f"parallel.{axis}", "auto") for axis in AXES}
    known = {key: size for key, size in sizes.items() if size != "auto"}
    product = math.prod(known.values())
    if devices % product or (len(known) == len(AXES) and devices != product):
        said = " x ".join(f"{key}={size}" for key, size in known.items() if size > 1)
        needed = f"{product} devices" if len(known) == len(AXES) else f"{product} devices or a multiple of them"
        raise UsageError(
            f"--search: {said} needs {needed}, but there are {devices}. Leave one of them to the search, or set "
            f"--devices {-(-devices // product) * product}."
        )
    notes: list[str] = []
    global_size = asked.config.batch.global_size
    if not global_size:
        global_size = usual_batch(asked.job, asked.devices)
        notes.append(_usual_batch(asked, global_size))
    return search(asked.job, *asked.here, devices, global_size, fixed=fixed), global_size, notes


def _search(asked: _Asked) -> int:
    from gptworks.plan.report import report

    args, loaded = asked.args, asked.loaded
    found, global_size, notes = _searched(asked)
    if not found.fits:
        return _nothing(asked, found)
    tokens = _tokens(args, loaded.config, global_size)
    notes += asked.notes
    if args.price is not None and not tokens:
        notes.append("--price: how many tokens? Say --tokens, or train.tokens or train.steps, for what it costs.")
    reports = [
        report(asked.job, fit.choice, *asked.here, tokens=tokens, price=args.price)
        for fit in found.fits[: args.top or 10]
    ]
    best = reports[0]
    if args.save:
        _save(args, loaded, best)
    if args.json:
        told: dict[str, Any] = {
            "looked_at": found.looked_at,
            "fits": len(found.fits),
            "found": [each.as_dict() for each in reports],
            "notes": notes,
            "saved": args.save,
        }
        if args.rejected:
            told["rejected"] = [vars(each) for each in found.rejected]
        print(json.dumps(told))
        return 0
    _head(best, with_layout=False)
    print(f"\n{len(found.fits):,} of {found.looked_at:,} layouts fit; the fastest:")
    titles = ["", "layout", "zero", "stages", "micro", "accumulate", "recompute", "GiB", "s/step", "tokens/s", "MFU"]
    titles += ["days"] if tokens else []
    titles += ["cost"] if best.cost is not None else []
    rows = [[str(number), *_row(each)] for number, each in enumerate(reports, 1)]
    tables.show(titles, rows)
    _notes([*notes, *best.notes])
    if args.rejected:
        print(f"\n{len(found.rejected):,} rejected:")
        print("\n".join(_grouped(found.rejected)))
    elif found.rejected:
        print(f"\n{len(found.rejected):,} were rejected: --rejected says why.")
    if args.save:
        print(f"\nThe first is in {args.save}: gptworks train -c {args.save}")
    else:
        print("\n--save FILE.yaml writes the first for `gptworks train -c`.")
    return 0


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


def _grouped(rejected: "list[Rejected]") -> list[str]:
    """By reason, the most frequent first; numbers that differ are left out of it."""
    groups: dict[str, list[Rejected]] = {}
    for each in rejected:
        groups.setdefault(re.sub(r"(?<![\w-])\d[\d,.]*(?=\W|$)", "..", each.reason), []).append(each)
    lines = []
    for group in sorted(groups.values(), key=len, reverse=True):
        words = zip(*(each.reason.split() for each in group), strict=True)
        lines.append(f"  {len(group):,}: {' '.join(some[0] if len(set(some)) == 1 else '..' for some in words)}")
        is_one = len({each.reason for each in group}) == 1
        examples = [each.what if is_one else f"{each.what}: {each.reason}" for each in group[:_EXAMPLES]]
        lines += [f"    {example}" for example in examples]
        if len(group) > _EXAMPLES:
            lines.append(f"    ... {len(group) - _EXAMPLES:,} more (--json has all)")
    return lines


def _nothing(asked: _Asked, found: "Found") -> int:
    """Says what would be needed."""
    from gptworks.plan.search import fewest_devices

    args, devices, name, fixed = asked.args, asked.devices, asked.here[0].name, _fixed(asked)
    global_size = asked.config.batch.global_size or None
    nearest, more = found.nearest, fewest_devices(asked.job, asked.hardware, devices, global_size, fixed=fixed)
    if args.json:
        told: dict[str, Any] = {"looked_at": found.looked_at, "fits": 0, "found": [], "fewest_devices": more}
        told["nearest"] = vars(nearest) if nearest else None
        if args.rejected:
            told["rejected"] = [vars(each) for each in found.rejected]
        print(json.dumps(told))
        return 2
    if args.rejected:
        print("\n".join(_grouped(found.rejected)))
    lines = [f"--search: none of {found.looked_at:,} layouts of {devices} x {name} fits."]
    if nearest is not None:
        lines.append(f"  nearest: {nearest.what}: {nearest.reason}")
    elif found.rejected:
        lines.append(f"  such as {found.rejected[0].what}: {found.rejected[0].reason}")
    if more is not None:
        lines.append(f"  {more} x {name} would be enough.")
    elif fixed:
        kept = " ".join(f"{key}={value}" for key, value in fixed.items())
        lines.append(f"  More of them do not help as long as it is {kept}. Leave some of it to the search.")
    else:
        lines.append("  More of them do not help. Needed: a larger device, a smaller model, or another batch.")
    raise UsageError("\n".join(lines))


def _save(args: argparse.Namespace, loaded: Any, made: "Report") -> None:
    from gptworks.config import yaml_text

    choice, config = made.choice, loaded.config
    values = _flat(config)
    presets = {origin.removeprefix("preset ") for origin in loaded.origins.values() if origin.startswith("preset ")}
    not_said = ("preset ", "checkpoint ", "4 x ", "model.max_positions")
    kept = {key: values[key] for key, origin in loaded.origins.items() if not origin.startswith(not_said)}
    for key in ("batch.accumulation", "parallel.zero", "parallel.schedule", "parallel.virtual_stages"):
        kept.pop(key, None)
    chosen = {key: value for key, value in choice.settings().items() if key != "batch.accumulation"}
    if args.tokens is not None and not any(config.train.ends().values()):
        chosen["train.tokens"] = int(parse_count(args.tokens, "--tokens"))
    tree: dict[str, Any] = {"preset": presets.pop()} if presets else {}
    for section in type(config).model_fields:
        for key, value in (kept | chosen).items():
            if key.startswith(f"{section}."):
                _place(tree, key, value)
    missing = [] if config.data.path else ["# Still to be said: data.path."]
    if not any(config.train.ends().values()) and "train.tokens" not in chosen:
        missing.append("# Still to be said: train.steps, epochs or tokens.")
    lines = [
        f"# {choice}, on {made.devices} x {made.device.name} ({made.machines} machines).",
        f"# Predicted: {_gib(made.needed)} of {_gib(made.device.capacity)} GiB, {made.time.total:,.2f} s a step, "
        f"{made.tokens_per_second:,.0f} tokens/s, MFU {made.mfu:.0%}.",
        *missing,
    ]
    text = "\n".join([*lines, yaml_text.dump(tree)])
    try:
        with Path(args.save).open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"--save: {args.save} cannot be written: {error.strerror}.") from None


def _place(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[last] = value


def _flat(config: Any) -> dict[str, Any]:
    from gptworks.config.load import flatten

    return flatten(config.model_dump(mode="json"))


# One layout


def _show(made: "Report", best: "Fit | None") -> None:
    from gptworks.plan.job import TERMS

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
    kind = made.job.precision.compute
    peak = f"{made.device.peak[kind] / 1e12:,.4g} TFLOP/s, {kind}"
    each = speed / made.devices
    print(f"\nspeed       {speed:,.0f} tokens/s, {each:,.0f} of each device; MFU {made.mfu:.0%} (of {peak})")
    if made.days is not None and made.device_hours is not None and made.tokens is not None:
        print(f"tokens      {_many(made.tokens)} take {made.days:,.1f} days, {made.device_hours:,.0f} device-hours")
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


def _simulate(args: argparse.Namespace, made: "Report") -> list[dict[str, Any]]:
    """The second source: the code of training itself."""
    from gptworks.simulate.step import describe, simulate_all

    chosen = [f"{key}={json.dumps(value)}" for key, value in made.choice.settings().items()]
    config = options.load_config(args, *chosen, shape_of=options.shape_of_checkpoint).config
    found = simulate_all(config, made.devices)
    # It runs the code of training as a CPU does, uncompiled and with nothing offloaded: compared with that.
    parallel = made.choice.parallel.model_copy(update={"offload": False})
    alike = replace(made.choice, parallel=parallel).memory(replace(made.job, kernels="cpu", compiled=False))
    planned = [max(alike[rank].peak for rank in each.pp_ranks) for each in found]
    if not args.json:
        print(f"\n{describe(found)}\n\nplanned and simulated peaks, GiB:")
        titles = ["stage", f"planned for {made.device.name}", "planned as simulated", "simulated", "difference"]
        rows = []
        for each, here in zip(found, planned, strict=True):
            first, last = each.pp_ranks.start, each.pp_ranks.stop - 1
            there = max(made.memories[rank].peak for rank in each.pp_ranks)
            stage = str(first) if first == last else f"{first}-{last}"
            apart = f"{100 * (here - each.peak) / each.peak:.1f} %"
            rows.append([stage, _gib(there), _gib(here), _gib(each.peak), apart.replace("-0.0 ", "0.0 ")])
        tables.show(titles, rows)
        if made.job.kernels != "cpu":
            print(
                "The kernels of a GPU keep other things for attention and dropout than a CPU's, which were simulated."
            )
    return [
        each.as_json() | {"planned_peak": here, "difference": (here - each.peak) / each.peak}
        for each, here in zip(found, planned, strict=True)
    ]


def _head(made: "Report", with_layout: bool = True) -> None:
    from gptworks.plan.sizes import num_parameters

    job, choice, device = made.job, made.choice, made.device
    batch = choice.batch
    tokens = batch.global_size * job.seq_len
    machines = f"{made.machines} machines of {device.per_node}" if made.machines > 1 else "1 machine"
    print(f"model       {num_parameters(job.model):,} parameters, {job.precision.compute}")
    print(f"devices     {made.devices} x {device.name}, {machines}; {made.link.name}")
    if not with_layout:
        print(f"batch       {batch.global_size:,} samples of {job.seq_len:,} tokens: {tokens:,} a step")
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


def _many(number: float) -> str:
    for letter in "TBMK":
        if number >= _MANY[letter]:
            return f"{number / _MANY[letter]:,.4g}{letter}"
    return f"{number:,.0f}"
