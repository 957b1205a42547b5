"""torchrun, in front of commands of Megatron-LM and nanoGPT: what it was told about processes and machines."""

from dataclasses import dataclass, field

from gptworks.errors import UsageError
from gptworks.interop.notes import Note
from gptworks.interop.translation import Command

_COUNTS = ("--nproc-per-node", "--nnodes", "--node-rank", "--max-restarts")


@dataclass(frozen=True)
class Start:
    """World, our options for it, and a note on each option of the launcher."""

    processes: int = 1  # of a machine
    machines: int = 1
    arguments: list[str] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def world_size(self) -> int:
        return self.processes * self.machines


def read(command: Command) -> Start:
    options = {name.replace("_", "-"): value for name, value in command.launcher_options.items()}
    counts = {name: _count(command.launcher, name, options[name]) for name in _COUNTS if name in options}
    processes, machines = counts.get("--nproc-per-node", 1), counts.get("--nnodes", 1)
    ours: dict[str, list[str]] = {}  # their option -> ours
    if machines > 1:
        address, _, port = options.get("--rdzv-endpoint", "").partition(":")
        master, port = options.get("--master-addr") or address, options.get("--master-port") or port
        if not master:
            raise UsageError(f"{command.launcher}: {machines} machines, so --master-addr is needed.")
        ours["--nproc-per-node"] = ["--nproc", str(processes)]
        ours["--nnodes"] = ["--nnodes", str(machines)]
        source = "--master-addr" if "--master-addr" in options else "--rdzv-endpoint"
        ours[source] = ["--master", master + (f":{port}" if port else "")]
        if "--node-rank" in options:
            ours["--node-rank"] = ["--node-rank", options["--node-rank"]]
    if counts.get("--max-restarts"):
        ours["--max-restarts"] = ["--max-restarts", options["--max-restarts"]]
    arguments = [word for words in ours.values() for word in words]
    notes = [_note(name, value, processes, machines, ours) for name, value in command.launcher_options.items()]
    return Start(processes, machines, arguments, notes)


def _count(launcher: str, name: str, text: str) -> int:
    last = text.split(":")[-1]  # of MIN:MAX, which --nnodes may be
    if not last.isdecimal():
        raise UsageError(f"{launcher} {name}={text}: say how many; this machine is not asked while translating.")
    return int(last)


def _note(written: str, value: str, processes: int, machines: int, ours: dict[str, list[str]]) -> Note:
    name = written.replace("_", "-")
    if name in ours:
        return Note(written, value, "mapped", " ".join(ours[name]))
    if name == "--nproc-per-node":
        return Note(written, value, "mapped", f"{processes} process{'es' if processes > 1 else ''}")
    if name == "--nnodes":
        return Note(written, value, "mapped", "", "one machine")
    if name == "--master-port" and machines > 1:
        return Note(written, value, "mapped", "the port of --master")
    if machines == 1 and name in ("--node-rank", "--master-addr", "--master-port", "--rdzv-endpoint", "--rdzv-id"):
        return Note(written, value, "mapped", "", "one machine: there is no other to connect to")
    if name in ("--standalone", "--rdzv-backend", "--rdzv-id", "--rdzv-endpoint", "--max-restarts", "--use-env"):
        return Note(written, value, "mapped", "", "gptworks starts the processes and connects them")
    return Note(written, value, "ignored", "", "gptworks starts the processes itself")
