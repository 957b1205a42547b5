"""gptworks train: pretrain or fine-tune."""

import argparse
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from gptworks.cli import options
from gptworks.errors import TRY_AGAIN, LostRunError, UsageError
from gptworks.run_paths import CONFIG

if TYPE_CHECKING:
    from gptworks.config.load import Loaded
    from gptworks.launch.job import Job

HELP = "pretrain or fine-tune"
# Imported once, by the process that ranks are forked from. What they import must leave CUDA alone and start no thread:
# neither survives a fork.
PRELOAD = ("gptworks.cli.train", "gptworks.train.run", "gptworks.checkpoint.formats.dcp")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_config_options(parser)
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/NAME of the config or preset)")
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|never|DIR",
        help="continue: auto = from the newest checkpoint, DIR = from that one (default: never)",
    )
    parser.add_argument("--device", choices=options.DEVICES, help="where to compute")
    parser.add_argument("--dry-run", action="store_true", help="check everything, show the plan, train nothing")
    parser.add_argument(
        "--world", type=int, metavar="N", help="with --dry-run: what each of N processes would hold; needs no data"
    )
    parser.add_argument("--show-batch", action="store_true", help="print the first batch, decoded, and stop")
    many = parser.add_argument_group("several processes")
    many.add_argument(
        "--nproc", type=int, metavar="N", help="processes on this machine (default: what the layout needs)"
    )
    many.add_argument(
        "--nnodes", default="", metavar="N|MIN:MAX", help="number of machines; with MIN:MAX the run goes on with fewer"
    )
    many.add_argument("--node-rank", type=int, metavar="K", help="number of this machine, from 0")
    many.add_argument("--master", default="", metavar="ADDR[:PORT]", help="address of machine 0")
    many.add_argument("--node-ips", default="", metavar="A,B", help="addresses of all machines, the same everywhere")
    many.add_argument("--rank-table", default="", metavar="FILE", help="machines and devices (gptworks launch)")
    many.add_argument("--rank-range", default="", metavar="[8,16]", help="ranks of the table to start here")
    many.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restarts after failures, at most (default: 0)"
    )
    many.add_argument(
        "--stopped-code",
        type=int,
        metavar="N",
        help="exit code after a signal has stopped the run and it was saved (default: 130 after Ctrl-C, else 0)",
    )
    many.add_argument(
        "--try-again-code",
        type=int,
        default=TRY_AGAIN,
        metavar="N",
        help=f"exit code of a failure that needs no fix: the same command goes on (default: {TRY_AGAIN})",
    )
    many.add_argument("--log-dir", metavar="DIR", help="one log per rank (default: logs in the run folder)")
    many.add_argument("--rdma", action="store_true", help="NCCL over RDMA, not TCP")


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except LostRunError as error:
        error.exit_code = args.try_again_code
        raise
    except KeyboardInterrupt:  # a run that has begun takes it for a wish to save and end
        print("stopped by Ctrl-C before the first step; nothing was trained", file=sys.stderr)
        raise


def _run(args: argparse.Namespace) -> int:
    _refuse_resuming_without_settings(args)
    more = [f"run.device={args.device}"] if args.device else []
    loaded = options.load_config(args, *more, shape_of=options.shape_of_checkpoint)
    if not (args.dry_run or args.show_batch):
        _refuse_contradiction(loaded.config)
    config = _with_replicas(args, loaded)
    if not _is_model_chosen(loaded):
        print("note:  no model is chosen, so it is GPT-2 with 12 layers of 768; on a CPU begin with --preset tiny")
    if args.out or not config.run.out:
        folder = args.out or options.default_run_folder(args)
        config = config.model_copy(update={"run": config.run.model_copy(update={"out": folder})})

    if args.show_batch or args.dry_run:
        from gptworks.train import text_inputs

        with text_inputs.for_trial(config) as config:
            print(_trial(args, config))
        return 0
    for option, code in (("--stopped-code", args.stopped_code), ("--try-again-code", args.try_again_code)):
        if code is not None and not 0 <= code <= 255:
            raise UsageError(f"{option}: {code}. Needed: an exit code, 0 to 255.")
    if args.world is not None:
        raise UsageError(f"--world: {args.world} without --dry-run. To train, start the processes with --nproc.")
    from gptworks.config.derive import require_end

    require_end(config.train)
    if args.rdma:
        _enable_rdma(config)
    from pathlib import Path

    from gptworks.launch.reporting import reporting

    if _starts_processes(args, config):
        code = _launch(args, config)
        return args.try_again_code if code == TRY_AGAIN else code

    with reporting(Path(config.run.out)):
        from gptworks.train.loop import train

        outcome = train(
            config,
            resume_from=_resume_from(args, config),
            command=["gptworks", *sys.argv[1:]],
            origins={key: str(origin) for key, origin in loaded.origins.items() if origin},
        )
    return 0 if outcome.is_finished else _stopped_code(args, outcome.stopped_by)


