"""Paddle's launcher, in front of commands of FleetX and PaddleNLP: one process per device that it names."""

from gptworks.errors import UsageError
from gptworks.interop.notes import Note
from gptworks.interop.translation import Command

_DEVICES = ("--gpus", "--devices", "--xpus", "--npus", "--selected_gpus", "--selected_devices")


def num_processes(command: Command | None) -> int:
    """0 = no launcher."""
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
    return int(options.get("--nproc_per_node", "1"))


def arguments(command: Command | None) -> list[str]:
    """A process that is launched has a log, even if it is the only one."""
    return ["--nproc", "1"] if num_processes(command) == 1 else []


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
            found.append(Note(name, value, "mapped", "logs of the ranks, as workerlog.N"))
        elif name in _DEVICES:
            count = len(_list(value))
            found.append(Note(name, value, "mapped", f"{count} process{'es' if count > 1 else ''}"))
        elif name == "--nproc_per_node":
            found.append(Note(name, value, "mapped", f"{value} processes"))
        else:
            found.append(Note(name, value, "ignored", "", "gptworks starts the processes itself"))
    return found


def _list(text: str) -> list[str]:
    return [each for each in text.strip("\"'").split(",") if each.strip()]
