"""Text to a store: cut, encoded by workers, written in order, published when whole; stopped half-way, it goes on."""

import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptworks.data import corpus, text_blocks
from gptworks.data.encode import Encoded, Encoder, encode_in_worker, start_worker
from gptworks.data.formats import megatron, registry
from gptworks.data.publish import describe
from gptworks.data.text_blocks import Block, TextRules, cut
from gptworks.data.text_files import InputFile, list_inputs
from gptworks.data.work_folder import State, WorkFolder, WorkIsKept, plan_of
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

_WORK_VERSION = 2  # of the work folder: another number starts anew
_SMALL_BYTES = 4 * text_blocks.BLOCK_BYTES  # below this, starting processes costs more than they save
_AHEAD = 3  # blocks per worker that are under way


@dataclass(frozen=True)
class Summary:
    prefix: Path
    documents: int
    tokens: int
    characters: int
    text_bytes: int
    seconds: float
    skipped: corpus.Skipped
    empty: int  # documents with no text in them
    eod_appended: bool
    encoder: str  # gigatoken or tokenizers
    workers: int
    blocks_kept: int  # blocks that an earlier, interrupted run had done
    files: list[Path] = field(default_factory=list)
    note: str = ""


Progress = Callable[[State, int], None]  # where we are; bytes of all inputs, 0 when not known


