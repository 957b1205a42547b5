"""The options of gptworks plan, and what they ask for."""

import argparse
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.cli import options
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.plan.devices import Device, Link
    from gptworks.plan.request import Request

_NUMBERS: dict[str, tuple[Callable[[str], float], str]] = {
    "devices": (int, "1 or more"),
    "nodes": (int, "1 or more"),
    "top": (int, "1 or more"),
    "price": (float, "0 or more, of one device for an hour, in any currency"),
    "tflops": (float, "such as 165"),
    "bandwidth": (float, "GB/s, such as 1000"),
}
# Written here as well as in plan/devices.toml, which is not read for --help; a test compares them.
DEVICES = "v100-16g, v100-32g, a100-40g, a100-80g, h100-80g, cpu or custom"
MANY = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config_options(parser)
    where = parser.add_argument_group("devices")
    where.add_argument("--devices", metavar="N", help="number of devices (default: what the layout needs)")
    where.add_argument("--device", default="", metavar="NAME", help=DEVICES)
    where.add_argument("--nodes", metavar="N", help="number of machines (default: as many as such devices need)")
    where.add_argument(
        "--link", default="", metavar="NAME", help="what connects the devices, such as nvlink3+ib-8x200, pcie or ib-100"
    )
    where.add_argument("--memory", metavar="GB", help="custom or cpu: memory of a device, such as 24 or 24GiB")
    where.add_argument("--tflops", metavar="X", help="custom: TFLOP/s of matrix products")
    where.add_argument("--bandwidth", metavar="GB/s", help="custom: bandwidth of a device's own memory")
    where.add_argument("--like", metavar="NAME", help="custom: the device whose efficiency it has (default: a100-80g)")
    budget = parser.add_argument_group("budget")
    budget.add_argument(
        "--tokens", metavar="N", help="tokens to train on, such as 300B or 3e11 (default: of the config)"
    )
    budget.add_argument("--price", metavar="X", help="price of one device for an hour")
    search = parser.add_argument_group("search")
    search.add_argument(
        "--search", action="store_true", help="all layouts that fit, the fastest first; parallel.tp=2 and such stay"
    )
    search.add_argument("--top", metavar="N", help="show the N fastest (default: 10)")
    search.add_argument("--rejected", action="store_true", help="also layouts that do not fit or cannot run, by reason")
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


def read_request(args: argparse.Namespace) -> "Request":
    """The configuration, and on what it is to run. Numbers among the options are numbers afterwards."""
    from gptworks.config.checks import LAYOUT_CHECKS
    from gptworks.plan.request import Request

    _refuse_nonsense(args)
    loaded = options.load_config(args, shape_of=options.shape_of_checkpoint, without=LAYOUT_CHECKS)
    devices = _num_devices(args, loaded)
    hardware = partial(_hardware, args, devices)
    return Request(loaded, devices, hardware, hardware(devices))


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
    described = [name for name, value in custom.items() if value is not None]
    if described and args.device != "custom" and (args.device, described) != ("cpu", ["memory"]):
        raise UsageError(f"--{described[0]}: describes a device of your own. Add --device custom, or leave it out.")
    if args.save and Path(args.save).exists():
        raise UsageError(f"--save: {args.save} is there already. Choose another name, or remove it.")


def _num_devices(args: argparse.Namespace, loaded: Any) -> int:
    from gptworks.config.derive import Layout
    from gptworks.config.load import OriginKind
    from gptworks.config.schema import AXES

    if args.devices is not None:
        return int(args.devices)
    parallel = loaded.config.parallel
    auto = next((axis for axis in AXES if getattr(parallel, axis) == "auto"), None)
    origins = [loaded.origins.get(f"parallel.{axis}") for axis in AXES]
    is_in_a_file = any(origin is not None and origin.kind is not OriginKind.OVERRIDE for origin in origins)
    if auto or (args.search and not is_in_a_file):
        why = f"parallel.{auto} is auto" if auto else "a search needs it"
        raise UsageError(f"--devices: not given, and {why}. Needed: how many there are.")
    return Layout.from_config(parallel).world_size


