"""gptworks plot: the loss curve of a run."""

import argparse
import sys
from pathlib import Path

HELP = "the loss curve of a run, in the terminal and as SVG"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="folder of a training run")


def run(args: argparse.Namespace) -> int:
    from gptworks.errors import UsageError
    from gptworks.train import metrics, plot

    folder = Path(args.run_folder)
    try:
        next(folder.iterdir(), None)  # or an OSError that says why not
    except FileNotFoundError:
        raise UsageError(f"{folder}: no such folder. Needed: the folder of a training run.") from None
    if not plot.curves(folder):
        raise UsageError(f"{folder / metrics.NAME}: no losses there yet. Needed: the folder of a training run.")
    num_unreadable = metrics.num_unreadable(folder)
    if num_unreadable:
        lines = (
            "1 line that cannot be read is"
            if num_unreadable == 1
            else f"{num_unreadable} lines that cannot be read are"
        )
        print(f"{folder / metrics.NAME}: {lines} left out", file=sys.stderr)
    plot.write(folder)
    print(plot.text(folder))
    print(f"picture: {folder / plot.NAME}")
    return 0
