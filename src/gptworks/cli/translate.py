"""gptworks translate: what a command or YAML of another system means in our words, printed as our YAML."""

import argparse
import json
from pathlib import Path

from gptworks.cli import options
from gptworks.cli import run as running
from gptworks.errors import UsageError

HELP = "a command or YAML of another system as our configuration, or ours as theirs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s FILE.yaml | %(prog)s -- COMMAND... | %(prog)s --to SYSTEM FILE.yaml"
    running.add_translation_options(parser)
    parser.add_argument("--to", metavar="SYSTEM", help="the reverse: megatron, fleetx, mindformers or paddlenlp")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    words = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.to:
        from gptworks.interop.reverse import to_foreign

        if len(words) != 1:
            raise UsageError("translate --to: needs one file, a configuration of ours.")
        print(to_foreign(args.to, Path(words[0])), end="")
        return 0
    if len(words) == 1 and Path(args.cwd, words[0]).suffix in (".yaml", ".yml"):
        from gptworks.interop import registry
        from gptworks.interop.adapt import adapted

        path = Path(args.cwd, words[0])
        found = registry.of_yaml(path).translate_yaml(path)
        translation = adapted(
            found, [], device=args.device, shrink=bool(args.shrink), strict=args.strict, folder=args.cwd
        )
    else:
        translation = running.translated(args)
    if args.json:
        values = {
            "system": translation.system,
            "verb": translation.verb,
            "config": translation.sections(),
            "arguments": translation.arguments,
            "notes": [vars(note) for note in translation.notes],
            "remarks": translation.remarks,
        }
        print(json.dumps(values))
        return 0
    from gptworks.interop.write_yaml import as_yaml

    print(as_yaml(translation), end="")
    return 0
