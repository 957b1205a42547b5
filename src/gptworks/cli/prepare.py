"""gptworks prepare: raw text to a token store."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gptworks.cli import options
from gptworks.counted import counted

if TYPE_CHECKING:
    from gptworks.data.prepare import State, Summary
    from gptworks.data.text_blocks import TextRules
    from gptworks.tokenizer import Tokenizer

HELP = "raw text -> token store"
_PLAIN_SECONDS = 10.0  # between progress lines where there is no terminal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="INPUT",
        help="text, JSON lines, a JSON array, CSV, TSV, parquet, arrow or WikiText; .gz .zst .xz .bz2 and tars of "
        "them; a folder, also of Hugging Face datasets; - for standard input; or sample:python",
    )
    parser.add_argument("--out", required=True, metavar="PREFIX", help="writes PREFIX.bin, PREFIX.idx, PREFIX.json")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="gpt2 (the default), a folder, a tokenizer.json, a sentencepiece .model or a meta.pkl",
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of a byte-level BPE, with --merge-file")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt")
    parser.add_argument(
        "--train-tokenizer",
        type=_size_of_vocabulary,
        metavar="N|chars",
        help="learn from the input: a new BPE of N tokens, or its single characters",
    )
    parser.add_argument(
        "--key",
        action="append",
        metavar="KEY",
        help="key or column of the text (default: text); several with commas between are joined, one below the other; "
        "repeated: one store PREFIX_KEY for each",
    )
    parser.add_argument(
        "--prompt-key", metavar="KEY", help="prompt/completion examples: the prompt, which is not scored"
    )
    parser.add_argument("--completion-key", metavar="KEY", help="prompt/completion examples: what is to be learned")
    parser.add_argument(
        "--input-format",
        choices=["auto", "text", "jsonl", "json", "wikitext", "csv", "tsv"],
        default="auto",
        help="what the inputs are, when their names do not tell; wikitext: a document begins at each ` = Title = `",
    )
    parser.add_argument(
        "--doc-separator",
        default="\n\n",
        metavar="TEXT",
        help="between documents of plain text (default: a blank line; empty: a file is one document)",
    )
    parser.add_argument("--strip", action="store_true", help="take off the blanks around each document")
    parser.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    parser.add_argument("--format", default="megatron", metavar="NAME", help=f"{options.DATASET_FORMATS}")
    parser.add_argument("--row-length", type=int, metavar="N", help="mindrecord: tokens per row, seq_len + 1")
    parser.add_argument("--workers", type=int, default=0, metavar="N", help="processes (default: one per processor)")
    parser.add_argument(
        "--encoder",
        choices=["auto", "tokenizers"],
        default="auto",
        help="auto: gigatoken where it is installed and agrees with tokenizers",
    )
    parser.add_argument("--strict", action="store_true", help="stop at the first bad line instead of skipping it")
    options.add_json_option(parser)


def _size_of_vocabulary(text: str) -> int | str:
    if text == "chars" or text.removeprefix("-").isdecimal():
        return text if text == "chars" else int(text)
    raise argparse.ArgumentTypeError(f"got {text!r}; needs a number of tokens, such as 4096, or chars")


def run(args: argparse.Namespace) -> int:
    from gptworks.data import prepare as preparation
    from gptworks.data.text_blocks import TextRules
    from gptworks.data.text_files import STDIN
    from gptworks.errors import UsageError

    options.dataset_format(args.format, "--format")
    keys: list[tuple[str, ...]] = [(key,) for key in args.key or ["text"]]
    if args.prompt_key or args.completion_key:
        if not (args.prompt_key and args.completion_key):
            raise UsageError("--prompt-key and --completion-key go together: give both.")
        if args.key:
            raise UsageError("--key: prompts and completions have keys of their own. Leave it out.")
        keys = [(args.prompt_key, args.completion_key)]
    if args.train_tokenizer is not None and len(keys) > 1:
        raise UsageError("--train-tokenizer: would learn another vocabulary for each --key. Give one key.")
    if STDIN in args.inputs and (len(keys) > 1 or args.train_tokenizer is not None):
        why = "--key given twice" if len(keys) > 1 else "--train-tokenizer"
        raise UsageError(f"- (standard input) can be read only once, but {why} needs to read it again. Use a file.")
    separator = args.doc_separator.replace("\\n", "\n").replace("\\t", "\t")  # a shell passes \n as two letters
    for each in keys:
        rules = TextRules(each, separator, keep_separator=not args.append_eod, strip=args.strip, kind=args.input_format)
        tokenizer = _tokenizer(args, rules)
        with _Display() as display, _interrupt_explained():
            summary = preparation.prepare(
                preparation.PrepareJob(
                    args.inputs,
                    args.out if len(keys) == 1 else f"{args.out}_{each[0]}",
                    tokenizer,
                    rules=rules,
                    append_eod=args.append_eod,
                    strict=args.strict,
                    format=args.format,
                    row_length=args.row_length,
                    workers=args.workers,
                    encoder=args.encoder,
                    progress=display.show,
                )
            )
        _report(summary, tokenizer, args.json)
    return 0


def _tokenizer(args: argparse.Namespace, rules: "TextRules") -> "Tokenizer":
    from gptworks.data import prepare as preparation
    from gptworks.errors import UsageError
    from gptworks.tokenizer import Tokenizer

    chosen = [o for o in ("tokenizer", "vocab_file", "train_tokenizer") if getattr(args, o) is not None]
    if len(chosen) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        raise UsageError(f"{names}: each of them names the tokenizer. Give one.")
    if args.train_tokenizer is not None:
        tokenizer = preparation.train_tokenizer(
            args.inputs, args.train_tokenizer, rules, strict=args.strict, with_eod=args.append_eod
        )
        if isinstance(args.train_tokenizer, int) and tokenizer.vocab_size < args.train_tokenizer:
            remark = f"--train-tokenizer: the text gives {tokenizer.vocab_size} tokens, not {args.train_tokenizer}"
            print(f"{remark}; no pair of tokens is left that occurs twice", file=sys.stderr)
        return tokenizer
    if bool(args.vocab_file) != bool(args.merge_file):
        raise UsageError("--vocab-file and --merge-file go together: give both.")
    if args.vocab_file:
        return Tokenizer.from_files(args.vocab_file, args.merge_file)
    return Tokenizer.from_pretrained(args.tokenizer or "gpt2")


@contextmanager
def _interrupt_explained() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print("stopped; the same command goes on from here", file=sys.stderr)
        raise


class _Display:
    """A bar on a terminal, a line now and then elsewhere."""

    def __enter__(self) -> "_Display":
        self.started = self.last = time.monotonic()
        self.first: State | None = None  # where we were when the first block came: an earlier run may have done much
        self.bar = _bar() if sys.stderr.isatty() else None
        self.task = None if self.bar is None else self.bar.add_task("", total=None, speed="")
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def show(self, state: "State", total: int) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first, self.started = state, now
            if state.blocks > 1:
                print(f"going on from an interrupted run: {state.blocks - 1:,} blocks were done", file=sys.stderr)
            if self.bar:
                self.bar.start()  # not before: its thread would keep workers from being copies of this process
        spent = max(now - self.started, 1e-9)
        megabytes, tokens = (state.text_bytes - self.first.text_bytes) / 1e6, state.tokens - self.first.tokens
        speed = f"{megabytes / spent:.1f} MB/s, {tokens / spent:,.0f} tokens/s"
        if self.bar and self.task is not None:
            self.bar.update(self.task, completed=state.position, total=total or None, speed=speed)
        elif now - self.last >= _PLAIN_SECONDS and state is not self.first:
            self.last = now
            share = f"{state.position / total:.0%}, " if total else ""
            moved = state.position - self.first.position
            left = f", {spent * (total - state.position) / moved:.0f} s left" if total and moved > 0 else ""
            print(f"prepare: {share}{state.tokens:,} tokens, {speed}{left}", file=sys.stderr, flush=True)


def _bar():  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)


def _report(summary: "Summary", tokenizer: "Tokenizer", as_json: bool) -> None:
    skipped = summary.skipped
    if as_json:
        values = {
            "prefix": str(summary.prefix),
            "files": [str(file) for file in summary.files],
            "documents": summary.documents,
            "tokens": summary.tokens,
            "characters": summary.characters,
            "bytes": summary.text_bytes,
            "seconds": round(summary.seconds, 3),
            "skipped": skipped.count,
            "first_skipped": skipped.first,
            "files_passed_over": skipped.passed_over,
            "empty": summary.empty,
            "tokenizer": tokenizer.name,
            "vocab_size": tokenizer.vocab_size,
            "eod_appended": summary.eod_appended,
            "encoder": summary.encoder,
            "workers": summary.workers,
            "blocks_kept": summary.blocks_kept,
            "notes": summary.notes,
        }
        print(json.dumps(values))
        return
    for line in skipped.first:
        print(f"skipped {line}", file=sys.stderr)
    if summary.empty:
        print(f"{counted(summary.empty, 'empty document')} left out", file=sys.stderr)
    if skipped.count:
        print(f"{counted(skipped.count, 'line')} skipped; --strict stops at the first one instead", file=sys.stderr)
    if skipped.passed_over:
        number, first = len(skipped.passed_over), skipped.passed_over[0]
        print(f"{counted(number, 'file')} passed over: no known kind of text, such as {first}", file=sys.stderr)
    for note in summary.notes:
        print(f"note: {note}", file=sys.stderr)
    print(
        f"{summary.files[0]}: {counted(summary.documents, 'document')}, {counted(summary.tokens, 'token')} from "
        f"{summary.characters:,} characters, {summary.text_bytes:,} bytes "
        f"({summary.text_bytes / summary.tokens:.2f} bytes per token)"
    )
    by = f"{summary.encoder}, {summary.workers} process{'es' if summary.workers > 1 else ''}"
    text_bytes, tokens = summary.text_bytes - summary.kept.text_bytes, summary.tokens - summary.kept.tokens
    speed = f"{text_bytes / 1e6 / summary.seconds:.1f} MB/s, {tokens / summary.seconds:,.0f} tokens/s"
    print(f"{summary.seconds:.1f} s: {speed} ({by})")
    eod = tokenizer.eod_token if summary.eod_appended else "not marked (--append-eod marks it)"
    print(f"tokenizer {tokenizer.name}, {tokenizer.vocab_size:,} tokens; end of document: {eod}")
