"""gptworks convert: a dataset from one format to another."""

import argparse
import json

from gptworks.cli import options

HELP = "datasets from one format to another"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="prefix, file, folder or pattern; recognised by looking")
    parser.add_argument("destination", metavar="DST", help="prefix of what is written")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=options.DATASET_FORMATS)
    parser.add_argument("--from", dest="from_format", metavar="FORMAT", help="what SRC is, when several fit")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="of a source that does not say; also tells where documents end in formats without an index",
    )
    parser.add_argument("--row-length", type=int, metavar="N", help="mindrecord: tokens per row, seq_len + 1")
    parser.add_argument("--verify", action="store_true", help="read everything back and compare before publishing")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    to = options.dataset_format(args.to, "--to")
    source = options.dataset_format(args.from_format, "--from") if args.from_format else None

    from gptworks.data.convert import convert
    from gptworks.tokenizer import Tokenizer

    done = convert(
        [args.source],
        args.destination,
        to,
        from_format=source,
        tokenizer=Tokenizer.from_pretrained(args.tokenizer) if args.tokenizer else None,
        row_length=args.row_length,
        verify=args.verify,
    )
    if args.json:
        values = {
            "from": [each.format.NAME for each in done.sources],
            "to": to.NAME,
            "files": [str(file) for file in done.files],
            "documents": done.documents,
            "tokens": done.tokens,
            "verified": args.verify,
            "notes": done.notes,
        }
        print(json.dumps(values))
        return 0
    kinds = ", ".join(dict.fromkeys(each.format.NAME for each in done.sources))
    number = f"{len(done.sources)} datasets" if len(done.sources) > 1 else str(done.sources[0].main)
    print(f"{number} ({kinds}) -> {to.NAME}: {done.documents:,} documents, {done.tokens:,} tokens")
    for file in done.files:
        print(f"  {file}  {file.stat().st_size:,} bytes")
    for note in done.notes:
        print(f"note: {note}")
    if args.verify:
        print("verified: every token, and every border that the format keeps, was read back and compared")
    return 0
