"""gptworks watch: runs that go on, in the terminal or as a page that renews itself."""

import argparse
from pathlib import Path

HELP = "runs while they train: in the terminal, or with --port as a page that renews itself"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a training run; several stand side by side")
    parser.add_argument("--every", metavar="SECONDS", type=float, default=2.0, help="how often to look (default: 2)")
    parser.add_argument("--once", action="store_true", help="show it once and end")
    parser.add_argument("--port", metavar="N", type=int, help="serve it as a page; 0 = any free port")
    parser.add_argument("--host", metavar="ADDRESS", default="127.0.0.1", help="default: 127.0.0.1, this machine only")


def run(args: argparse.Namespace) -> int:
    import time

    from rich.console import Console
    from rich.live import Live

    from gptworks.cli.report import distinct_names
    from gptworks.errors import UsageError
    from gptworks.report import live

    if not 0.1 <= args.every <= 86400:
        raise UsageError(f"--every: got {args.every:g}; needed: seconds, from 0.1 to 86400.")
    if args.port is not None and not 0 <= args.port <= 65535:
        raise UsageError(f"--port: got {args.port}; needed: 0 to 65535.")
    if args.port is not None and args.once:
        raise UsageError("--once: not with --port, which serves until it is ended. `gptworks report` writes a page.")
    folders = [Path(name) for name in args.runs]
    followed = [live.Followed(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True)]
    console = Console()
    try:
        if args.port is not None:
            live.serve(followed, args.host, args.port, args.every, lambda text: print(text, flush=True))
        elif args.once or not console.is_terminal:
            console.print(live.drawn(followed, console.width))
        else:
            with Live(live.drawn(followed, console.width), console=console, auto_refresh=False) as screen:
                while True:
                    time.sleep(args.every)
                    for each in followed:
                        each.renew()
                    screen.update(live.drawn(followed, console.width), refresh=True)
    except KeyboardInterrupt:
        pass  # the usual way to end it
    return 0
