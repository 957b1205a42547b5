"""gptworks launch: files for schedulers; rank tables, which say what runs where; a command in a container."""

import argparse
import sys
from pathlib import Path

from gptworks.cli import options, scheduler
from gptworks.errors import UsageError

SCHEDULERS = "Slurm, Kubernetes or SkyPilot"
HELP = f"a file for {SCHEDULERS}; a command in a container; rank tables"
_TABLES = ("make_rank_table", "merge_rank_tables", "show_rank_table")
_ACTIONS = ("to", *_TABLES, "image")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = parser.add_mutually_exclusive_group()
    names = "|".join(options.listed(SCHEDULERS.lower()))
    action.add_argument("--to", metavar=names, help="write a file that runs -c FILE there")
    action.add_argument(
        "--make-rank-table", metavar="[0,8]", help="write the table of this machine, for these devices (end excluded)"
    )
    action.add_argument(
        "--merge-rank-tables", nargs="+", metavar="FILE", help="merge the tables of several machines into one"
    )
    action.add_argument("--show-rank-table", metavar="FILE", help="print which machine has which ranks")
    parser.add_argument(
        "--image",
        metavar="IMAGE",
        help="run COMMAND in a container of this image (see Dockerfile); with --to: run the job in it",
    )
    parser.add_argument("overrides", nargs="*", metavar="COMMAND", help="after --; with --to: KEY=VALUE")
    scheduler.add_arguments(parser)
    inside = parser.add_argument_group("with --image")
    inside.add_argument(
        "--mount",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder that the container sees; repeatable",
    )
    inside.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the container's environment; repeatable",
    )
    inside.add_argument("--gpus", metavar="all|none|0,1", help="default: all, where there are any")
    inside.add_argument("--engine", choices=["docker", "podman"], help="default: whichever is there")
    inside.add_argument("--dry-run", action="store_true", help="print the command, run nothing")
    parser.add_argument("--server-ip", metavar="ADDR", help="address of this machine (default: as others reach it)")
    parser.add_argument("--device-ips", metavar="A,B", help="one address per device, where they have their own")
    parser.add_argument("--out", metavar="FILE", help="where to write (default: a name in this folder; - = print)")


def run(args: argparse.Namespace) -> int:
    if not any(getattr(args, action) for action in _ACTIONS):
        raise UsageError(
            "launch: nothing to do. Needed: --to SCHEDULER, --image IMAGE -- COMMAND, --make-rank-table, "
            "--merge-rank-tables or --show-rank-table."
        )
    if args.to:
        _refuse_inside(args, "not with --to.")
        return scheduler.run(args)
    scheduler.refuse_options(args)
    if args.image:
        _refuse_tables(args)
        return _in_container(args)
    from gptworks.launch import rank_table

    _refuse_inside(args, "only with --image.")
    if args.overrides:
        raise UsageError(f"{args.overrides[0]}: only with --image or --to.")
    for option, value in (("--server-ip", args.server_ip), ("--device-ips", args.device_ips)):
        if value and not args.make_rank_table:
            raise UsageError(f"{option}: only with --make-rank-table.")
    if args.show_rank_table:
        if args.out:
            raise UsageError("--out: nothing is written with --show-rank-table. Leave it out.")
        print(rank_table.describe(rank_table.read(Path(args.show_rank_table))))
        return 0
    if args.make_rank_table:
        devices = rank_table.parse_range(args.make_rank_table, "--make-rank-table")
        addresses = [text.strip() for text in args.device_ips.split(",")] if args.device_ips else []
        table = rank_table.make(devices, args.server_ip or _own_address(), addresses)
    else:
        table = rank_table.merge([rank_table.read(Path(file)) for file in args.merge_rank_tables])
    text = rank_table.dump(table)
    if args.out == "-":
        sys.stdout.write(text)
        return 0
    path = Path(args.out or rank_table.default_name(table))
    scheduler.write(path, text, force=True)
    print(f"{path}: {rank_table.describe(table)}")
    return 0


def _refuse_tables(args: argparse.Namespace) -> None:
    for action in _TABLES:
        if getattr(args, action):
            raise UsageError(f"--{action.replace('_', '-')}: not with --image.")


def _refuse_inside(args: argparse.Namespace, why: str) -> None:
    """Options of a container that is started here."""
    inside = {"--mount": args.mount, "--env": args.env, "--gpus": args.gpus, "--engine": args.engine}
    for option, value in (inside | {"--dry-run": args.dry_run}).items():
        if value:
            raise UsageError(f"{option}: {why}")


def _in_container(args: argparse.Namespace) -> int:
    import shlex
    import subprocess

    from gptworks.launch import container

    command = args.overrides
    if not command:
        raise UsageError("launch --image: no command. Needed: gptworks launch --image IMAGE -- COMMAND.")
    for option in ("server_ip", "device_ips", "out"):
        if getattr(args, option):
            raise UsageError(f"--{option.replace('_', '-')}: not with --image.")
    missing = [path for path in args.mount if not path.is_dir()]
    if missing:
        raise UsageError(f"--mount: {missing[0]} is not a folder.")
    engine = container.engine(args.engine, needed=not args.dry_run)
    words = container.Container(
        args.image,
        command,
        args.mount,
        args.env,
        args.gpus or container.usual_gpus(),
        has_terminal=container.has_terminal(),
    ).command_line(engine)
    print(shlex.join(words), flush=True)
    if args.dry_run:
        return 0
    return subprocess.run(words, check=False).returncode


def _own_address() -> str:
    """The address of the way out of this machine. Nothing is sent."""
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.connect(("192.0.2.1", 9))  # an address for documents, which nobody has
            return str(trial.getsockname()[0])
        except OSError:
            raise UsageError("--server-ip: this machine's address cannot be found out. Give it.") from None
