"""gptworks launch --to slurm|kubernetes|skypilot: a run as a file for the scheduler of a cluster."""

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.cli import options
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.launch.schedulers.fit import Fit, Machine
    from gptworks.launch.schedulers.job import ClusterJob

# Options that are about a scheduler's file and nothing else that `launch` does: name in args -> as it is written.
OWN = {
    "config": "-c",
    "preset": "--preset",
    "override": "-o",
    "nodes": "--nodes",
    "gpus_per_node": "--gpus-per-node",
    "processes_per_node": "--processes-per-node",
    "time": "--time",
    "grace": "--grace",
    "max_restarts": "--max-restarts",
    "device": "--device",
    "volume": "--volume",
    "setup": "--setup",
    "name": "--name",
    "kind": "--kind",
    "task_per": "--task-per",
    "force": "--force",
}
_GRACE = 300
_MAX_RESTARTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    job = parser.add_argument_group("with --to")
    job.add_argument("-c", "--config", metavar="FILE", help="YAML file of the run")
    job.add_argument("--preset", metavar="NAME", default="", help="model shape by name")
    job.add_argument("-o", "--override", metavar="KEY=VALUE", action="append", default=[], help="repeatable")
    job.add_argument("--nodes", metavar="N", help="machines")
    job.add_argument("--gpus-per-node", metavar="M", help="GPUs of each machine, one process for each")
    job.add_argument("--processes-per-node", metavar="M", help="instead: processes of each machine without GPUs")
    job.add_argument("--time", metavar="T", help="time limit of the job, such as 12h, 90m or 1-12:00:00")
    job.add_argument("--grace", metavar="S", help=f"its last seconds, kept for saving (default: {_GRACE})")
    job.add_argument("--max-restarts", metavar="N", help=f"restarts after failures, at most (default: {_MAX_RESTARTS})")
    job.add_argument("--device", metavar="NAME", default="", help="GPU whose memory the run must fit, such as a100-80g")
    job.add_argument(
        "--volume",
        action="append",
        default=[],
        metavar="SOURCE:/PATH",
        help="shared storage in a container; repeatable",
    )
    job.add_argument(
        "--setup",
        default="",
        metavar="COMMAND",
        help="slurm, skypilot: run first, so that `gptworks` is a command there",
    )
    job.add_argument("--name", metavar="NAME", help="name of the job (default: of the config or preset)")
    job.add_argument("--kind", metavar="KIND", help="kubernetes: job (default), pytorchjob or trainjob (Kubeflow)")
    job.add_argument("--task-per", metavar="gpu|node", help="slurm: one task per GPU (default), or one per node")
    job.add_argument("--force", action="store_true", help="overwrite the file")


def refuse_options(args: argparse.Namespace) -> None:
    """Refuses the options of a scheduler's file where none is asked for."""
    for name, written in OWN.items():
        if getattr(args, name):
            raise UsageError(f"{written}: only with --to. Before a command of your own, write --.")


def run(args: argparse.Namespace) -> int:
    from gptworks.launch.schedulers.registry import scheduler

    target = scheduler(args.to)
    for name in ("kind", "task_per", "setup"):  # which not all of them understand
        if getattr(args, name) and name not in target.OPTIONS:
            raise UsageError(f"{OWN[name]}: means nothing to --to {args.to}. Leave it out.")
    job, fit = _job(args)
    target.check(job)
    text = target.render(job)
    path = Path(args.out or f"{job.name}{target.SUFFIX}")
    if args.out == "-":
        print(text, end="")
        return 0
    write(path, text, force=args.force)
    print("\n".join([f"{path}:", *(f"  {line}" for line in fit.lines), *(f"note: {note}" for note in fit.notes)]))
    print(f"Submit it with: {shlex.join(target.submit_words(job, path))}")
    return 0


