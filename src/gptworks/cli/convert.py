"""gptworks convert: a checkpoint or a dataset from one system's format to another's."""

import argparse
import json
from pathlib import Path
from typing import Any

from gptworks.cli import options
from gptworks.errors import UsageError

HELP = "weights and datasets, from any format to any other"
_FILES_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", help="a checkpoint or a dataset; recognised by looking")
    parser.add_argument("destination", metavar="DST", help="what to write: a folder, file or prefix")
    parser.add_argument("--to", required=True, metavar="FORMAT", help="see below")
    parser.add_argument("--from", dest="from_format", metavar="FORMAT", help="format of SRC, when several fit")
    parser.add_argument("--verify", action="store_true", help="prove the result before it appears")
    weights = parser.add_argument_group("checkpoints", f"FORMAT: {options.WEIGHT_FORMATS}")
    weights.add_argument(
        "-o", "--override", metavar="KEY=VALUE", action="append", default=[],
        help="what the source does not carry, such as model.num_heads=16; model.vocab_size pads or cuts the vocabulary",
    )  # fmt: skip
    weights.add_argument("--dtype", choices=["fp32", "fp16", "bf16"], help="store as this (default: as it was)")
    weights.add_argument("--tp", type=int, default=1, metavar="N", help="split for N tensor-parallel ranks")
    weights.add_argument("--pp", type=int, default=1, metavar="N", help="split for N pipeline stages")
    data = parser.add_argument_group("datasets", f"FORMAT: {options.DATASET_FORMATS}")
    data.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="tokenizer of a source that names none; it also tells where documents end in formats without an index",
    )
    data.add_argument("--row-length", type=int, metavar="N", help="mindrecord: tokens per row, seq_len + 1")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    if options.is_checkpoint(args.source, args.from_format, args.to):
        return _convert_weights(args)
    return _convert_dataset(args)


def _convert_weights(args: argparse.Namespace) -> int:
    for option, value in (("--tokenizer", args.tokenizer), ("--row-length", args.row_length)):
        if value is not None:
            raise UsageError(f"{option}: {args.source} is a checkpoint; the option is for datasets.")
    for option, number in (("--tp", args.tp), ("--pp", args.pp)):
        if number < 1:
            raise UsageError(f"{option}: got {number}; needs 1 or more.")

    from gptworks.checkpoint.convert import convert
    from gptworks.checkpoint.systems.contract import SplitSpec

    done = convert(
        options.checkpoint_path(args.source),
        args.destination,
        args.to,
        from_name=args.from_format,
        overrides=options.stated_model(args.override),
        dtype=options.dtype(args.dtype),
        cut=SplitSpec(args.tp, args.pp),
        verify=args.verify,
    )
    proved = done.certificate
    if args.json:
        values = {
            "from": done.source.system,
            "to": done.to,
            "files": [str(file) for file in done.files],
            "tensors": len(done.source.tensors),
            "notes": done.notes,
            "certificate": proved,
        }
        print(json.dumps(values))
        return 0
    model = done.source.model
    shape = f"{model.num_layers} x {model.hidden_size}, {model.num_heads} heads, vocabulary {model.vocab_size:,}"
    print(f"{done.source.path} ({done.source.system}) -> {done.to}: {len(done.source.tensors)} tensors; {shape}")
    _print_files(done.files)
    for note in done.notes:
        print(f"note: {note}")
    if proved is not None:
        _print_proof(proved, done.files[-1])
    return 0


def _print_files(files: list[Path]) -> None:
    """Some formats have a file for every tensor: the first are shown."""
    listed = files if len(files) <= _FILES_SHOWN else files[: _FILES_SHOWN // 2]
    for file in listed:
        print(f"  {file}  {file.stat().st_size:,} bytes")
    if rest := files[len(listed) :]:
        print(f"  ... {len(rest)} more, {sum(file.stat().st_size for file in rest):,} bytes")


def _print_proof(proved: dict[str, Any], certificate: Path) -> None:
    tensors, logits = proved["tensors"], proved["logits"]
    total = tensors["equal_to_the_bit"] + tensors["different"]
    print(
        f"verified: {tensors['equal_to_the_bit']} of {total} tensors equal to the bit; largest difference of logits "
        f"{logits['difference']:.2g} (allowed {logits['allowed']:.2g}); {certificate.name} has the hashes"
    )
    if english := proved.get("english"):
        print(f"  a plain English text: loss {english['loss']:.2f} per token (chance: {english['chance']:.2f})")


def _convert_dataset(args: argparse.Namespace) -> int:
    if args.override or args.dtype or (args.tp, args.pp) != (1, 1):
        raise UsageError(f"-o, --dtype, --tp and --pp are for checkpoints; {args.source} is not one.")
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
