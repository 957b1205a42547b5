"""gptworks VERB ... : finds the verb, runs it, turns our errors into exit codes."""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from gptworks import __version__, file_errors
from gptworks.cli import (
    completion,
    config,
    convert,
    doctor,
    evaluate,
    export,
    generate,
    infer,
    inspect,
    launch,
    plan,
    plot,
    prepare,
    report,
    run,
    serve,
    train,
    translate,
    verify,
    watch,
)
from gptworks.cli.options import take_models
from gptworks.errors import GPTWorksError
from gptworks.python_words import command_line

# Each module has HELP, add_arguments(parser) and run(args); none of them imports torch or pydantic before run().
VERBS = {
    "prepare": prepare,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "serve": serve,
    "convert": convert,
    "export": export,
    "infer": infer,
    "inspect": inspect,
    "verify": verify,
    "run": run,
    "translate": translate,
    "plan": plan,
    "doctor": doctor,
    "plot": plot,
    "report": report,
    "watch": watch,
    "config": config,
    "launch": launch,
    "completion": completion,
}

# What other tools, or people, call them.
_OTHER_VERBS = {
    "evaluate": "eval",
    "test": "eval",
    "sample": "generate",
    "predict": "generate",
    "chat": "generate --interactive",
    "pretrain": "train",
    "finetune": "train",
    "tokenize": "prepare",
    "preprocess": "prepare",
    "download": "generate --download",
    "help": "--help",
    "presets": "config presets",
    "show": "config show",
}
# What argparse says, in our words.
_SAID_PLAINLY = {
    "one of the arguments --prompt --prompts --interactive is required": (
        "no prompt. Needed: --prompt TEXT, --prompts FILE or --interactive."
    ),
    "argument --resume: expected one argument": (
        "argument --resume: no value. Needed: --resume auto, or the folder of a checkpoint."
    ),
}
# Values of options.
_OTHER_VALUES = {
    "gpu": "cuda",
    "list": "presets",
    "greedy_search": "greedy",
    "sample": "sampling",
    "beam_search": "beam",
}
# Options of other tools that are an option with a value here; {} is their value.
_OTHER_OPTIONS = {
    "train": {
        "model": "--preset {} for fresh weights, init.checkpoint={} to go on from some",
        "bf16": "precision.compute=bf16",
        "fp16": "precision.compute=fp16",
        "gpu": "--device cuda",
        "cpu": "--device cpu",
        "cuda": "--device cuda",
        "no-cuda": "--device cpu",
        "train": "data.path={}",
    },
    "prepare": {
        "vocab-size": "--train-tokenizer {}",
        "output": "--out",
        "output-dir": "--out",
        "output-prefix": "--out",
        "output-path": "--out",
        "input": "{} alone, without an option",
        "input-dir": "{} alone, without an option",
        "data": "{} alone, without an option",
    },
    "generate": {
        "gpu": "--device cuda",
        "cpu": "--device cpu",
        "text": "--prompt {}",
        "input": "--prompt {}",
        "num-tokens": "--max-new-tokens {}",
        "checkpoint": "--model {}",
        "ckpt": "--model {}",
    },
    "eval": {"gpu": "--device cuda", "cpu": "--device cpu", "checkpoint": "--model {}", "ckpt": "--model {}"},
}
_READS_MODELS = {"train", "eval", "generate", "serve", "export", "run"}


