"""Text to a store: cut, encoded by workers, written in order, published when whole; stopped half-way, it goes on."""

import itertools
import json
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any, Literal

from gptworks.counted import counted
from gptworks.data import corpus, hf_folder, sample_corpus, text_blocks
from gptworks.data.encode import Encoded, Encoder, encode_in_worker, start_worker
from gptworks.data.formats import megatron, registry
from gptworks.data.publish import check_row_length, describe, output_prefix
from gptworks.data.text_blocks import Block, TextRules, cut
from gptworks.data.text_files import InputFile, list_inputs
from gptworks.data.work_folder import WORK_VERSION, State, WorkFolder, WorkIsKept, plan_of
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.characters import CharacterTokenizer

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
    kept: State  # what an earlier, interrupted run had done
    files: list[Path]
    notes: list[str]

    @property
    def blocks_kept(self) -> int:
        return self.kept.blocks


Progress = Callable[[State, int], None]  # where we are; bytes of all inputs, 0 when not known


class _Disagreement(Exception):
    """The quick encoder failed on a text, or gave other ids than the reference."""


@dataclass(frozen=True)
class PrepareJob:
    """What is to become of which texts. `workers` 0: as many as there are processors; `encoder` auto: the quickest."""

    inputs: Sequence[str]
    prefix: str | Path
    tokenizer: Tokenizer
    rules: TextRules = field(default_factory=TextRules)
    append_eod: bool = False
    strict: bool = False
    format: str = "megatron"
    row_length: int | None = None
    workers: int = 1
    encoder: Literal["auto", "tokenizers"] = "auto"
    progress: Progress | None = None

    @property
    def is_examples(self) -> bool:
        return len(self.rules.keys) == 2

    @property
    def out(self) -> Path:
        return output_prefix(self.prefix)


def prepare(job: PrepareJob) -> Summary:
    """Tokenize files into a store."""
    _require_possible(job)
    tokenizer = job.tokenizer
    files, _ = list_inputs(job.inputs, job.rules.kind)
    # Once the reference has begun, because the two differ or there was no other, it goes on.
    was_quick = plan_of(job.out) != _fingerprint(files, job) | {"quick": False}
    try:
        return _run(job, may_be_quick=job.encoder == "auto" and was_quick)
    except _Disagreement as error:
        differs = f"gigatoken failed on, or gives other ids than {tokenizer.library} for, {str(error)[:60]!r}"
        if not all(_can_be_read_again(each) for each in files):
            raise DataError(
                f"{differs}; what came through a pipe cannot be read again. Send it once more with --encoder "
                "tokenizers."
            ) from None
    summary = _run(job, may_be_quick=False)
    return replace(summary, notes=[f"{differs}: all was encoded with {tokenizer.library}", *summary.notes])


def _run(job: PrepareJob, *, may_be_quick: bool) -> Summary:
    started = time.perf_counter()
    tokenizer, rules = job.tokenizer, job.rules
    files, passed_over = list_inputs(job.inputs, rules.kind)
    total = sum(each.size for each in files)
    workers = _how_many(job.workers, total, files)
    dtype = megatron.dtype_for(tokenizer.vocab_size)
    encoder = Encoder(tokenizer, rules, dtype, append_eod=job.append_eod, may_be_quick=may_be_quick)
    with WorkFolder(job.out, _fingerprint(files, job) | {"quick": encoder.quick is not None}) as work:
        may_cut = encoder.may_cut and not job.is_examples
        blocks = cut(files, rules, passed_over, may_cut_documents=may_cut)
        work.skip_done(blocks)
        kept = work.state
        skipped = corpus.Skipped(job.strict, kept.skipped, list(kept.first), passed_over)
        with _encoding(encoder, workers, work.lock) as encode:
            for block, encoded in encode(blocks):
                if encoded.disagreement:
                    work.abandon()
                    raise _Disagreement(encoded.disagreement)
                work.add(block, encoded, skipped)
                if job.progress:
                    job.progress(work.state, total)
        if work.state.tokens == 0:
            raise _no_text(job.inputs, skipped)
        kind = "examples" if job.is_examples else "text"
        sidecar = describe(tokenizer, kind=kind, eod_appended=job.append_eod)
        work.finish(registry.FORMATS[job.format], tokenizer, sidecar, len(rules.keys), job.row_length)
    state, notes = work.state, [*hf_folder.notes(job.inputs), *work.notes]
    left = state.tokens % job.row_length if job.row_length else 0
    if left:
        notes.append(f"the last {left:,} tokens do not fill a row of {job.row_length} and are left out")
    return Summary(
        job.out,
        state.sequences // len(rules.keys),
        state.tokens,
        state.characters,
        state.text_bytes,
        time.perf_counter() - started,
        skipped,
        state.empty,
        eod_appended=job.append_eod,
        encoder="gigatoken" if encoder.quick else tokenizer.library,
        workers=workers,
        kept=kept,
        files=work.published,
        notes=notes,
    )


