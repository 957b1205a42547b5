"""gptworks eval: how well models predict text they have not seen."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.cli import options
from gptworks.errors import UsageError
from gptworks.evaluate.registry import DEFAULT, TASKS, find
from gptworks.evaluate.task import Option, Task

if TYPE_CHECKING:
    from gptworks.evaluate.progress import Watcher

HELP = ", ".join(task.title for task in TASKS.values())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_model_argument(parser, repeatable=True)
    options.add_model_options(parser)
    parser.add_argument("--task", choices=list(TASKS), default=DEFAULT, help="what to measure")
    parser.add_argument("--data", metavar="PATH", help=_by_task(lambda task: task.data))
    protocols = _by_task(lambda task: ", ".join(task.protocols))
    parser.add_argument("--protocol", default="", metavar="NAME", help=f"{protocols} (default: the first)")
    for task in TASKS.values():
        for option in task.options:
            _add_option(parser, task, option)
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the first N samples, windows or passages"
    )
    parser.add_argument(
        "--per-document",
        metavar="FILE",
        help="write a JSON line per document, window or passage; the same command goes on after an interruption",
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows per forward pass")
    published = ", ".join(task.name for task in TASKS.values() if task.published)
    parser.add_argument(
        "--published", action="store_true", help=f"{published}: show the figures that others published too"
    )
    parser.add_argument(
        "--log-style", choices=["gptworks", "fleetx"], default="gptworks", help="fleetx: the log lines of PaddleNLP"
    )
    options.add_weights_option(parser)
    options.add_device_option(parser)
    options.add_json_option(parser)


def _by_task(text_of: Callable[[Task], str]) -> str:
    return "; ".join(f"{task.name}: {text_of(task)}" for task in TASKS.values() if text_of(task))


def _add_option(parser: argparse.ArgumentParser, task: Task, option: Option) -> None:
    help_text = f"{task.name}: {option.help}"
    if option.default is False:
        parser.add_argument(option.flag, action="store_true", help=help_text)
    else:
        parser.add_argument(
            option.flag,
            type=option.parse,
            choices=option.choices,
            default=option.default,
            metavar=option.metavar,
            help=help_text,
        )


def run(args: argparse.Namespace) -> int:
    from gptworks.evaluate import report
    from gptworks.evaluate.request import Request
    from gptworks.evaluate.run import evaluate

    task, data = find(args.task), args.data
    settings: Mapping[str, Any] = {
        option.name: getattr(args, option.name) for each in TASKS.values() for option in each.options
    }
    if data is None:
        if task.own_data is None:
            raise UsageError(f"--data: not given. Needed: the file of --task {task.name}.")
        options.checkpoint_path(args.model[0])  # that it is not there comes before what it does not say
        data, settings = task.own_data(args.model[0], settings)
    request = Request(
        task=task.name,
        data=data,
        protocol=args.protocol,
        settings=settings,
        limit=args.limit,
        batch_size=args.batch_size,
        device=args.device,
        weights=args.weights,
        tokenizer=args.tokenizer,
        shape=options.stated_model(args.override),
        per_document=Path(args.per_document) if args.per_document else None,
        published=args.published,
    )
    watcher = _watcher(args, task)
    try:
        result = evaluate(args.model, request, watcher)
    except KeyboardInterrupt:
        if args.per_document:
            print(f"\nstopped; the same command goes on from {args.per_document}", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps(result))
    elif args.log_style == "fleetx":
        for row in result["rows"]:
            print(report.paddle_line(result, row))
    else:
        report.print_result(result)
    return 0


def _watcher(args: argparse.Namespace, task: Task) -> "Watcher":
    """What is seen while a model is measured."""
    from gptworks.evaluate import progress

    if args.log_style == "fleetx":
        if task.paddle is None:
            known = " and ".join(each.name for each in TASKS.values() if each.paddle)
            raise UsageError(f"--log-style fleetx: is for --task {known}, got --task {task.name}. Leave it out.")
        return progress.PaddleLines(task.paddle.metric, out=sys.stderr if args.json else None)
    return progress.Bar() if sys.stderr.isatty() else progress.Watcher()