def prepare(
    inputs: list[str],
    prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    rules: TextRules | None = None,
    append_eod: bool = False,
    strict: bool = False,
    format: str = "megatron",
    row_length: int | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize files into a store. `workers` 0: as many as there are processors."""
    prefix, rules = Path(prefix), rules or TextRules()
    is_examples = len(rules.keys) == 2
    _check_request(prefix, tokenizer, format, row_length, append_eod, is_examples)
    files, passed_over = list_inputs(inputs, rules.kind)
    total = sum(each.size for each in files)
    workers = _how_many(workers, total, files)
    started = time.perf_counter()
    skipped = corpus.Skipped(strict, passed_over=passed_over)
    dtype = megatron.dtype_for(tokenizer.vocab_size)
    fingerprint = _fingerprint(files, rules, tokenizer, append_eod, strict, dtype)

    def run(may_be_quick: bool) -> tuple[WorkFolder, str, int]:
        with WorkFolder(prefix, fingerprint | {"quick": may_be_quick}) as work:
            blocks = cut(files, rules, skipped.passed_over, may_cut_documents=not is_examples and encoder.may_cut)
            kept = work.skip_done(blocks)
            skipped.count, skipped.first = work.state.skipped, list(work.state.first)
            with _encoding(encoder, workers, work.lock) as encode:
                for block, encoded in encode(blocks):
                    if encoded.disagreement:
                        work.abandon()
                        return work, encoded.disagreement, kept
                    work.add(block, encoded, skipped)
                    if progress:
                        progress(work.state, total)
            if work.state.tokens == 0:
                first = f" First problem: {skipped.first[0]}." if skipped.first else ""
                raise DataError(f"{', '.join(inputs)}: no text found; {skipped.count} lines were skipped.{first}")
            sidecar = describe(tokenizer, kind="examples" if is_examples else "text", eod_appended=append_eod)
            work.finish(registry.FORMATS[format], tokenizer, sidecar, len(rules.keys), row_length)
            return work, "", kept

    # Once the reference has begun, because the two differ or there was no other, it goes on.
    may_be_quick = plan_of(prefix) != fingerprint | {"quick": False}
    encoder = Encoder(tokenizer, rules, dtype, append_eod=append_eod, may_be_quick=may_be_quick)
    work, disagreement, kept = run(encoder.quick is not None)
    note = ""
    if disagreement:
        note = f"gigatoken gives other ids than tokenizers for {disagreement[:60]!r}: all was encoded with tokenizers"
        encoder = Encoder(tokenizer, rules, dtype, append_eod=append_eod, may_be_quick=False)
        skipped = corpus.Skipped(strict, passed_over=list_inputs(inputs, rules.kind)[1])
        work, _, kept = run(False)
    state = work.state
    left = state.tokens % row_length if row_length else 0
    if left:
        note = f"{note}. " * bool(note) + f"the last {left:,} tokens do not fill a row of {row_length} and are left out"
    return Summary(
        prefix,
        state.sequences // len(rules.keys),
        state.tokens,
        state.characters,
        state.text_bytes,
        time.perf_counter() - started,
        skipped,
        state.empty,
        eod_appended=append_eod,
        encoder="gigatoken" if encoder.quick else "tokenizers",
        workers=workers,
        blocks_kept=kept,
        files=work.published,
        note=note,
    )


def train_tokenizer(inputs: list[str], vocab_size: int, rules: TextRules, *, strict: bool = False) -> Tokenizer:
    """A new BPE learned from the corpus itself."""
    skipped = corpus.Skipped(strict)
    texts = (text for document in corpus.read_documents(inputs, rules, skipped) for text in document)
    return Tokenizer.train(texts, vocab_size)


def _check_request(
    prefix: Path, tokenizer: Tokenizer, format: str, row_length: int | None, append_eod: bool, is_examples: bool
) -> None:
    if append_eod and tokenizer.eod_id is None:
        raise DataError(f"--append-eod: {tokenizer.name} has no end-of-document token such as <|endoftext|>.")
    if is_examples and not append_eod:
        raise DataError("prompt and completion: add --append-eod, so that the model learns where a completion ends.")
    if is_examples and format != "megatron":
        raise DataError(f"--format {format}: prompts and completions are kept in a megatron store only.")
    if not prefix.name:
        raise DataError(f"--out: {str(prefix)!r} has no name. Needed: a prefix such as data/corpus.")
    if row_length is not None and row_length < 2:
        raise DataError(f"--row-length: got {row_length}; needs 2 or more (an input and its target).")
    if format == "mindrecord" and row_length is None:
        raise DataError("--format mindrecord: its rows are training samples. Needed: --row-length, seq_len + 1.")
    if format in ("nanogpt", "llmc") and tokenizer.vocab_size > 65536:
        raise DataError(
            f"--format {format}: stores ids in 16 bits, but {tokenizer.name} has {tokenizer.vocab_size} tokens. Use "
            "--format megatron."
        )
    if format not in registry.FORMATS:
        raise DataError(f"--format: no format '{format}'. Formats: {', '.join(registry.FORMATS)}.")


def _how_many(workers: int, total: int, files: list[InputFile]) -> int:
    if workers < 0:
        raise DataError(f"--workers: got {workers}; needs 1 or more, or 0 for one per processor.")
    if workers:
        return workers
    is_small = total < _SMALL_BYTES and all(each.path is not None for each in files)
    return 1 if is_small else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprint(
    files: list[InputFile], rules: TextRules, tokenizer: Tokenizer, append_eod: bool, strict: bool, dtype: np.dtype
) -> dict[str, Any]:
    """All that decides the tokens. The number of workers and the format do not."""
    return {
        "version": _WORK_VERSION,
        "block_bytes": text_blocks.BLOCK_BYTES,
        "inputs": [[each.name, each.size, each.modified] for each in files],
        "rules": json.loads(json.dumps(asdict(rules))),
        "tokenizer": tokenizer.identity,
        "append_eod": append_eod,
        "strict": strict,
        "dtype": dtype.name,
    }


@contextmanager
def _encoding(
    encoder: Encoder, workers: int, lock: IO[bytes]
) -> Iterator[Callable[[Iterable[Block]], Iterator[tuple[Block, Encoded]]]]:
    """A function from blocks to encoded blocks, in order, over this process or several."""
    if workers == 1:
        yield lambda blocks: ((block, encoder.encode(block)) for block in blocks)
        return
    # A copy of this process has the encoder at once; a fresh interpreter builds it for seconds. But a lock that another
    # thread holds at that moment would stay locked in the copy for ever.
    is_alone = sys.platform == "linux" and threading.active_count() == 1
    arguments = (encoder, lock if is_alone else None)
    pool = ProcessPoolExecutor(
        workers, get_context("fork" if is_alone else "spawn"), initializer=start_worker, initargs=arguments
    )

    def in_order(blocks: Iterable[Block]) -> Iterator[tuple[Block, Encoded]]:
        under_way: deque[tuple[Block, Future[Encoded]]] = deque()
        for block in blocks:
            with warnings.catch_warnings():
                # Python 3.12 warns of the idle threads that numpy keeps; they hold nothing that a worker needs.
                warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
                future = pool.submit(encode_in_worker, block)
            under_way.append((block, future))
            if len(under_way) >= workers * _AHEAD:
                first, oldest = under_way.popleft()
                yield first, oldest.result()
        while under_way:
            first, oldest = under_way.popleft()
            yield first, oldest.result()

    try:
        yield in_order
    except BrokenProcessPool:
        raise WorkIsKept(
            f"a worker process ended without a word; the system may have run out of memory. Use --workers "
            f"{max(1, workers // 2)}; the same command goes on where this one stopped."
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
