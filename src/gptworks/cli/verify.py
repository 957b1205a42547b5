"""gptworks verify: is a dataset whole?"""

import argparse
import json

from gptworks.cli import options

HELP = "is a dataset whole: checksums, counts, every id"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="PATH", help="prefix, file or folder of a dataset")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.data.inspect import damage_in
    from gptworks.data.store import Store, locate_stores
    from gptworks.errors import DataError

    results: list[dict[str, object]] = []
    damage: list[str] = []
    for located in locate_stores(args.path):
        try:
            store = Store(located)  # lengths, offsets and counts are checked by opening it
        except DataError as error:
            damage.append(str(error))
            continue
        wrong = damage_in(store)
        damage += wrong
        if wrong:
            continue
        hashed = sorted(store.sidecar.sha256) if store.sidecar else []
        counts = {"path": str(store.file), "format": located.format.NAME, "tokens": len(store.tokens)}
        results.append({**counts, "checksums": hashed})
        if not args.json:
            by = "checksums, counts and ids agree" if hashed else "counts and ids agree; no sidecar, so no checksums"
            documents = f"{store.num_documents:,} documents, " if store.contents.has_documents else ""
            print(f"{store.file}: whole ({documents}{len(store.tokens):,} tokens; {by})")
    if damage:
        raise DataError("\n".join([*damage, "Copy it again from where it was whole, or prepare the data again."]))
    if args.json:
        print(json.dumps(results))
    return 0
