"""gptworks eval: how well models predict text they have not seen."""

import argparse
import json
import sys
from pathlib import Path

from gptworks.cli import options

HELP = "held-out loss, WikiText perplexity, LAMBADA accuracy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        required=True,
        metavar="DIR",
        action="append",
        help="run folder, checkpoint of any known system, or name; repeatable",
    )
    options.add_model_options(parser)
    parser.add_argument("--task", choices=["heldout", "wikitext", "lambada"], default="heldout", help="what to measure")
    parser.add_argument(
        "--data",
        metavar="PATH",
        help="heldout: a store, or a file, folder or pattern of text (default: what the run was trained on); wikitext: "
        "a text file; lambada: JSON lines",
    )
    parser.add_argument(
        "--protocol",
        default="",
        metavar="NAME",
        help="wikitext: detokenized or as-is; lambada: strict, last-token, openai or standard (default: the first)",
    )
    parser.add_argument(
        "--overlap", type=_overlap, default=32, metavar="N", help="wikitext: tokens between windows; none = no overlap"
    )
    parser.add_argument(
        "--shorten", action="store_true", help="lambada: a passage longer than the context loses its beginning"
    )
    parser.add_argument(
        "--limit", type=int, default=0, metavar="N", help="only the first N samples, windows or passages"
    )
    parser.add_argument(
        "--per-document",
        metavar="FILE",
        help="write a JSON line per document, window or passage; the same command goes on after an interruption",
    )
    parser.add_argument(
        "--split",
        choices=["train", "held-out", "test", "all"],
        help="heldout: which documents (default: held-out of a store, all of text)",
    )
    parser.add_argument("--key", default="", metavar="NAME", help="heldout: key or column of text (default: text)")
    parser.add_argument(
        "--shares", metavar="A,B,C", help="heldout: shares of the split (default: those the model was trained with)"
    )
    parser.add_argument(
        "--seq-len", type=int, metavar="N", help="heldout: tokens predicted per sample; longer rows are cut off"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows per forward pass")
    parser.add_argument("--baselines", action="store_true", help="heldout: unigram, bigram and gzip beside it")
    parser.add_argument(
        "--published", action="store_true", help="wikitext, lambada: figures that others published beside it"
    )
    parser.add_argument(
        "--log-style", choices=["gptworks", "fleetx"], default="gptworks", help="fleetx: the log lines of PaddleNLP"
    )
    options.add_weights_option(parser)
    options.add_device_option(parser)
    options.add_json_option(parser)


def _overlap(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a number of tokens, or none") from None


def run(args: argparse.Namespace) -> int:
    from gptworks.errors import UsageError
    from gptworks.evaluate import progress, report
    from gptworks.evaluate.run import Request, default_split, evaluate, own_data

    data, split = args.data, args.split
    if data is None:
        if args.task != "heldout":
            raise UsageError(f"--data: not given. Needed: the file of --task {args.task}.")
        data, split = own_data(args.model[0], split or "held-out")
    request = Request(
        tokenizer=args.tokenizer,
        shape=options.stated_model(args.override),
        task=args.task,
        data=data,
        protocol=args.protocol,
        overlap=args.overlap,
        limit=args.limit,
        shorten=args.shorten,
        batch_size=args.batch_size,
        device=args.device,
        weights=args.weights,
        per_document=Path(args.per_document) if args.per_document else None,
        split=split or default_split(data, args.task),
        key=args.key,
        shares=args.shares,
        seq_len=args.seq_len,
        baselines=args.baselines,
        published=args.published,
    )
    in_paddle_style = args.log_style == "fleetx"
    if in_paddle_style and args.task == "heldout":
        raise UsageError("--log-style fleetx: is for --task wikitext and lambada, got --task heldout. Leave it out.")
    watcher = progress.Watcher()
    if in_paddle_style:
        metric = "number correct" if args.task == "lambada" else "loss"
        watcher = progress.PaddleLines(metric, out=sys.stderr if args.json else None)
    elif sys.stderr.isatty():
        watcher = progress.Bar()
    try:
        result = evaluate(args.model, request, watcher)
    except KeyboardInterrupt:
        if args.per_document:
            print(f"\nstopped; the same command goes on from {args.per_document}", file=sys.stderr)
        raise
    if args.json:
        print(json.dumps(result))
    elif in_paddle_style:
        for row in result["rows"]:
            print(report.paddle_line(result, row))
    else:
        report.print_result(result)
    return 0
