"""Does a run suit the machines it is to have? Its degrees against nodes and GPUs, its memory by the planner."""

from dataclasses import dataclass, replace

from gptworks.config.derive import Layout
from gptworks.config.schema import RunConfig
from gptworks.errors import UsageError
from gptworks.plan.budget import MemoryBudget, amount
from gptworks.plan.devices import Device, devices, link
from gptworks.plan.devices import device as device_named
from gptworks.plan.memory import rank_memories
from gptworks.plan.report import Report, report
from gptworks.plan.sizes import num_parameters
from gptworks.plan.workload import LayoutChoice, Workload


@dataclass(frozen=True)
class Machine:
    nodes: int
    processes: int  # on each node: one per GPU, or so many on its CPUs
    has_gpus: bool = True

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    def __str__(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{nodes} x {self.processes} {'GPUs' if self.has_gpus else 'CPU processes'}"


@dataclass(frozen=True)
class Fit:
    lines: tuple[str, ...]  # what was found out
    notes: tuple[str, ...]  # what the user should know before it runs
    devices: tuple[str, ...] = ()  # names of those GPUs that it fits on, as the planner knows them


def examine(cfg: RunConfig, machine: Machine, device: str) -> Fit:
    """`device`: a GPU of plan/devices.toml, or empty: all that are known are tried. What cannot run is refused."""
    choice = LayoutChoice.from_config(cfg, machine.world_size)
    layout = choice.layout
    lines = [
        f"model: {num_parameters(cfg.model):,} parameters, {cfg.precision.compute}; on {machine}",
        f"layout: {layout.degrees}; batch {choice.batch.global_size:,} = {choice.batch.micro_size} micro-batch x "
        f"{choice.batch.accumulation} accumulation x {choice.batch.data_parallel} data-parallel",
    ]
    notes = _tensor_parallel(layout, machine)
    workload = Workload.from_config(cfg, "cuda" if machine.has_gpus else "cpu")
    if not machine.has_gpus:
        return Fit((*lines, _of_a_node(workload, choice, machine)), tuple(notes))
    known = [device_named(device)] if device else [each for each in devices().values() if each.generation != "cpu"]
    tokens = float(cfg.train.tokens or cfg.train.steps * choice.batch.global_size * cfg.data.seq_len)
    made = [_report(workload, choice, replace(each, per_node=machine.processes), tokens) for each in known]
    fitting = [each for each in made if each.fits]
    if device and not fitting and cfg.train.check_memory != "off":
        raise _too_large(made[0])
    lines.append(f"memory: {amount(made[0].needed)} of a GPU at most" + _rooms(made))
    if device and made[0].days:
        in_all = f"{made[0].days:,.1f} days" if made[0].days >= 1 else f"{24 * made[0].days:.1f} hours"
        lines.append(f"time: about {made[0].time.total:,.2f} s a step, {in_all} in all on {device}")
    if not fitting:
        notes.append(f"memory: {amount(made[0].needed)} of a GPU is more than {_most(made)} has. Check it with `plan`.")
    return Fit(tuple(lines), tuple(notes), tuple(each.device.name for each in fitting if _has_units(each)))


def _has_units(made: Report) -> bool:
    """Whether it computes in this type faster than in fp32: a V100 knows no bf16."""
    peak, compute = made.device.peak, made.workload.precision.compute
    return compute == "fp32" or peak[compute] > peak["fp32"]


def _tensor_parallel(layout: Layout, machine: Machine) -> list[str]:
    """Neighbours in tp talk in every layer, so they should be on one node. Ranks are dealt out node by node, tp
    innermost: a group stays on a node if tp divides the processes of a node."""
    if machine.nodes == 1 or machine.processes % layout.tp == 0:
        return []
    inside = ", ".join(str(n) for n in range(1, machine.processes + 1) if machine.processes % n == 0)
    return [
        f"parallel.tp: {layout.tp} does not divide the {machine.processes} processes of a node, so groups of tensor "
        f"parallelism span nodes, and every layer waits for the network. Inside a node: tp = {inside}."
    ]


def _report(workload: Workload, choice: LayoutChoice, device: Device, tokens: float) -> Report:
    return report(workload, choice, device, link(of=device), tokens=tokens or None)


def _rooms(made: list[Report]) -> str:
    words = []
    fits = [each for each in made if each.fits]
    if fits:
        words.append("fits " + ", ".join(f"{each.device.name} ({amount(each.device.capacity)})" for each in fits))
    if len(fits) < len(made):
        words.append("does not fit " + ", ".join(each.device.name for each in made if not each.fits))
    return f"; {'; '.join(words)}"


def _most(made: list[Report]) -> str:
    return max(made, key=lambda each: each.device.capacity).device.name


def _of_a_node(workload: Workload, choice: LayoutChoice, machine: Machine) -> str:
    needed = MemoryBudget(float("inf"), shared_by=machine.processes).needed(
        rank_memories(workload, choice), choice.layout
    )
    return f"memory: {amount(needed)} of a node for tensors, at most"


def _too_large(made: Report) -> UsageError:
    lines = [
        f"--device {made.device.name}: {amount(made.needed)} of a GPU are needed, and tensors can have "
        f"{amount(made.device.capacity)} of it. The smallest changes:",
        *(f"  {change}" for change in made.changes),
    ]
    if not made.changes:
        lines.append("  none was found: use a larger GPU, more of them, or a smaller model.")
    lines.append("train.check_memory=off writes the file all the same.")
    return UsageError("\n".join(lines))
