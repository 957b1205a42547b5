"""gptworks run: a command of another system, as it was written."""

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.interop.notes import Note
    from gptworks.interop.pasted import Line
    from gptworks.interop.translation import Translation

HELP = "a command of another system, as it is: FleetX, PaddleNLP, OneFlow, MindFormers, Megatron, nanoGPT"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [options] -- COMMAND... | %(prog)s [options] SCRIPT.sh | %(prog)s [options] - < BLOCK"
    add_translation_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="translate and check; run nothing")


def add_translation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="after --, exactly as written: a command, a whole block in quotes, a script, or - for standard input",
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], help="instead of the device the command names")
    parser.add_argument("--shrink", choices=["tiny"], help="the same command on a model that a laptop can train")
    parser.add_argument("--cwd", type=Path, default=Path(), metavar="DIR", help="where the command is run")
    parser.add_argument("--strict", action="store_true", help="a setting that would be ignored is an error")


def run(args: argparse.Namespace) -> int:
    """Each command of the block in its turn, as long as they end well."""
    from gptworks.interop import pasted

    found = read(args, "run")
    several = sum(line.command is not None for line in found) > 1 or any(line.answer for line in found)
    # Again, and not what was found before: which way a test goes may depend on the commands before it.
    for line in found if args.dry_run else pasted.lines(*_given(args), text=args.text):
        if several:
            print(f"{line.started.where}: {' '.join(_quoted(word) for word in line.started.words)}", flush=True)
        if line.answer:
            print(f"  {line.answer}\n", flush=True)
            continue
        code = _run_line(args, line)
        if code:
            return code
    return 0


def read(args: argparse.Namespace, verb: str) -> "list[Line]":
    """The lines of what was given, each checked to be of a known system, before any of them is run."""
    from gptworks.interop import pasted

    words = _given(args)[0]
    args.text = sys.stdin.read() if words == [pasted.STDIN] else None
    if not words or (args.text is not None and not args.text.strip()):
        raise UsageError(f"{verb}: no command. Needed: gptworks {verb} -- COMMAND as it was written.")
    if not args.cwd.is_dir():
        raise UsageError(f"--cwd: {args.cwd} is not a folder.")
    try:
        found = list(pasted.lines(*_given(args), text=args.text))
        pasted.check(found)
    except UsageError as error:
        raise UsageError(re.sub(r"^run: ", f"{verb}: ", str(error))) from None
    return found


def _given(args: argparse.Namespace) -> tuple[list[str], dict[str, str], Path]:
    words = list(args.command[1:]) if args.command[:1] == ["--"] else list(args.command)
    return words, dict(os.environ), args.cwd


def _run_line(args: argparse.Namespace, line: "Line") -> int:
    from gptworks.interop.their_words import in_their_words

    as_written = translated(args, line)
    folder = line.folder
    translation = _beside_earlier_runs(as_written, folder)
    show(translation)
    arguments = native(translation, folder, keeps=args.dry_run)
    print(f"\n$ {' '.join(_quoted(word) for word in arguments)}\n", flush=True)
    if args.dry_run:
        if translation.config:
            from gptworks.config.load import from_dict

            with in_their_words(translation):
                from_dict(translation.sections(), arguments[arguments.index("-c") + 1])
        return 0
    from gptworks.cli.main import main
    from gptworks.cli.redirected import redirected
    from gptworks.interop import worker_logs

    here, before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    try:
        os.environ.update(translation.environment)
        node_rank = _node_rank(translation.arguments)
        is_first = node_rank == 0  # machines share the folder of a run: one of them is enough
        if is_first and translation is not as_written and _has_its_model(as_written):
            _write_their_names(as_written)  # a run that was killed could not
        with redirected(line.started), in_their_words(translation), worker_logs.linked(translation, node_rank):
            code = main(arguments[1:])
        if is_first:
            _write_their_names(translation)
        return code
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(before)


def translated(args: argparse.Namespace, line: "Line", *, runs: bool = True) -> "Translation":
    """`runs`: it is to be run here."""
    from dataclasses import replace

    from gptworks.interop import command_line, registry

    command = line.command
    assert command is not None
    files = registry.Files(line.folder)
    try:
        files.remarks += [*line.started.remarks, *command_line.emptied(_given(args)[0], command)]
        found = registry.of_command(command).translate(command, files)
    except UsageError as error:
        raise UsageError(re.sub(r"^run: ", f"{'run' if runs else 'translate'}: ", str(error))) from None
    found = replace(found, environment={**command.environment, **found.environment})  # NAME=value in front of it
    return adapted_to(args, found, files.remarks, folder=line.folder, runs=runs)


def adapted_to(
    args: argparse.Namespace, found: "Translation", remarks: list[str], *, folder: Path, runs: bool
) -> "Translation":
    from gptworks.interop.adapt import adapted

    small = bool(args.shrink)
    return adapted(found, remarks, device=args.device, shrink=small, strict=args.strict, folder=folder, runs=runs)


