"""gptworks inspect: what is this checkpoint or dataset?"""

import argparse
import json
from typing import TYPE_CHECKING

from gptworks.cli import options
from gptworks.counted import counted
from gptworks.errors import UsageError

if TYPE_CHECKING:
    from gptworks.checkpoint.inspect import Report as WeightsReport
    from gptworks.data.inspect import Report

HELP = "what a checkpoint or dataset is: system, size, tensors; format, documents, problems"
_BAR = 40
_SAMPLES_SHOWN, _TEXT_SHOWN = 3, 160  # of an event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="a checkpoint or run, or prefix, file or folder of a dataset")
    parser.add_argument("--from", dest="from_format", metavar="FORMAT", help="what it is, when several fit")
    parser.add_argument(
        "-o", "--override", metavar="KEY=VALUE", action="append", default=[],
        help="what a checkpoint does not carry, such as model.num_heads=16",
    )  # fmt: skip
    parser.add_argument(
        "--events", action="store_true", help="of a run: the steps that train.guard found bad, and their samples"
    )
    parser.add_argument("--tokenizer", metavar="NAME", help="tokenizer to decode with, when the dataset names none")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if args.events:
        return _inspect_events(args)
    if options.is_checkpoint(args.path, args.from_format):
        return _inspect_weights(args)
    return _inspect_dataset(args)


def _inspect_events(args: argparse.Namespace) -> int:
    from pathlib import Path

    from gptworks import run_paths
    from gptworks.train import event_file

    run_folder = run_paths.run_of(Path(args.path))
    if not (run_folder / run_paths.CONFIG).is_file():
        raise UsageError(f"--events: {args.path} is not the folder of a run ({run_paths.CONFIG} is missing).")
    events = event_file.read(run_folder)
    if args.json:
        print(json.dumps(events))
        return 0
    if not events:
        print(f"{run_folder}: no events. train.guard.action (off by default) watches for bad steps.")
    for event in events:
        print(event_file.in_words(event))
        for sample in event_file.read_samples(run_folder, event)[:_SAMPLES_SHOWN]:
            text = "".join(piece["text"] or "" for piece in sample["pieces"])
            loss = f"{value:.4f}" if isinstance(value := sample.get("loss"), float) else value
            print(f"  loss {loss}  sample {sample['sample']}  {event_file.where(sample)}")
            if text:
                print(f"    {text[:_TEXT_SHOWN]!r}{'...' if len(text) > _TEXT_SHOWN else ''}")
    return 0


def _inspect_weights(args: argparse.Namespace) -> int:
    from gptworks.checkpoint.inspect import inspect

    if args.tokenizer is not None:
        raise UsageError(f"--tokenizer: {args.path} is a checkpoint; the option is for datasets.")
    overrides = options.stated_model(args.override)
    report = inspect(options.checkpoint_path(args.path), overrides, name=args.from_format)
    if args.json:
        print(json.dumps(report.as_dict()))
    else:
        _print_weights(report)
    return 0


def _print_weights(report: "WeightsReport") -> None:
    from gptworks import architecture

    facts, model = report.as_dict(), report.opened.model
    print(f"{facts['path']}: {facts['system']} ({facts['title']})")
    heads = f"{model.num_heads} heads" if report.heads_known else "heads not stored (-o model.num_heads=N converts it)"
    if model.num_kv_heads != model.num_heads:
        heads += f" ({model.num_kv_heads} of keys and values)"
    print(
        f"model: {model.num_layers} layers of {model.hidden_size}, {heads}, feed-forward {model.ffn_size:,}, "
        f"vocabulary {model.vocab_size:,}, {model.max_positions:,} positions, "
        f"head {'tied' if model.tied else 'of its own'}"
    )
    named = ("tied", "num_kv_heads")
    if keys := [f"{key} {value}" for key, value in architecture.variant(model).items() if key not in named]:
        print(f"other than GPT-2: {', '.join(keys)}")
    print(f"weights: {facts['parameters']:,} parameters, {', '.join(facts['dtype'])}, {facts['bytes']:,} bytes")
    for key, value in facts["about"].items():
        print(f"{key.replace('_', ' ')}: {value}")
    width = max((len(name) for name, *_ in report.rows()), default=0)
    for name, shape, dtype in report.rows():
        print(f"  {name:<{width}}  {shape:<16} {dtype}")
    for remark in facts["remarks"]:
        print(f"note: {remark}")
    for kind in ("missing", "unexpected"):
        if names := facts[kind]:
            print(f"problem: {len(names)} {kind}: {', '.join(names[:8])}{' ...' if len(names) > 8 else ''}")
    for problem in facts["misshapen"]:
        print(f"problem: {problem}")


def _inspect_dataset(args: argparse.Namespace) -> int:
    from gptworks.data.convert import located
    from gptworks.data.inspect import inspect
    from gptworks.data.store import Store
    from gptworks.tokenizer import Tokenizer

    if args.override:
        raise UsageError(f"-o is for checkpoints; {args.path} is not one.")
    tokenizer = Tokenizer.from_pretrained(args.tokenizer) if args.tokenizer else None
    source = options.dataset_format(args.from_format, "--from") if args.from_format else None
    reports = [inspect(Store(each), tokenizer) for each in located(args.path, source)]
    if args.json:
        facts = [report.as_dict() for report in reports]
        print(json.dumps(facts[0] if len(facts) == 1 else facts))
        return 0
    for number, report in enumerate(reports):
        if number:
            print()
        _print(report)
    return 0


def _print(report: "Report") -> None:
    facts, store = report.as_dict(), report.store
    print(f"{store.located.main}: {store.located.format.NAME} ({store.located.format.TITLE})")
    for file, size in facts["files"].items():
        print(f"  {file}  {size:,} bytes")
    documents = counted(facts["documents"], "document") if facts["documents"] is not None else "documents not marked"
    several = facts["documents"] is not None and facts["sequences"] != facts["documents"]
    sequences = f", {facts['sequences']:,} sequences" if several else ""
    print(f"{facts['kind']}: {documents}{sequences}, {facts['tokens']:,} tokens of type {facts['dtype']}")
    looked = "" if facts["tokens_scanned"] == facts["tokens"] else f" (first {facts['tokens_scanned']:,} tokens)"
    eods = f"; {facts['eod_count']:,} end-of-document tokens" if facts["eod_count"] is not None else ""
    print(f"ids {facts['lowest_id']} to {facts['highest_id']}{eods}{looked}")
    name = f"{facts['tokenizer']}, {facts['vocab_size']:,} tokens" if facts["tokenizer"] else "not known (--tokenizer)"
    print(f"tokenizer: {name}")
    if facts["histogram"]:
        print(f"document lengths: {facts['shortest']:,} to {facts['longest']:,} tokens, mean {facts['mean']:,.1f}")
        most = max(count for *_, count in facts["histogram"])
        for first, last, count in facts["histogram"]:
            between = f"{first:,}-{last:,}" if first != last else f"{first:,}"
            print(f"  {between:>19} {count:>11,} {'█' * max(1, round(_BAR * count / most))}")
    if facts["first_text"] is not None:
        print(f"first document: {facts['first_text']!r}")
    else:
        print(f"first document: {' '.join(map(str, facts['first_document'][:20]))} ...")
    for remark in facts["remarks"]:
        print(f"note: {remark}")
    for problem in facts["problems"]:
        print(f"problem: {problem}")
