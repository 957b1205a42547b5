"""What `run --dry-run` does in the place of a command: it looks for what the command looks for, and stops there."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from gptworks.cli import generate, options


def rehearse(words: Sequence[str], parser: argparse.ArgumentParser, main: Callable[[Sequence[str]], int]) -> int:
    """`words`: of our command line, the verb first. An input that is missing is an error, as it would be in the run."""
    verb, *rest = words
    if verb == "train" or "--image" in rest:  # verbs that have a dry run of their own
        return main([verb, "--dry-run", *rest])
    args = parser.parse_args(words)
    if verb in _INPUTS:
        _INPUTS[verb](args)
    return 0


def _of_prepare(args: argparse.Namespace) -> None:
    from gptworks.data.text_files import list_inputs
    from gptworks.tokenizer import Tokenizer

    list_inputs(args.inputs, args.input_format)
    if args.vocab_file and args.merge_file:
        Tokenizer.from_files(args.vocab_file, args.merge_file)
    elif args.train_tokenizer is None:
        Tokenizer.from_pretrained(args.tokenizer or "gpt2")


def _of_generate(args: argparse.Namespace) -> None:
    from gptworks.launch.devices import pick_device

    if args.prompts and args.prompts != "-":
        generate.prompts_of(args)
    pick_device(args.device)
    _opened(args, args.model).require_tokenizer()


def _of_evaluation(args: argparse.Namespace) -> None:
    from gptworks.evaluate import registry
    from gptworks.launch.devices import pick_device

    task = registry.find(args.task)
    task.check_data(task, args.data)
    pick_device(args.device)
    for model in args.model:
        _opened(args, model)


def _of_inference(args: argparse.Namespace) -> None:
    from gptworks.export.infer import Inference

    Inference(args.folder)


def _of_conversion(args: argparse.Namespace) -> None:
    from gptworks.data.store import locate_stores

    if options.is_checkpoint(args.source, args.from_format, args.to):
        options.checkpoint_path(args.source)
    else:
        locate_stores(args.source)


def _of_export(args: argparse.Namespace) -> None:
    _opened(args, args.model)


def _of_rank_tables(args: argparse.Namespace) -> None:
    from pathlib import Path

    from gptworks.launch import rank_table

    for file in args.merge_rank_tables or []:
        rank_table.read(Path(file))


def _opened(args: argparse.Namespace, model: str) -> Any:
    from gptworks.checkpoint.pretrained import Pretrained

    return Pretrained.open(model, tokenizer=args.tokenizer, shape=options.stated_model(args.override))


_INPUTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "prepare": _of_prepare,
    "generate": _of_generate,
    "eval": _of_evaluation,
    "infer": _of_inference,
    "convert": _of_conversion,
    "export": _of_export,
    "launch": _of_rank_tables,
}
