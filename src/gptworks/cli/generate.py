"""gptworks generate: text from a checkpoint."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gptworks.cli import options
from gptworks.cli.generate_output import show_stream, tell_fewer
from gptworks.python_words import in_option_words

HELP = "text from a checkpoint"

# key of the generate section -> (kind, metavar, help); what is not given comes from the run, else from the schema.
_SETTINGS: dict[str, tuple[Any, str, str]] = {
    "strategy": (("greedy", "sampling", "beam"), "", "how tokens are chosen (default: the run's, else sampling)"),
    "max_new_tokens": (int, "N", "default: the run's, else 64, or as many as fit the context"),
    "min_new_tokens": (int, "N", "no end of document before N new tokens"),
    "temperature": (float, "X", "logits are divided by this (default: the run's, else 1)"),
    "top_k": (int, "K", "keep the K likeliest tokens; 0 = all"),
    "top_p": (float, "P", "keep the likeliest tokens up to this probability mass"),
    "min_p": (float, "P", "keep tokens at least P times as likely as the likeliest"),
    "typical_p": (float, "P", "keep the tokens of most typical surprise up to this mass"),
    "repetition_penalty": (float, "X", "above 1 = fewer tokens that stand in prompt or text already"),
    "presence_penalty": (float, "X", "subtracted from the logit of each token generated so far"),
    "frequency_penalty": (float, "X", "subtracted once for each time a token was generated"),
    "no_repeat_ngram": (int, "N", "no sequence of N tokens twice"),
    "logit_bias": (list, "ID:BIAS", "added to the logit of a token, such as 198:-2.5; repeatable"),
    "stop": (list, "TEXT", "text that ends the generation; repeatable"),
    "ignore_eod": (bool, "", "go on after an end of document"),
    "num_return_sequences": (int, "N", "texts per prompt"),
    "best_of": (int, "N", "draw N, keep the likeliest"),
    "num_beams": (int, "N", "beams of strategy beam"),
    "length_penalty": (float, "X", "beam scores are divided by length to this power"),
    "early_stopping": (("true", "false", "never"), "", "when a beam search ends"),
    "num_beam_groups": (int, "N", "groups of beams that avoid each other"),
    "diversity_penalty": (float, "X", "how strongly groups avoid each other"),
    "rules": (("huggingface", "paddle", "mindformers"), "", "apply the settings in the order of this system"),
    "speculate": (str, "ngram|DIR", "read guessed tokens ahead: from the text itself, or by a smaller model"),
    "window": (("refuse", "slide"), "", "text beyond the model's context: refuse it, or forget its beginning"),
    "seed": (int, "N", "seed of the random draws (default: the run's, else a new one each time, which is shown)"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s (--model DIR | --server URL) (--prompt TEXT | --prompts FILE | --interactive) [options]"
    options.add_model_argument(parser)
    parser.add_argument(
        "--server", metavar="URL", help="ask `gptworks serve` at this address; --model is then a name there"
    )
    options.add_model_options(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", metavar="TEXT", action="append", help="text to continue; repeatable; - = all of standard input"
    )
    source.add_argument(
        "--prompts", metavar="FILE", help='one prompt per line, or .jsonl with {"prompt": ...}; - = standard input'
    )
    source.add_argument("--interactive", action="store_true", help="type prompts, change settings; /help tells how")
    for name, (kind, metavar, about) in _SETTINGS.items():
        _add_setting(parser, "--" + name.replace("_", "-"), kind, metavar, about)
    parser.add_argument(
        "--stream",
        action="store_true",
        help="show tokens as they appear (a single text in a terminal always appears so)",
    )
    parser.add_argument(
        "--engine",
        choices=["gptworks", "llama.cpp"],
        help="what computes (default: llama.cpp for a .gguf file, else gptworks)",
    )
    parser.add_argument(
        "--log-style",
        choices=["gptworks", "fleetx"],
        default="gptworks",
        help="fleetx: Prompt and Generation before the texts, as FleetX prints them",
    )
    options.add_weights_option(parser)
    options.add_device_option(parser)
    options.add_json_option(parser)


def _add_setting(parser: argparse.ArgumentParser, option: str, kind: Any, metavar: str, about: str) -> None:
    if kind is bool:
        parser.add_argument(option, action=argparse.BooleanOptionalAction, default=None, help=about)
    elif kind is list:
        parser.add_argument(option, action="append", metavar=metavar, help=about)
    elif isinstance(kind, tuple):
        parser.add_argument(option, choices=kind, help=about)
    else:
        parser.add_argument(option, type=kind, metavar=metavar, help=about)


def run(args: argparse.Namespace) -> int:
    with in_option_words(_SETTINGS):
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    from gptworks.checkpoint import folder
    from gptworks.errors import UsageError
    from gptworks.generate.engine import can_stream, drawing_anew, settings_of

    is_run = args.server is None and not _is_gguf(args)
    settings = (_settings_of_run(folder.config_of(Path(args.model))) if is_run else {}) | _explicit_settings(args)
    is_seed_given = "seed" in settings
    settings = drawing_anew(settings)
    cfg = settings_of(settings)
    prompts = [] if args.interactive else prompts_of(args)
    if args.interactive and args.json:
        raise UsageError("--json: not with --interactive, whose answers are for people. Leave one of them out.")
    wants_stream = _wants_stream(args, len(prompts), can_stream(cfg))
    engine = _engine(args)
    if args.interactive:
        from gptworks.cli.interactive import converse

        if not is_seed_given:
            print(f"note: the seed was drawn at random; --seed {cfg.seed} repeats these answers", file=sys.stderr)
        return converse(engine, settings)
    tell_fewer(engine, prompts, settings)
    if not is_seed_given and cfg.strategy == "sampling" and not args.json:  # whose objects have it
        print(f"note: the seed was drawn at random; --seed {cfg.seed} repeats this text", file=sys.stderr)
    if wants_stream:
        show_stream(engine, prompts[0], settings)
        return 0
    show_all(engine.generations(prompts, **settings), as_json=args.json, style=args.log_style)
    return 0


def _settings_of_run(config: dict[str, Any]) -> dict[str, Any]:
    """What the configuration of a run, which has every default, says of its own about generation."""
    from gptworks.config.schema import GenerateConfig

    usual = GenerateConfig().model_dump(mode="json")
    return {key: value for key, value in config.get("generate", {}).items() if value != usual.get(key)}


# options that say how a model is opened -> what they are when nobody gave them
_OF_OPENING: dict[str, Any] = {"weights": "fp32", "device": "auto", "tokenizer": None, "override": [], "engine": None}


def _require_no_opening(args: argparse.Namespace) -> None:
    """A server has opened its models already."""
    from gptworks.errors import UsageError

    for name, usual in _OF_OPENING.items():
        if (value := getattr(args, name)) != usual:
            text = value[0] if isinstance(value, list) else value
            raise UsageError(
                f"--{name} {text}: not with --server, whose models are opened there. Give it to `gptworks serve`, or "
                "leave one of them out."
            )


def _engine(args: argparse.Namespace) -> Any:
    if args.server is not None:
        from gptworks.generate.remote import RemoteEngine

        _require_no_opening(args)
        return RemoteEngine(args.server, args.model)
    if _is_gguf(args):
        from gptworks.errors import UsageError
        from gptworks.generate.llama_cpp import LlamaCpp

        if args.weights != "fp32":
            raise UsageError(f"--weights {args.weights}: a GGUF file says itself how its matrices are kept.")
        return LlamaCpp(Path(args.model))
    from gptworks.checkpoint.pretrained import Pretrained, PretrainedGPT
    from gptworks.generate import fast_decode
    from gptworks.generate.engine import NativeEngine

    stated: dict[str, Any] = {"tokenizer": args.tokenizer, "shape": options.stated_model(args.override)}
    Pretrained.open(args.model, **stated).require_tokenizer()
    model = PretrainedGPT.from_pretrained(args.model, device=args.device, weights=args.weights, **stated)
    reason = fast_decode.why_not(model.cfg) if model.device.type == "cpu" else None
    if reason and fast_decode.OFF not in reason:
        print(f"note: torch computes alone, which is slower: {reason}", file=sys.stderr)
    return NativeEngine(model)


def _is_gguf(args: argparse.Namespace) -> bool:
    if args.engine is None:
        return bool(args.model.lower().endswith(".gguf"))
    return bool(args.engine == "llama.cpp")


def _explicit_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings = {name: getattr(args, name) for name in _SETTINGS if getattr(args, name) is not None}
    if "early_stopping" in settings:
        settings["early_stopping"] = {"true": True, "false": False}.get(settings["early_stopping"], "never")
    return settings


def _wants_stream(args: argparse.Namespace, num_prompts: int, can_stream: bool) -> bool:
    from gptworks.errors import UsageError

    is_possible = can_stream and num_prompts == 1 and not args.json and args.log_style == "gptworks"
    if args.stream and not is_possible and not args.interactive:
        raise UsageError(
            "--stream: needs one prompt with one text of strategy greedy or sampling, no --json and no --log-style. "
            "Leave --stream out."
        )
    return is_possible and (args.stream or sys.stdout.isatty())


def show_all(generations: Iterable[Any], *, as_json: bool, style: str = "gptworks") -> None:
    for number, generation in enumerate(generations):
        if as_json:
            print(json.dumps(dataclasses.asdict(generation), ensure_ascii=False))
            continue
        if style == "fleetx":
            print(f"Prompt: {generation.prompt}\nGeneration: {generation.prompt + generation.text}")
            continue
        if number:
            print("---")
        print(generation.prompt + generation.text)


def prompts_of(args: argparse.Namespace) -> list[str]:
    if args.prompt:
        return [_standard_input() if prompt == "-" else prompt for prompt in args.prompt]
    return _read_prompts(args.prompts)


def _standard_input() -> str:
    from gptworks.errors import UsageError

    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input: cannot be read ({error}). Needed: UTF-8 text.") from None


def _read_prompts(name: str) -> list[str]:
    from gptworks.errors import UsageError

    needed = "one prompt per line" if not name.endswith(".jsonl") else 'one {"prompt": "..."} per line'
    try:
        text = _standard_input() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise UsageError(f"{name}: cannot be read ({error}). Needed: a UTF-8 text file with {needed}.") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise UsageError(f"{'standard input' if name == '-' else name}: no prompt in it. Needed: {needed}.")
    is_jsonl = name.endswith(".jsonl") or (name == "-" and all(_is_prompt(line) for _, line in lines))
    if not is_jsonl:
        return [line.removesuffix("\r") for _, line in lines]
    return [_prompt_of(line, f"{name}, line {number}") for number, line in lines]


def _is_prompt(line: str) -> bool:
    """Whether a line of standard input, which has no name that ends in .jsonl, is meant as one."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(row, dict) and "prompt" in row


def _prompt_of(line: str, where: str) -> str:
    from gptworks.errors import UsageError

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f'{where}: not JSON ({error}). Needed: {{"prompt": "..."}}.') from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UsageError(f'{where}: got {line.strip()[:80]}; needed an object with a text "prompt".')
    return str(row["prompt"])