def _beside_earlier_runs(translation: "Translation", folder: Path) -> "Translation":
    """Other systems write over the run before; ours is kept, and the new one gets a folder of its own."""
    from dataclasses import replace

    out = str(translation.config.get("run.out", ""))
    resume = dict(zip(translation.arguments, translation.arguments[1:], strict=False)).get("--resume", "never")
    if not out or resume != "never" or not (folder / out / "environment.json").is_file():
        return translation
    earlier, number = Path(out), 2
    if earlier.name in ("", ".."):
        earlier = (folder / out).resolve()
    while (folder / earlier.with_name(f"{earlier.name}.{number}")).exists():
        number += 1
    free = earlier.with_name(f"{earlier.name}.{number}")
    remark = (
        f"{earlier} holds a run already, which this one would write over: it is {free} now. To go on with the earlier "
        f"one: gptworks train -c {earlier / 'config.yaml'} --out {earlier} --resume auto"
    )
    return replace(
        translation,
        config={**translation.config, "run.out": str(free)},
        after=[replace(each, path=_moved(each.path, earlier, free)) for each in translation.after],
        remarks=[*translation.remarks, remark],
    )


def _moved(path: str, earlier: Path, later: Path) -> str:
    inside = Path(path).is_relative_to(earlier)
    return str(later / Path(path).relative_to(earlier)) if inside else path


def show(translation: "Translation") -> None:
    """A line per setting of theirs: what it became, and why not where it did not."""
    count = len(translation.notes)
    print(f"{translation.system}: {count} setting{'' if count == 1 else 's'}")
    width = max((len(_setting(note)) for note in translation.notes), default=0)
    for note in translation.notes:
        became = f"-> {note.ours}" if note.ours else "ignored" if note.how == "ignored" else "the same here"
        why = f": {note.why}" if note.why and not note.ours else f"  ({note.why})" if note.why else ""
        print(f"  {_setting(note):<{min(width, 60)}}  {became}{why}")
    for remark in translation.remarks:
        print(f"note: {remark}")


def _setting(note: "Note") -> str:
    return f"{note.theirs} {note.value}" if note.value else note.theirs


def native(translation: "Translation", folder: Path, *, keeps: bool = False) -> list[str]:
    """Our command line. A configuration is written down first, where it can be looked at and used again.

    `keeps`: not if that would move one that was changed by hand.
    """
    if not translation.config:
        return ["gptworks", translation.verb, *translation.arguments]
    file = f"{Path(translation.program).stem or translation.system}.gptworks.yaml"
    _write_config(translation, folder / file, keeps)
    out = str(Path(str(translation.config["run.out"])))
    return ["gptworks", translation.verb, "-c", file, "--out", out, *translation.arguments]


def _write_config(translation: "Translation", file: Path, keeps: bool) -> None:
    """One that was changed by hand since we wrote it stays, under another name."""
    from contextlib import suppress

    from gptworks.interop.write_yaml import as_yaml

    if file.is_file() and not _is_as_written(file.read_text(encoding="utf-8", errors="replace")):
        if keeps:
            print(f"note: {file.name} was changed by hand, and is left as it is")
            return
        number = 1
        while (aside := file.with_name(f"{file.name}.edited-{number}")).exists():
            number += 1
        with suppress(FileNotFoundError):  # another machine was faster
            file.rename(aside)
            print(f"note: {file.name} was changed by hand; it is {aside.name} now. To run it: gptworks train -c FILE")
    part = file.with_name(f".{file.name}.{os.getpid()}")  # another machine may be writing, or reading, the same one
    text = as_yaml(translation)
    part.write_text(f"{text}{_SEAL}{_checksum(text)}\n", encoding="utf-8")
    part.replace(file)


_SEAL = "# by gptworks run, which keeps this file under another name if you change it: "


def _is_as_written(text: str) -> bool:
    body, seal, checksum = text.rpartition(_SEAL)
    return bool(seal) and checksum.strip() == _checksum(body)


def _checksum(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:16]


def _node_rank(arguments: list[str]) -> int:
    """Which of its machines this is, of a run."""
    from itertools import pairwise

    from gptworks.parallel import nodes

    given = dict(pairwise(arguments))
    options = {"nnodes": "--nnodes", "master": "--master", "node_ips": "--node-ips"}
    options |= {"table": "--rank-table", "ranks": "--rank-range"}
    rank = int(given["--node-rank"]) if "--node-rank" in given else None
    return nodes.solve(**{key: given.get(name, "") for key, name in options.items()}, node_rank=rank).rank


def _has_its_model(translation: "Translation") -> bool:
    """Whether the run in the folder of a command is one of the same command: as far as its checkpoints can tell."""
    from gptworks.config.load import from_dict, load
    from gptworks.errors import GPTWorksError

    try:
        earlier = load(Path(str(translation.config["run.out"])) / "config.yaml")
        return earlier.model == from_dict(translation.sections()).model
    except GPTWorksError:
        return False


def _write_their_names(translation: "Translation") -> None:
    if translation.after:
        from gptworks.interop import foreign_names

        for after in translation.after:
            foreign_names.write(after, Path(str(translation.config["run.out"])))


def _quoted(word: Any) -> str:
    import shlex

    return shlex.quote(str(word))
