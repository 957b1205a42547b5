"""Paddle's launcher, in front of commands of FleetX and PaddleNLP: one process per device that it names."""

import math
from collections.abc import Mapping
from typing import Any

from gptworks.errors import UsageError
from gptworks.interop.notes import Note
from gptworks.interop.translation import Command

_DEVICES = ("--gpus", "--devices", "--xpus", "--npus", "--selected_gpus", "--selected_devices")


def num_processes(command: Command | None) -> int:
    """Processes on all machines. 0 = no launcher, or one that does not say: then the degrees of the layout do."""
    if command is None or not command.launcher:
        return 0
    options = command.launcher_options
    machines = _num_machines(command)
    for name in _DEVICES:
        if name in options:
            return len(_list(options[name])) * machines
    number = options.get("--nproc_per_node", "0")
    if not number.isdecimal():
        raise UsageError(f"{command.launcher} --nproc_per_node={number}: needed a number of processes.")
    return int(number) * machines


def _num_machines(command: Command) -> int:
    options = command.launcher_options
    addresses, count = _list(options.get("--ips", "")), options.get("--nnodes", "")
    if addresses:
        return len(addresses)
    if count and not count.split(":")[-1].isdecimal():
        raise UsageError(f"{command.launcher} --nnodes={count}: needed a number of machines.")
    return int(count.split(":")[-1]) if count else 1


def arguments(command: Command | None, config: Mapping[str, Any]) -> list[str]:
    """A process that is launched has a log, even if it is the only one."""
    if command is None or not command.launcher:
        return []
    world = math.prod(config.get(f"parallel.{axis}", 1) for axis in ("dp", "fsdp", "tp", "pp"))
    machines = _num_machines(command)
    if world % machines:
        raise UsageError(
            f"{command.launcher}: {world} processes (the product of the degrees) on {machines} machines. "
            "Needed: as many on each."
        )
    again = command.launcher_options.get("--max_restart", "")
    here = ["--nproc", str(world // machines)] if machines > 1 or world == 1 else []
    return _machines(command, machines) + here + (["--max-restarts", again] if again else [])


def _machines(command: Command, count: int) -> list[str]:
    """Each finds itself among the addresses; without these it is told its number."""
    options = command.launcher_options
    if count == 1:
        return []
    if addresses := _list(options.get("--ips", "")):
        return ["--node-ips", ",".join(each.strip() for each in addresses)]
    missing = [name for name in ("--master", "--rank") if not options.get(name)]
    if missing:
        raise UsageError(
            f"{command.launcher} --nnodes {options['--nnodes']}: {' and '.join(missing)} missing. Needed: --master "
            "ADDRESS:PORT, the same on all machines, and --rank, from 0, another one on each; or "
            "--ips with all of them."
        )
    master = options["--master"].partition("://")[2] or options["--master"]
    return ["--nnodes", options["--nnodes"], "--master", master, "--node-rank", options["--rank"]]


def remarks(command: Command | None) -> list[str]:
    if command is None or not command.launcher or num_processes(command):
        return []
    return [
        f"{command.launcher} names no devices, and takes all of a machine: here as many processes are started as the "
        "degrees of the layout need."
    ]


def logs(command: Command | None) -> str:
    folder = command.launcher_options.get("--log_dir") if command else ""
    return f"{folder}/workerlog.{{rank}}" if folder else ""


def notes(command: Command | None, verb: str = "train") -> list[Note]:
    """One for each option of the launcher."""
    notes = []
    named = {}
    if command and command.launcher and verb == "train":
        words = _machines(command, _num_machines(command))
        ours = {"--ips": "--node-ips", "--nnodes": "--nnodes", "--master": "--master", "--rank": "--node-rank"}
        named = {name: f"{option} {words[words.index(option) + 1]}" for name, option in ours.items() if option in words}
    for name, value in (command.launcher_options if command else {}).items():
        if verb != "train":
            notes.append(Note(name, value, "mapped", "", "one process does it"))
        elif name == "--log_dir":
            notes.append(
                Note(
                    name,
                    value,
                    "mapped",
                    f"{value}/workerlog.N, links to the logs of the run folder",
                )
            )
        elif name in _DEVICES:
            count = len(_list(value))
            notes.append(Note(name, value, "mapped", f"{count} process{'es' if count > 1 else ''}"))
        elif name == "--nproc_per_node":
            notes.append(Note(name, value, "mapped", f"{value} processes"))
        elif name == "--max_restart":
            notes.append(Note(name, value, "mapped", f"--max-restarts {value}"))
        elif name in named:
            notes.append(Note(name, value, "mapped", named[name]))
        elif name in ("--ips", "--nnodes", "--master", "--rank"):
            notes.append(Note(name, value, "mapped", "", "one machine: there is no other to connect to"))
        else:
            notes.append(Note(name, value, "ignored", "", "gptworks starts the processes itself"))
    return notes


def _list(text: str) -> list[str]:
    return [each for each in text.strip("\"'").split(",") if each.strip()]