def refuse_indivisible(request: "Request") -> None:
    """Degrees that a search is to leave as they are, and that do not divide the devices."""
    from gptworks.config.schema import AXES

    sizes = {f"parallel.{axis}": request.fixed.get(f"parallel.{axis}", "auto") for axis in AXES}
    known = {key: size for key, size in sizes.items() if size != "auto"}
    product, devices = math.prod(known.values()), request.devices
    if devices % product or (len(known) == len(AXES) and devices != product):
        degrees = " x ".join(f"{key}={size}" for key, size in known.items() if size > 1)
        needed = f"{product} devices" if len(known) == len(AXES) else f"{product} devices or a multiple of them"
        raise UsageError(
            f"--search: {degrees} needs {needed}, but there are {devices}. Leave one of them to the search, or set "
            f"--devices {-(-devices // product) * product}."
        )


def tokens_of(args: argparse.Namespace, request: "Request", global_size: int) -> float | None:
    """To train on: as --tokens or the configuration says."""
    return parse_count(args.tokens, "--tokens") if args.tokens is not None else request.tokens(global_size)


def _hardware(args: argparse.Namespace, asked: int, devices: int) -> "tuple[Device, Link]":
    """The device and what connects so many of them; --nodes is about as many as were asked for."""
    from gptworks.plan.devices import custom_device, device, link
    from gptworks.plan.devices import devices as known

    if not args.device:
        raise UsageError(f"--device: not given. Needed: one of {', '.join([*known(), 'custom'])}.")
    if args.device == "custom":
        if args.memory is None or args.tflops is None:
            missing = " and ".join(f"--{name}" for name in ("memory", "tflops") if getattr(args, name) is None)
            raise UsageError(f"--device custom: {missing} not given. Needed: such as --memory 24GB --tflops 165.")
        chosen = custom_device(
            memory=_bytes(args.memory),
            tflops=args.tflops,
            bandwidth=args.bandwidth * 1e9 if args.bandwidth is not None else None,
            like=args.like or "a100-80g",
            per_node=device(args.like or "a100-80g").per_node,
        )
    else:
        chosen = device(args.device)
        if args.memory is not None:
            chosen = replace(chosen, memory=int(_bytes(args.memory)), reserved=0)
    if args.nodes and asked % args.nodes:
        fitting = [n for n in range(1, asked + 1) if asked % n == 0]
        near = sorted(sorted(fitting, key=lambda n: abs(n - args.nodes))[:2])
        raise UsageError(
            f"--nodes: {args.nodes} machines do not divide --devices {asked}; all machines have as many. "
            f"Nearest that do: {' or '.join(map(str, near))}."
        )
    most = min(devices, asked // args.nodes if args.nodes else chosen.per_node)
    per_node = next(n for n in range(most, 0, -1) if devices % n == 0)
    if not args.nodes and devices == asked and per_node < most:
        whole = f"{asked // most * most} or {-(-asked // most) * most}"
        raise UsageError(
            f"--devices: {asked} of them do not fill whole machines of {most}. Needed: {whole} devices, or --nodes "
            f"with the machines they are in, such as --nodes {asked // per_node}."
        )
    chosen = replace(chosen, per_node=per_node)
    return chosen, link(args.link, of=chosen)


def notes_on_cpus(args: argparse.Namespace, request: "Request") -> list[str]:
    device, devices = request.here[0], request.devices
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
    parts = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*(GB|GiB|)\s*", text, re.IGNORECASE)
    try:
        number = float(parts[1]) if parts else math.nan
    except ValueError:
        number = math.nan
    if not parts or not 0 < number < 1e9:
        raise UsageError(f"--memory: {text!r} is not an amount. Needed: such as 24, 24GB or 24GiB.")
    return number * (2**30 if parts[2].lower() == "gib" else 1e9)


def parse_count(text: str, option: str) -> float:
    """300B, 3e11, 1.5T, 20M or 300_000_000_000."""
    parts = re.fullmatch(
        r"\s*([0-9][0-9_,]*(?:\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?\s*([KMBGT]?|thousand|million|billion|trillion)\s*",
        text,
        re.IGNORECASE,
    )
    letter = (parts[3][:2].upper().replace("TH", "K") if len(parts[3]) > 1 else parts[3].upper()) if parts else ""
    number = float(re.sub("[_,]", "", parts[1]) + (parts[2] or "")) * MANY[letter[:1]] if parts else 0.0
    if not 1 <= number < math.inf:
        raise UsageError(f"{option}: {text!r} is not a number of tokens. Needed: such as 300B, 1.5T or 3e11.")
    return number
