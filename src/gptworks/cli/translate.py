"""gptworks translate: what a command or YAML of another system means in our words, printed as our YAML."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from gptworks.cli import options
from gptworks.cli import run as running
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.interop.translation import Translation

HELP = "a command or YAML of another system as our configuration, or ours as theirs"
SYSTEMS = "megatron, fleetx, mindformers or paddlenlp"  # as in interop/reverse.py; a test compares them


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s FILE.yaml | %(prog)s -- COMMAND... | %(prog)s --to SYSTEM FILE.yaml"
    running.add_translation_options(parser)
    parser.add_argument("--to", metavar="SYSTEM", help=f"the other way round: {SYSTEMS}")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if len(words) > 1 and words is args.command and _is_file(words[0], args.cwd) and words[1].startswith("-"):
        parser = argparse.ArgumentParser(prog="gptworks translate")  # options behind the file
        add_arguments(parser)
        return run(parser.parse_args([*words[1:], words[0]], args))
    if args.to:
        from gptworks.interop.reverse import to_foreign

        if len(words) != 1:
            raise UsageError("translate --to: needs one file, a configuration of ours.")
        print(to_foreign(args.to, Path(words[0])), end="")
        return 0
    if len(words) == 1 and _is_file(words[0], args.cwd):
        from gptworks.interop import registry

        files = registry.Files(args.cwd)
        path = files(words[0])
        translation = running.adapted_to(
            args, registry.of_yaml(path).translate_yaml(path), files.remarks, folder=args.cwd, runs=False
        )
        translations = [translation]
    else:
        lines = [line for line in running.read(args, "translate") if line.command]
        translations = [running.translated(args, line, runs=False) for line in lines]
    for number, translation in enumerate(translations):
        if number and not args.json:
            print("---")
        _show(translation, as_json=args.json)
    return 0


def _show(translation: "Translation", *, as_json: bool) -> None:
    if as_json:
        values = {
            "system": translation.system,
            "verb": translation.verb,
            "config": translation.sections(),
            "arguments": translation.arguments,
            "notes": [vars(note) for note in translation.notes],
            "remarks": translation.remarks,
        }
        print(json.dumps(values))
        return
    from gptworks.interop.write_yaml import as_yaml

    print(as_yaml(translation), end="")


def _is_file(word: str, folder: Path) -> bool:
    """Not a command in one word, which may end in a file's name as well."""
    return Path(word).suffix in (".yaml", ".yml") and (" " not in word.strip() or Path(folder, word).is_file())
