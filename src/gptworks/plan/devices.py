"""Devices and what connects them: the numbers of devices.toml, by name, or a user's own."""

import difflib
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from gptworks.errors import UsageError


@dataclass(frozen=True)
class Device:
    name: str
    memory: int  # bytes in all
    reserved: int  # bytes of it that tensors cannot have: context, libraries, buffers of NCCL
    peak: dict[str, float]  # FLOP/s of matrix products by type: fp32, fp16, bf16
    bandwidth: float  # bytes/s of its own memory
    host: float  # bytes/s to the memory of the machine, one direction
    host_memory: float  # bytes/s of the memory of the machine, its share
    per_node: int  # devices in a machine
    generation: str  # whose efficiency applies
    inside: str  # the usual link between devices of a machine
    between: str  # and between machines
    source: str

    @property
    def capacity(self) -> int:
        """Bytes that tensors can have."""
        return self.memory - self.reserved


@dataclass(frozen=True)
class Link:
    """Bytes/s in one direction, of one device. Between machines the card is shared: a machine has `per_node` times it,
    and an axis that has several ranks in a machine uses as many shares in one ring."""

    name: str
    inside: float
    between: float
    inside_latency: float  # seconds of one message
    between_latency: float
    few: dict[int, float] = field(default_factory=dict)  # bytes/s of so many devices, where they do not reach `inside`

    def near(self, ranks: int) -> float:
        """Bytes/s of a ring of so many devices of a machine: of a mesh of links, few of them have few."""
        return min([self.inside, *(speed for size, speed in self.few.items() if ranks <= size)])


def devices() -> dict[str, Device]:
    return dict(_devices())


def device(name: str) -> Device:
    if name == "custom":
        raise UsageError(
            "device custom: its numbers are not known. Needed: at least memory (bytes) and tflops of it. "
            "Give them, or name one of: " + ", ".join(_devices()) + "."
        )
    known = name.strip().lower()
    known = known.removesuffix("b") if known.endswith("gb") else known  # v100-32GB
    if known not in _devices():
        raise UsageError(f"device {name!r} is unknown.{_nearest(known, [*_devices(), 'custom'])}")
    return _devices()[known]


def custom_device(
    *,
    memory: float,
    tflops: float,
    bandwidth: float | None = None,
    reserved: float | None = None,
    per_node: int = 8,
    like: str = "a100-80g",
    name: str = "custom",
) -> Device:
    """A device of so many bytes and TFLOP/s (in the type that is computed in). What is not said is that of `like`; its
    bandwidth grows with the FLOP/s."""
    base = device(like)
    for key, value in {"memory": memory, "tflops": tflops, "bandwidth": bandwidth, "per_node": per_node}.items():
        if value is not None and value <= 0:
            raise UsageError(f"device {name}: {key} is {value}; needs a number above 0.")
    peak = tflops * 1e12
    scale = peak / max(base.peak.values())
    return replace(
        base,
        name=name,
        memory=int(memory),
        reserved=base.reserved if reserved is None else int(reserved),
        peak={"fp32": peak, "fp16": peak, "bf16": peak},
        bandwidth=bandwidth or base.bandwidth * scale,
        per_node=per_node,
        source=f"given; the rest as {like}",
    )


def link(name: str = "", of: Device | None = None) -> Link:
    """`nvlink3+ib-8x200`, or one half of it, or nothing: the rest is usual for the device. `nvlink` and `pcie` without
    a number are those of the device's time."""
    usual = of or device("a100-80g")
    inside, between = usual.inside, usual.between
    table = _tables()
    for half in filter(None, name.split("+")):
        if half == "nvlink" and usual.inside.startswith("nvlink"):
            inside = usual.inside
        elif half == "pcie":
            inside = {"v100": "pcie3", "a100": "pcie4", "h100": "pcie5"}.get(usual.generation, "pcie4")
        elif half in table["inside"]:
            inside = half
        elif half in table["between"]:
            between = half
        else:
            raise UsageError(
                f"link {name!r}: {half!r} is unknown.{_nearest(half, [*table['inside'], *table['between']])}"
            )
    return _link(inside, between, usual.per_node)


def _link(inside: str, between: str, per_node: int) -> Link:
    table = _tables()
    near, far = table["inside"][inside], table["between"][between]
    return Link(
        f"{inside}+{between}",
        near["speed"],
        far["speed"] / per_node,
        near["latency"],
        far["latency"],
        {int(ranks): speed for ranks, speed in near.get("few", {}).items()},
    )


def _nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    near = [each for each in known if name and each.startswith(name)]
    near = near or difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return (f" Nearest: {', '.join(near)}." if near else "") + f" Known: {', '.join(known)}."


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "devices.toml").read_text(encoding="utf-8"))


@cache
def _devices() -> dict[str, Device]:
    return {
        name: Device(name=name, **_with_peak(values) | {key: int(values[key]) for key in ("memory", "reserved")})
        for name, values in _tables()["devices"].items()
    }


def _with_peak(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a device, those of its chip among them."""
    rest = {key: value for key, value in values.items() if key != "chip"}
    return rest | {"peak": _tables()["chips"][values["chip"]]["peak"]} if "chip" in values else rest


def datasheet_peak(reported_name: str) -> dict[str, float] | None:
    """FLOP/s of dense products by type, of a device by the name that its driver reports; None where it is not known."""
    name = reported_name.strip().removeprefix("NVIDIA ")
    return next((chip["peak"] for chip in _tables()["chips"].values() if name in chip["names"]), None)