def _can_be_read_again(file: InputFile) -> bool:
    return file.name.startswith(sample_corpus.PREFIX) or (file.path is not None and file.path.is_file())


CHARACTERS = "chars"  # instead of a number of tokens
LEARNED = ("trained", "characters")  # names of tokenizers that are in no file yet


def train_tokenizer(
    inputs: list[str], vocab_size: int | str, rules: TextRules, *, strict: bool = False, with_eod: bool = True
) -> Tokenizer:
    """A vocabulary learned from the corpus itself: a BPE of so many tokens, or its characters.

    `with_eod`: characters get an end of document; a BPE always has one.
    """
    skipped = corpus.Skipped(strict)
    texts = (text for document in corpus.read_documents(inputs, rules, skipped) for text in document)
    first = next(texts, None)
    if first is None:
        raise _no_text(inputs, skipped)
    return learn_tokenizer(itertools.chain([first], texts), vocab_size, with_eod=with_eod)


def learn_tokenizer(texts: Iterable[str], vocab_size: int | str, *, with_eod: bool = True) -> Tokenizer:
    """A vocabulary learned from texts in memory: a BPE of so many tokens, or their characters."""
    if vocab_size == CHARACTERS:
        return CharacterTokenizer.learn(texts, with_eod=with_eod)
    return Tokenizer.train(texts, int(vocab_size))


def _no_text(inputs: Sequence[str], skipped: corpus.Skipped) -> DataError:
    first = f" First problem: {skipped.first[0]}." if skipped.first else ""
    return DataError(f"{', '.join(inputs)}: no text found; {counted(skipped.count, 'line')} skipped.{first}")


def _require_possible(job: PrepareJob) -> None:
    name, tokenizer = job.format, job.tokenizer
    if name not in registry.FORMATS:
        raise DataError(f"--format: no format '{name}'. Formats: {', '.join(registry.FORMATS)}.")
    chosen = registry.FORMATS[name]
    if job.append_eod and tokenizer.eod_id is None:
        raise DataError(f"--append-eod: {tokenizer.name} has no end-of-document token such as <|endoftext|>.")
    if job.is_examples and not job.append_eod:
        raise DataError("prompt and completion: add --append-eod, so that the model learns where a completion ends.")
    if job.is_examples and (name != "megatron" or job.row_length is not None):
        option = f"--format {name}" if name != "megatron" else "--row-length"
        raise DataError(f"{option}: prompts and completions are kept in a megatron store only, as they are.")
    check_row_length(chosen, job.row_length, "--format")
    if chosen.NEEDS_ROWS and job.row_length is None:
        raise DataError(f"--format {name}: its rows are training samples. Needed: --row-length, seq_len + 1.")
    if chosen.LARGEST_ID is not None and tokenizer.vocab_size > chosen.LARGEST_ID + 1:
        raise DataError(
            f"--format {name}: stores ids up to {chosen.LARGEST_ID}, but {tokenizer.name} has "
            f"{tokenizer.vocab_size} tokens. Use --format megatron."
        )


def _how_many(workers: int, total: int, files: list[InputFile]) -> int:
    if workers < 0:
        raise DataError(f"--workers: got {workers}; needs 1 or more, or 0 for one per processor.")
    if workers:
        return workers
    is_small = total < _SMALL_BYTES and all(each.path is not None for each in files)
    return 1 if is_small else len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _fingerprint(files: list[InputFile], job: PrepareJob) -> dict[str, Any]:
    """All that decides the tokens. The number of workers and the format do not."""
    return {
        "version": WORK_VERSION,
        "block_bytes": text_blocks.BLOCK_BYTES,
        "inputs": [[each.name, each.size, each.modified] for each in files],
        "rules": json.loads(json.dumps(asdict(job.rules))),
        "tokenizer": job.tokenizer.identity,
        "eod_id": job.tokenizer.eod_id,
        "append_eod": job.append_eod,
        "strict": job.strict,
        "dtype": megatron.dtype_for(job.tokenizer.vocab_size).name,
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
    except BaseException:
        for worker in list(pool._processes.values()):  # what they are at is done again; nobody should wait for it
            worker.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
