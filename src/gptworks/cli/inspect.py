"""gptworks inspect: what is this dataset?"""

import argparse
import json
from typing import TYPE_CHECKING

from gptworks.cli import options

if TYPE_CHECKING:
    from gptworks.data.inspect import Report

HELP = "what a dataset is: format, documents, tokens, lengths, text, problems"
_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="prefix, file or folder of a dataset")
    parser.add_argument("--tokenizer", metavar="NAME", help="to decode with, when the dataset does not say")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.data.inspect import inspect
    from gptworks.data.store import Store, locate_stores
    from gptworks.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_pretrained(args.tokenizer) if args.tokenizer else None
    reports = [inspect(Store(each), tokenizer) for each in locate_stores(args.path)]
    if args.json:
        found = [report.as_dict() for report in reports]
        print(json.dumps(found[0] if len(found) == 1 else found))
        return 0
    for number, report in enumerate(reports):
        if number:
            print()
        _print(report)
    return 0


def _print(report: "Report") -> None:
    found, store = report.as_dict(), report.store
    print(f"{store.located.main}: {store.located.format.NAME} ({store.located.format.TITLE})")
    for file, size in found["files"].items():
        print(f"  {file}  {size:,} bytes")
    documents = f"{found['documents']:,} documents" if found["documents"] is not None else "documents not marked"
    several = found["documents"] is not None and found["sequences"] != found["documents"]
    sequences = f", {found['sequences']:,} sequences" if several else ""
    print(f"{found['kind']}: {documents}{sequences}, {found['tokens']:,} tokens of type {found['dtype']}")
    looked = "" if found["tokens_scanned"] == found["tokens"] else f" (first {found['tokens_scanned']:,} tokens)"
    eods = f"; {found['eod_count']:,} end-of-document tokens" if found["eod_count"] is not None else ""
    print(f"ids {found['lowest_id']} to {found['highest_id']}{eods}{looked}")
    name = f"{found['tokenizer']}, {found['vocab_size']:,} tokens" if found["tokenizer"] else "not known (--tokenizer)"
    print(f"tokenizer: {name}")
    if found["histogram"]:
        print(f"document lengths: {found['shortest']:,} to {found['longest']:,} tokens, mean {found['mean']:,.1f}")
        most = max(count for *_, count in found["histogram"])
        for first, last, count in found["histogram"]:
            between = f"{first:,}-{last:,}" if first != last else f"{first:,}"
            print(f"  {between:>19} {count:>11,} {'█' * max(1, round(_BAR * count / most))}")
    if found["first_text"] is not None:
        print(f"first document: {found['first_text']!r}")
    else:
        print(f"first document: {' '.join(map(str, found['first_document'][:20]))} ...")
    for remark in found["remarks"]:
        print(f"note: {remark}")
    for problem in found["problems"]:
        print(f"problem: {problem}")