class _Refused(Exception):
    """What argparse says of a command line, before it has been said."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(self.prog, message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gptworks", description="One toolkit for the whole life of a GPT model.")
    parser.add_argument("--version", action="version", version=f"gptworks {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, module in VERBS.items():
        # No abbreviations: --length would be --length-penalty, whatever was meant.
        verb = verbs.add_parser(name, help=module.HELP, description=module.HELP, allow_abbrev=False)
        module.add_arguments(verb)
        if name in _READS_MODELS:
            verb.add_argument(
                "--download",
                action="store_true",
                help="fetch a model that is given by name from the hub, if it is not here",
            )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    with command_line():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    parser = build_parser()
    words = list(sys.argv[1:] if argv is None else argv)
    _refuse_unknown_verb(parser, words)
    try:
        args, left = parser.parse_known_args(words)
    except _Refused as refused:
        _refuse(parser, words, *refused.args)
    try:
        left = take_models(args, left)
    except GPTWorksError as error:
        parser.exit(error.exit_code, f"error: {error}\n")
    # argparse takes bare KEY=VALUE arguments from one place only; people put them before and after options.
    if hasattr(args, "overrides") and not any(text.startswith("-") for text in left):
        args.overrides += left
    elif left:
        _unknown(parser, args.verb, left, words, takes_settings=hasattr(args, "overrides"))
    args.parser, args.main = parser, main  # `run` runs other verbs
    args.argv = words
    if getattr(args, "download", False):
        os.environ["GPTWORKS_DOWNLOAD"] = "1"  # asked for wherever a name is looked up
    try:
        code = int(VERBS[args.verb].run(args))
        sys.stdout.flush()  # here, where a closed pipe is answered, not when the interpreter ends
        return code
    except GPTWorksError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of a pipe went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        message = file_errors.explain(error)
        if not message:
            return _own_fault()
        print(f"error: {message}", file=sys.stderr)
        return 2
    except Exception:
        return _own_fault()


def _refuse_unknown_verb(parser: argparse.ArgumentParser, argv: list[str]) -> None:
    """Ends the program, with the verb that may be meant."""
    import difflib

    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    first = argv[0]
    if first in VERBS or not first or first.startswith("-"):
        return
    spelled = difflib.get_close_matches(first.lower(), [*VERBS, *_OTHER_VERBS], 1, 0.6)
    near = _OTHER_VERBS.get(spelled[0], spelled[0]) if spelled else ""
    hint = f"; did you mean {near}?" if near else "."
    parser.exit(2, f"error: unknown command {first}{hint} Commands: {', '.join(VERBS)}.\n")


def _refuse(parser: argparse.ArgumentParser, argv: list[str], prog: str, message: str) -> NoReturn:
    """Ends the program in one line; the options are a screen of --help. An unknown option comes before a missing one,
    which it may stand for."""
    verb = prog.partition(" ")[2]
    if verb in VERBS and "required" in message:
        known = completion.options_of(parser, verb)
        words = [word for word in argv[1:] if word.startswith("--") and " " not in word]
        if unknown := [word for word in words if word != "--" and word.partition("=")[0] not in known]:
            _unknown(parser, verb, unknown, argv, takes_settings=completion.takes_settings(parser, verb))
    message = _SAID_PLAINLY.get(message, message)
    near = next((ours for theirs, ours in _OTHER_VALUES.items() if f"invalid choice: '{theirs}'" in message), "")
    hint = f"; did you mean {near}?" if near else "" if message.endswith(".") else "."
    about = f"{verb}: " if verb else ""
    parser.exit(2, f"error: {about}{message}{hint} `{prog} --help` lists what there is.\n")


def _unknown(
    parser: argparse.ArgumentParser, verb: str, left: list[str], argv: list[str], *, takes_settings: bool
) -> NoReturn:
    """Ends the program, with the options or settings that there are instead: by their meaning, then by spelling."""
    options = [word for word in left if word.startswith("-") and not _is_number(word)] or left[:1]
    known = completion.options_of(parser, verb)
    near_of = [
        (option, _meant_by(option, verb, argv, known, takes_settings=takes_settings))
        for option in dict.fromkeys(options)
    ]
    lines = [f"{option}" + (f"; did you mean {' or '.join(near)}?" if near else "") for option, near in near_of]
    count = "unknown argument" if len(lines) == 1 else f"{len(lines)} unknown arguments"
    listed = f" {lines[0]}" if len(lines) == 1 else "".join(f"\n  {each}" for each in lines)
    has_all = all(near for _, near in near_of)
    more = f"`gptworks {verb} --help` lists what there is."
    end = "" if has_all else f". {more}" if len(lines) == 1 else f"\n{more}"
    parser.exit(2, f"error: {verb}: {count}{listed}{end}\n")


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _meant_by(option: str, verb: str, argv: list[str], known: list[str], *, takes_settings: bool) -> list[str]:
    import difflib

    name = option.partition("=")[0].replace("_", "-")
    if other := _OTHER_OPTIONS.get(verb, {}).get(name.lstrip("-")):
        return [other.replace("{}", _value_of(option, argv))]
    near = _by_meaning(option, argv, known, takes_settings=takes_settings)
    return near or difflib.get_close_matches(name, known, 1, 0.7)


def _value_of(option: str, argv: list[str]) -> str:
    """That was given with it, or VALUE."""
    after = argv[argv.index(option) + 1 : argv.index(option) + 2]
    is_value = after and not after[0].startswith("-") and "=" not in after[0]
    return option.partition("=")[2] or (after[0] if is_value else "VALUE")


def _by_meaning(option: str, argv: list[str], known: list[str], *, takes_settings: bool) -> list[str]:
    """Such as optim.lr=1e-3 for --lr 1e-3."""
    if not option.startswith("-"):
        return []
    from gptworks.config import other_names
    from gptworks.config.load import known_keys

    name, value = option.partition("=")[0], _value_of(option, argv)
    last = name.lstrip("-").replace("-", "_").rpartition(".")[2]
    keys = [key for key in known_keys() if key.rpartition(".")[2] == last and not key.startswith("generate.")]
    keys = keys or list(other_names.find(name))
    options = [
        option for key in keys if (option := "--" + key.rpartition(".")[2].replace("_", "-").lstrip("-")) in known
    ]
    if options:
        return options[:1]
    return [f"{key}={value}" for key in keys] if takes_settings else []


def _own_fault() -> int:
    traceback.print_exc()
    print("\nThis is a fault of gptworks, not of your input. Please report it with the lines above.", file=sys.stderr)
    return 1
