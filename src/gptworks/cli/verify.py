"""gptworks verify: is a dataset whole?"""

import argparse
import json

from gptworks.cli import options

HELP = "is a dataset whole: checksums, counts, every id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="prefix, file or folder of a dataset")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.data.inspect import checksum_problems, inspect
    from gptworks.data.store import Store, locate_stores
    from gptworks.errors import DataError

    results = []
    for located in locate_stores(args.path):
        store = Store(located)  # lengths, offsets and counts are checked by opening it
        wrong = checksum_problems(store)
        if not wrong:
            wrong = [f"{store.file}: {each}" for each in inspect(store, everything=True).damage]
        if wrong:
            advice = "Copy it again from where it was whole, or prepare the data again."
            raise DataError("\n".join([*wrong, advice]))
        hashed = sorted(store.sidecar.sha256) if store.sidecar else []
        results.append({"path": str(store.file), "format": located.format.NAME, "tokens": len(store.tokens)})
        results[-1]["checksums"] = hashed
        if not args.json:
            by = "checksums, counts and ids agree" if hashed else "counts and ids agree; no sidecar, so no checksums"
            documents = f"{store.num_documents:,} documents, " if store.contents.has_documents else ""
            print(f"{store.file}: whole ({documents}{len(store.tokens):,} tokens; {by})")
    if args.json:
        print(json.dumps(results))
    return 0
