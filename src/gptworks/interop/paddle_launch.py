"""Paddle's launcher, in front of commands of FleetX and PaddleNLP: one process per device that it names."""

import math
from collections.abc import Mapping
from typing import Any

from gptworks.errors import UsageError
from gptworks.interop.notes import Note
from gptworks.interop.translation import Command

_DEVICES = ("--gpus", "--devices", "--xpus", "--npus", "--selected_gpus", "--selected_devices")


def num_processes(command: Command | None) -> int:
    """0 = no launcher, or one that does not say: then the degrees of the layout do."""
    if command is None or not command.launcher:
        return 0
    options = command.launcher_options
    machines = options.get("--nnodes", "1")
    addresses = [each for each in options.get("--ips", "").split(",") if each]
    if machines != "1" or len(addresses) > 1:
        raise UsageError(
            f"{command.launcher}: several machines (--nnodes {machines}, --ips {','.join(addresses)}). Translate the "
            "command with `gptworks translate`, and start that on each of them with `gptworks train --node-ips`."
        )
    for name in _DEVICES:
        if name in options:
            return len(_list(options[name]))
    given = options.get("--nproc_per_node", "0")
    if not given.isdecimal():
        raise UsageError(f"{command.launcher} --nproc_per_node={given}: needed a number of processes.")
    return int(given)


def arguments(command: Command | None, config: Mapping[str, Any]) -> list[str]:
    """A process that is launched has a log, even if it is the only one."""
    if command is None or not command.launcher:
        return []
    world = math.prod(config.get(f"parallel.{axis}", 1) for axis in ("dp", "fsdp", "tp", "pp"))
    again = command.launcher_options.get("--max_restart", "")
    return (["--nproc", "1"] if world == 1 else []) + (["--max-restarts", again] if again else [])


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
    found = []
    for name, value in (command.launcher_options if command else {}).items():
        if verb != "train":
            found.append(Note(name, value, "mapped", "", "one process does it"))
        elif name == "--log_dir":
            found.append(
                Note(
                    name,
                    value,
                    "mapped",
                    f"{value}/workerlog.N, links to the logs of the run folder",
                )
            )
        elif name in _DEVICES:
            count = len(_list(value))
            found.append(Note(name, value, "mapped", f"{count} process{'es' if count > 1 else ''}"))
        elif name == "--nproc_per_node":
            found.append(Note(name, value, "mapped", f"{value} processes"))
        elif name == "--max_restart":
            found.append(Note(name, value, "mapped", f"--max-restarts {value}"))
        else:
            found.append(Note(name, value, "ignored", "", "gptworks starts the processes itself"))
    return found


def _list(text: str) -> list[str]:
    return [each for each in text.strip("\"'").split(",") if each.strip()]