def _refuse_resuming_without_settings(args: argparse.Namespace) -> None:
    """`--resume runs/x` alone: that folder says what the run is, and it would be a new one with the usual settings."""
    if args.resume in ("auto", "never") or args.config or args.preset:
        return
    if any(text.startswith("data.path=") for text in [*args.override, *args.overrides]):
        return
    from pathlib import Path

    folder = next((each for each in [Path(args.resume), *Path(args.resume).parents] if (each / CONFIG).is_file()), None)
    if folder is not None:
        raise UsageError(
            f"--resume {args.resume}: no configuration. That of the run goes with it: -c {folder / CONFIG} "
            "--resume auto."
        )


def _is_model_chosen(loaded: "Loaded") -> bool:
    from gptworks.config.load import OriginKind

    chosen = {key for key, origin in loaded.origins.items() if origin.kind is not OriginKind.DERIVED}
    return any(key.startswith("model.") for key in chosen - {"model.vocab_size"})  # the data may say that one


def _stopped_code(args: argparse.Namespace, by: str) -> int:
    """The exit code of a run that a signal has stopped. A rank tells what started it, which then has that code."""
    from gptworks.launch import rank_env, rank_process, signals

    if not rank_env.is_supervised(os.environ):
        return signals.stopped_code(args.stopped_code, by)
    rank_process.note_stopped()
    return 0


def _trial(args: argparse.Namespace, config: Any) -> str:
    """What --show-batch or --dry-run prints."""
    if not args.show_batch:
        return _dry_run(args, config)
    import torch

    from gptworks.config.derive import Layout
    from gptworks.launch.world import World
    from gptworks.train.setup import prepare, show_first_batch

    return show_first_batch(prepare(config, World(torch.device("cpu"), Layout.from_config(config.parallel))))


def _with_replicas(args: argparse.Namespace, loaded: Any) -> Any:
    """Where processes are asked for and no layout is, each is a replica: --nproc 2 alone means parallel.dp=2."""
    from gptworks.config.schema import AXES
    from gptworks.launch import rank_env

    config = loaded.config
    world_size = rank_env.read(os.environ).world_size
    is_asked = args.nproc is not None or args.world is not None or world_size > 1
    if not is_asked or any(f"parallel.{axis}" in loaded.origins for axis in AXES):
        return config
    # Before the processes are there, `auto` stands for as many as there will be.
    is_rank = rank_env.is_supervised(os.environ) or (world_size > 1 and not _wants_many(args))
    replicas: int | str = world_size if is_rank else "auto"
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"dp": replicas})})


def _dry_run(args: argparse.Namespace, config: Any) -> str:
    """What the run would be, after every check that it would make before its first file is written."""
    from gptworks.simulate.dry_run import describe, describe_one_process

    if config.init.checkpoint:
        from gptworks.train.opening import open_to_tune

        open_to_tune(config.init.checkpoint, config.model)
    if args.world is not None:  # of machines that need not be here
        if args.world < 1:
            raise UsageError(f"--world: {args.world}. Needed: 1 or more.")
        return describe(config, args.world)
    if args.rdma:
        from gptworks.launch import rdma

        rdma.require(_device(config))
    if _starts_processes(args, config):
        job = _job(args, config)
        world_size = sum(job.nodes.nproc) or job.nproc * job.nodes.count
        plan = describe(config, world_size) if world_size > 1 else describe_one_process(config)
        return "\n".join([plan, *_agent_command(config, job)])
    from pathlib import Path

    from gptworks.train import run_folder

    plan = describe_one_process(config)
    run_folder.refuse_foreign(Path(config.run.out), args.resume)
    return plan


