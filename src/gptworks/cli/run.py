"""gptworks run: a command of another system, as it was written."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
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
    parser.add_argument(
        "--dry-run", action="store_true", help="translate, and check what the run would check; run nothing"
    )


def add_translation_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="after --, exactly as written: a command, a whole block in quotes, a script, or - for standard input",
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], help="compute here, not on the device that the command names"
    )
    parser.add_argument("--shrink", choices=["tiny"], help="the same command on a model that a laptop can train")
    parser.add_argument("--cwd", type=Path, default=Path(), metavar="DIR", help="where the command is run")
    parser.add_argument("--strict", action="store_true", help="a setting that would be ignored is an error")


def run(args: argparse.Namespace) -> int:
    """Each command of the block in its turn, as long as they end well."""
    from gptworks.interop import pasted

    lines = read(args, "run")
    several = sum(line.command is not None for line in lines) > 1 or any(line.answer for line in lines)
    earlier: list[Translation] = []
    # Again, and not what was read before: which way a test goes may depend on the commands before it.
    for line in lines if args.dry_run else pasted.lines(*_shell_inputs(args), text=args.text):
        if several:
            print(f"{line.started.where}: {' '.join(_quoted(word) for word in line.started.words)}", flush=True)
        if line.answer:
            print(f"  {line.answer}\n", flush=True)
            if not args.dry_run:
                pasted.make_folders(line)
            continue
        code = _run_line(args, line, earlier)
        if code:
            return code
    return 0


def read(args: argparse.Namespace, verb: str) -> "list[Line]":
    """The lines of what was given, each checked to be of a known system, before any of them is run."""
    from gptworks.interop import pasted

    words = _shell_inputs(args)[0]
    args.text = sys.stdin.read() if words == [pasted.STDIN] else None
    if not words or (args.text is not None and not args.text.strip()):
        raise UsageError(f"{verb}: no command. Needed: gptworks {verb} -- COMMAND as it was written.")
    if not args.cwd.is_dir():
        raise UsageError(f"--cwd: {args.cwd} is not a folder.")
    try:
        lines = list(pasted.lines(*_shell_inputs(args), text=args.text))
        pasted.check(lines)
    except UsageError as error:
        raise UsageError(re.sub(r"^run: ", f"{verb}: ", str(error))) from None
    return lines


def _shell_inputs(args: argparse.Namespace) -> tuple[list[str], dict[str, str], Path]:
    words = list(args.command[1:]) if args.command[:1] == ["--"] else list(args.command)
    return words, dict(os.environ), args.cwd


def _run_line(args: argparse.Namespace, line: "Line", earlier: "list[Translation]") -> int:
    """`earlier`: the commands before it in the block, which may write what it reads."""
    from gptworks.interop import native_command
    from gptworks.interop.earlier_run import beside_earlier_runs, has_its_model, node_rank
    from gptworks.interop.their_words import in_their_words

    as_written = translated(args, line)
    folder = line.folder
    translation = beside_earlier_runs(as_written, folder)
    show(translation)
    arguments = native_command.command_line(translation)
    if args.dry_run:
        with in_their_words(translation):
            code = _dry_run(args, translation, folder, arguments, earlier)
        earlier.append(translation)
        return code
    if translation.config:
        _note(native_command.write_config(translation, folder / native_command.config_file(translation)))
    _print_command(arguments)
    from gptworks.cli.redirected import redirected
    from gptworks.interop import foreign_run, worker_logs

    with foreign_run.inside(folder, translation):
        with in_their_words(translation):
            number = node_rank(translation.arguments)
        is_first = number == 0  # machines share the folder of a run: one of them is enough
        if is_first and translation is not as_written and has_its_model(as_written):
            foreign_run.write_their_names(as_written)  # a run that was killed could not
        with redirected(line.started), in_their_words(translation), worker_logs.linked(translation, number):
            code = args.main(arguments[1:])
        if is_first:
            foreign_run.write_their_names(translation)
        return code


def _dry_run(
    args: argparse.Namespace,
    translation: "Translation",
    folder: Path,
    arguments: list[str],
    earlier: "Sequence[Translation]",
) -> int:
    """The checks of the run. Only the translated YAML is written, and not over one that was changed by hand."""
    import tempfile

    from gptworks.cli.rehearsal import rehearse
    from gptworks.config.load import from_dict
    from gptworks.interop import foreign_run, native_command

    with tempfile.TemporaryDirectory() as aside:
        words = list(arguments)
        if translation.config:
            name = native_command.config_file(translation)
            file = folder / name
            if native_command.is_edited(file):
                _note(f"{name} was changed by hand, and is left as it is")
                file = Path(aside) / name
                words[words.index("-c") + 1] = str(file)
            native_command.write_config(translation, file)
        _print_command(arguments)
        if translation.config:
            from_dict(translation.sections(), arguments[arguments.index("-c") + 1])
        awaited = native_command.awaited(translation, earlier, folder)
        if awaited:
            _note(f"{awaited} is not here yet: a command before this one writes it, so it is not looked into")
            return 0
        with foreign_run.inside(folder, translation):
            return rehearse(words[1:], args.parser, args.main)


def translated(args: argparse.Namespace, line: "Line", *, runs: bool = True) -> "Translation":
    """`runs`: it is to be run here."""
    from gptworks.interop import foreign_run

    try:
        translation, remarks = foreign_run.translate(line, _shell_inputs(args)[0])
    except UsageError as error:
        raise UsageError(re.sub(r"^run: ", f"{'run' if runs else 'translate'}: ", str(error))) from None
    return adapted_to(args, translation, remarks, folder=line.folder, runs=runs)


def adapted_to(
    args: argparse.Namespace, translation: "Translation", remarks: list[str], *, folder: Path, runs: bool
) -> "Translation":
    from gptworks.interop.adapt import adapted

    small = bool(args.shrink)
    return adapted(translation, remarks, device=args.device, shrink=small, strict=args.strict, folder=folder, runs=runs)


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


def _note(remark: str) -> None:
    if remark:
        print(f"note: {remark}")


def _print_command(words: list[str]) -> None:
    print(f"\n$ {' '.join(_quoted(word) for word in words)}\n", flush=True)


def _quoted(word: Any) -> str:
    import shlex

    return shlex.quote(str(word))
