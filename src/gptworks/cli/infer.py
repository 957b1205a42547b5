"""gptworks infer: text from an exported folder, by the runtime it was exported for."""

import argparse

from gptworks.cli import generate, options

HELP = "text from an exported folder, by its own runtime, greedily"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="what `gptworks export` wrote")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to continue; repeatable; - = all of standard input"
    )
    source.add_argument(
        "--prompts", metavar="FILE", help='one prompt per line, or .jsonl with {"prompt": ...}; - = standard input'
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: 64, or as many as fit")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.export.infer import Inference

    model = Inference(args.folder)
    prompts = generate.prompts_of(args)
    if args.max_new_tokens is None:
        generate.tell_fewer(model, prompts, {})
    generate.show_all(model.generations(prompts, max_new_tokens=args.max_new_tokens), as_json=args.json)
    return 0
