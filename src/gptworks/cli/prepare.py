"""gptworks prepare: raw text to a token store."""

import argparse
import sys

from gptworks.cli import options

HELP = "raw text -> token store"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=".txt or .jsonl files, or sample:python")
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument("--tokenizer", default="gpt2", metavar="NAME", help="gpt2, a folder or a tokenizer.json")
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a byte-level BPE, with --merge-file")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt")
    parser.add_argument("--train-tokenizer", type=int, metavar="N", help="learn a new BPE of N tokens from the input")
    parser.add_argument("--key", default="text", help="key of the text in .jsonl lines (default: text)")
    parser.add_argument(
        "--prompt-key", metavar="KEY", help="prompt/completion examples: the prompt, which is not scored"
    )
    parser.add_argument("--completion-key", metavar="KEY", help="prompt/completion examples: what is to be learned")
    parser.add_argument(
        "--doc-separator",
        default="\n\n",
        metavar="TEXT",
        help="between documents of .txt files (default: a blank line)",
    )
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line instead of skipping it")
    options.add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from gptworks.data import corpus
    from gptworks.data import prepare as preparation
    from gptworks.errors import UsageError

    keys: tuple[str, ...] = (args.key,)
    if args.prompt_key or args.completion_key:
        if not (args.prompt_key and args.completion_key):
            raise UsageError("--prompt-key and --completion-key go together: give both.")
        keys = (args.prompt_key, args.completion_key)
    separator = args.doc_separator.replace("\\n", "\n").replace("\\t", "\t")  # a shell passes \n as two letters
    rules = corpus.TextRules(keys=keys, separator=separator, keep_separator=not args.append_eod)
    tokenizer = _tokenizer(args, rules)
    progress = _show if sys.stderr.isatty() else None
    summary = preparation.prepare(
        args.inputs, args.out, tokenizer, rules=rules, append_eod=args.append_eod, strict=args.strict, progress=progress
    )
    if progress:
        print(file=sys.stderr)
    _report(summary, tokenizer, args.json)
    return 0


def _tokenizer(args: argparse.Namespace, rules):  # type: ignore[no-untyped-def]
    from gptworks.data import prepare as preparation
    from gptworks.errors import UsageError
    from gptworks.tokenizer import Tokenizer

    if args.train_tokenizer is not None:
        tokenizer = preparation.train_tokenizer(args.inputs, args.train_tokenizer, rules, strict=args.strict)
        if tokenizer.vocab_size < args.train_tokenizer:
            found = f"--train-tokenizer: the text gives {tokenizer.vocab_size} tokens, not {args.train_tokenizer}"
            print(f"{found}; no pair of tokens is left that occurs twice", file=sys.stderr)
        return tokenizer
    if bool(args.vocab_file) != bool(args.merge_file):
        raise UsageError("--vocab-file and --merge-file go together: give both.")
    if args.vocab_file:
        return Tokenizer.from_files(args.vocab_file, args.merge_file)
    return Tokenizer.from_pretrained(args.tokenizer)


def _show(documents: int, tokens: int) -> None:
    print(f"\r{documents:,} documents, {tokens:,} tokens", end="", file=sys.stderr, flush=True)


def _report(summary, tokenizer, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    import json

    if as_json:
        values = {
            "prefix": str(summary.prefix),
            "documents": summary.documents,
            "tokens": summary.tokens,
            "characters": summary.characters,
            "bytes": summary.text_bytes,
            "seconds": round(summary.seconds, 3),
            "skipped": summary.skipped.count,
            "empty": summary.empty,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "eod_appended": summary.eod_appended,
        }
        print(json.dumps(values))
        return
    for line in summary.skipped.first:
        print(f"skipped {line}", file=sys.stderr)
    if summary.empty:
        print(f"{summary.empty:,} empty documents left out", file=sys.stderr)
    if summary.skipped.count:
        print(f"{summary.skipped.count:,} lines skipped; --strict stops at the first one instead", file=sys.stderr)
    print(
        f"{summary.prefix}.bin: {summary.documents:,} documents, {summary.tokens:,} tokens "
        f"from {summary.text_bytes:,} bytes ({summary.text_bytes / summary.tokens:.2f} bytes per token), "
        f"{summary.tokens / summary.seconds:,.0f} tokens/s"
    )
    eod = tokenizer.eod_token if summary.eod_appended else "not marked (--append-eod marks it)"
    print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens; end of document: {eod}")