def _agent_command(config: Any, job: "Job") -> list[str]:
    if job.nodes.count == 1:
        return []
    from gptworks.launch import torchrun

    return [_shared(config, job), f"this machine would start (node {job.nodes.rank}):", torchrun.by_hand(job)]


def _refuse_contradiction(config: Any) -> None:
    """Refuse an environment that contradicts itself about this process: on the ranks that wait for it too."""
    from gptworks.launch import rank_env

    try:
        rank_env.read(os.environ)
    except UsageError as error:
        from gptworks.launch import process_group

        process_group.refuse(error, float(config.parallel.timeout))
        raise


def _starts_processes(args: argparse.Namespace, config: Any) -> bool:
    """By the options, or by a layout of several, unless this process is one of those that were started."""
    from gptworks.launch import rank_env
    from gptworks.train.launch_checks import processes_of_layout

    if rank_env.LOG_DIR in os.environ:  # by the command that we start, or show with --dry-run
        return False
    by_layout = processes_of_layout(config.parallel) > 1 and rank_env.read(os.environ).world_size == 1
    return _wants_many(args) or by_layout or bool(rank_env.pod_options(os.environ))


def _wants_many(args: argparse.Namespace) -> bool:
    """Any of the options that only our launcher can honour; for one process too."""
    numbers = (args.nproc, args.node_rank, args.max_restarts or None)
    texts = (args.nnodes, args.master, args.node_ips, args.rank_table, args.rank_range, args.log_dir)
    return any(number is not None for number in numbers) or any(texts)


def _launch(args: argparse.Namespace, config: Any) -> int:
    from gptworks.launch import supervise

    job = _job(args, config)
    if job.nodes.count > 1:
        print(_shared(config, job), flush=True)
    return supervise.run(job)


def _job(args: argparse.Namespace, config: Any) -> "Job":
    """What would be started here, after all checks."""
    from pathlib import Path

    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch is imported, which then says less of sockets
    from gptworks.launch.job import Job
    from gptworks.train import launch_checks, run_folder

    names = [field.name for field in fields(launch_checks.LaunchOptions)]
    asked = launch_checks.LaunchOptions(**{name: getattr(args, name) for name in names})
    machines, nproc = launch_checks.checked_launch(asked, config)
    log_dir = Path(args.log_dir) if args.log_dir else Path(config.run.out) / run_folder.LOGS
    command = ("-m", "gptworks", *args.argv)
    return Job(
        command,
        nproc,
        log_dir,
        machines,
        args.max_restarts,
        preload=PRELOAD,
        stopped_code=args.stopped_code,
    )


def _shared(config: Any, job: "Job") -> str:
    """Before several machines start: on which disks what must be."""
    data = ", ".join(config.data.path) or "the data"
    return (
        f"shared by all machines: {config.run.out} (checkpoints, metrics). The same on each, shared or copied: "
        f"{data}. May be local: {job.log_dir} (logs of the ranks)"
    )


def _resume_from(args: argparse.Namespace, config: Any) -> str:
    """After a restart by our launcher the run goes on from its own last checkpoint."""
    from pathlib import Path

    from gptworks.launch import rank_env

    if int(os.environ.get(rank_env.ATTEMPT, "0")) == 0:
        return str(args.resume)
    if args.resume in {"auto", "never"}:
        return "auto"
    from gptworks.checkpoint.folder import CheckpointFolder

    # Before its first own checkpoint it begins again with the one it was given.
    return "auto" if CheckpointFolder(Path(config.run.out)).latest() else str(args.resume)


def _enable_rdma(config: Any) -> None:
    from gptworks.launch import rank_env, rdma

    text = rdma.enable(_device(config))
    if rank_env.read(os.environ).rank == 0 and not rank_env.is_supervised(os.environ):
        print(text, flush=True)


def _device(config: Any) -> str:
    """The kind of device of the run; auto is what this machine has."""
    if config.run.device != "auto":
        return str(config.run.device)
    from gptworks.launch.devices import pick_device

    return pick_device("auto").type