def _job(args: argparse.Namespace) -> "tuple[ClusterJob, Fit]":
    from gptworks.launch.schedulers.duration import parse_duration
    from gptworks.launch.schedulers.fit import examine
    from gptworks.launch.schedulers.job import ClusterJob, Volume, default_name, require_name

    if not args.config and not args.preset:
        raise UsageError(f"--to {args.to}: nothing to train. Needed: -c FILE, or --preset NAME.")
    machine = _machine(args)
    time = None if args.time is None else parse_duration(args.time, "--time")
    grace = _number(args.grace, "--grace", _GRACE)
    restarts = _number(args.max_restarts, "--max-restarts", _MAX_RESTARTS, least=0)
    task_per = args.task_per or "gpu"
    if task_per not in ("gpu", "node"):
        raise UsageError(f"--task-per: {task_per!r}. Needed: gpu or node.")
    name = default_name(Path(args.config).stem if args.config else args.preset)
    config = options.load_config(args, shape_of=options.shape_of_checkpoint).config
    _refuse_other_device(config.run.device, machine)
    fit = examine(config, machine, args.device)
    run_folder = config.run.out or options.default_run_folder(args)
    asked = shlex.join(["gptworks", *args.argv])
    job = ClusterJob(
        name=require_name(args.name or name),
        settings=_settings(args),
        config=_as_one_file(config, run_folder),
        machine=machine,
        time=time,
        grace=grace,
        max_restarts=restarts,
        run_folder=run_folder,
        image=args.image or "",
        volumes=tuple(Volume.parse(text) for text in args.volume),
        setup=args.setup,
        kind=args.kind or "job",
        task_per=task_per,
        devices=fit.devices or ((args.device,) if args.device else ()),
        head=(f"Written by: {asked}", *fit.lines, *(f"note: {note}" for note in fit.notes)),
    )
    return job, fit


def _settings(args: argparse.Namespace) -> tuple[str, ...]:
    """What to train, in the words of `gptworks train`."""
    file = ["-c", args.config] if args.config else []
    preset = ["--preset", args.preset] if args.preset else []
    return (*file, *preset, *args.override, *args.overrides)


def _as_one_file(config: Any, run_folder: str) -> str:
    """All that was said, by the file, those it is based on, the preset and the command line."""
    from gptworks.config import yaml_text

    settings = config.model_dump(mode="json", exclude_unset=True)
    settings["run"] = settings.get("run", {}) | {"out": run_folder}
    return yaml_text.dump({section: values for section, values in settings.items() if values})


def _machine(args: argparse.Namespace) -> "Machine":
    from gptworks.launch.schedulers.fit import Machine

    if args.gpus_per_node is not None and args.processes_per_node is not None:
        raise UsageError(
            f"--gpus-per-node {args.gpus_per_node} and --processes-per-node {args.processes_per_node}: the second is "
            "for machines without GPUs. Give one of them."
        )
    for name in ("nodes", "gpus_per_node"):
        if getattr(args, name) is None and (name == "nodes" or args.processes_per_node is None):
            raise UsageError(f"--to {args.to}: {OWN[name]} not given. Needed: --nodes N --gpus-per-node M.")
    nodes = _number(args.nodes, "--nodes", 1)
    if args.gpus_per_node is not None:
        return Machine(nodes, _number(args.gpus_per_node, "--gpus-per-node", 1))
    if args.device:
        raise UsageError(f"--device {args.device}: a GPU, but --processes-per-node is for machines without. Give one.")
    return Machine(nodes, _number(args.processes_per_node, "--processes-per-node", 1), has_gpus=False)


def _refuse_other_device(device: str, machine: "Machine") -> None:
    """The file says --device itself, which would overrule the configuration in silence."""
    wanted = "cuda" if machine.has_gpus else "cpu"
    if device in ("auto", wanted):
        return
    fix = "--processes-per-node, for machines without GPUs" if machine.has_gpus else "--gpus-per-node"
    raise UsageError(f"run.device: {device}, but the job would run on {wanted}. Needed: run.device=auto, or {fix}.")


def _number(text: str | None, option: str, otherwise: int, least: int = 1) -> int:
    if text is None:
        return otherwise
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option}: {text!r}. Needed: a whole number, {least} or more.")
    return int(text)


def write(path: Path, text: str, *, force: bool) -> None:
    if not force and path.exists():
        raise UsageError(f"{path}: is there already. Choose another --out, or overwrite it with --force.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}). Choose another --out.") from None
