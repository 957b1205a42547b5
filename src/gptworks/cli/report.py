"""gptworks report: one HTML page about one or several runs."""

import argparse
from pathlib import Path

from gptworks import run_paths

HELP = "a self-contained HTML page about one or several runs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a training run; several are compared")
    parser.add_argument("--out", metavar="FILE", help=f"default: {run_paths.REPORT} in the folder of the first run")


def run(args: argparse.Namespace) -> int:
    from gptworks.errors import UsageError
    from gptworks.report import page, run_data

    folders = [Path(name) for name in args.runs]
    runs = [run_data.read(folder, name) for folder, name in zip(folders, distinct_names(folders), strict=True)]
    out = Path(args.out) if args.out else folders[0] / run_paths.REPORT
    if out.is_dir():
        raise UsageError(f"--out: {out} is a folder. Needed: the name of a file, such as {out / run_paths.REPORT}.")
    if not out.parent.is_dir():
        why = f"{out.parent} is not a folder" if out.parent.exists() else f"there is no folder {out.parent}"
        raise UsageError(f"--out: {out}: {why}. Make it, or choose another place.")
    text = page.written(runs)
    if out.exists() and not out.is_file():  # a device or a pipe, such as /dev/stdout, which must stay what it is
        out.write_text(text, encoding="utf-8", errors="replace")
        return 0
    staged = out.with_name(f".{out.name}.new")
    try:
        staged.write_text(text, encoding="utf-8", errors="replace")
        staged.replace(out)  # a reader sees the old page or the new one
    finally:
        staged.unlink(missing_ok=True)
    print(f"report: {out}")
    return 0


def distinct_names(folders: list[Path]) -> list[str]:
    """The last part of each path; as much more of it as tells apart those that end alike."""
    wholes = [folder.resolve() for folder in folders]
    for length in range(1, max(len(whole.parts) for whole in wholes) + 1):
        names = ["/".join(whole.parts[-length:]) for whole in wholes]
        if len(set(names)) == len(set(wholes)):
            return names
    return [str(whole) for whole in wholes]
