"""Text to a store: cut, encoded by workers, written in order, published when whole; stopped half-way, it goes on."""

import hashlib
import json
import os
import shutil
import sys
import threading
import time
import warnings
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptworks.data import corpus, text_blocks
from gptworks.data.encode import Encoded, Encoder, encode_in_worker, start_worker
from gptworks.data.formats import megatron, registry
from gptworks.data.formats.contents import Contents
from gptworks.data.publish import describe, publish
from gptworks.data.store import Sidecar
from gptworks.data.text_blocks import Block, TextRules, cut
from gptworks.data.text_files import InputFile, list_inputs
from gptworks.errors import DataError, GPTWorksError
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


@dataclass(frozen=True)
class State:
    """How far the work is. Numbers are sums up to the block."""

    blocks: int = 0
    tokens: int = 0
    sequences: int = 0  # closed ones
    pending: int = 0  # tokens of a sequence that goes on in the next block
    characters: int = 0
    text_bytes: int = 0
    empty: int = 0
    lines: int = 0  # of the stream that the block belongs to
    position: int = 0
    input_checksum: int = 0  # of the block
    tokens_checksum: int = 0  # of the block
    sizes_checksum: int = 0  # of the block
    skipped: int = 0
    first: list[str] = field(default_factory=list)


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

    def run(may_be_quick: bool) -> tuple[_Work, str, int]:
        with _Work(prefix, fingerprint | {"quick": may_be_quick}) as work:
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
    may_be_quick = _plan_of(prefix) != fingerprint | {"quick": False}
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


class _WorkIsKept(DataError):
    """Not a mistake in the input: what was done stays, and the same command goes on."""


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
        raise _WorkIsKept(
            f"a worker process ended without a word; the system may have run out of memory. Use --workers "
            f"{max(1, workers // 2)}; the same command goes on where this one stopped."
        ) from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _folder_of(prefix: Path) -> Path:
    return megatron.beside(prefix, ".part")


def _plan_of(prefix: Path) -> Any:
    """What an earlier run was about; None: there was none."""
    try:
        return json.loads((_folder_of(prefix) / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class _Work:
    """The folder PREFIX.part: tokens, sizes and a journal with a line for each finished block."""

    def __init__(self, prefix: Path, fingerprint: dict[str, Any]) -> None:
        self.prefix, self.fingerprint = prefix, fingerprint
        self.folder = _folder_of(prefix)
        self.state = State()
        self.hash = hashlib.sha256()
        self.published: list[Path] = []
        self.lengths: list[int] = []  # of the lines of the journal
        self.opened: list[IO[bytes]] = []  # the lock first
        self.itemsize = np.dtype(fingerprint["dtype"]).itemsize

    def __enter__(self) -> "_Work":
        states: list[State] | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = _lock(self.folder / "lock", self.prefix)
            self.opened.append(self.lock)
            states = self._states_to_go_on_from()
            if not states:
                (self.folder / "plan.json").unlink(missing_ok=True)
            staged = self.folder / f"{self.prefix.name}.bin"
            if staged.exists() and not (self.folder / "tokens").exists():
                staged.rename(self.folder / "tokens")  # stopped while the store was being put together
            for name in ("tokens", "sizes", "journal"):
                self.opened.append(_open_for_update(self.folder / name))
            _, self.tokens, self.sizes, self.journal = self.opened
            self.done = self._checked(states)
            self._cut_back()
            (self.folder / "plan.json").write_text(json.dumps(self.fingerprint), encoding="utf-8")
        except OSError as error:
            for file in self.opened:
                file.close()
            if states == []:
                self.abandon()
            raise DataError(f"{self.prefix}.bin cannot be written: {error.strerror} ({error.filename}).") from None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        lock, *files = self.opened
        for file in files:
            with suppress(OSError):  # what is not noted in the journal does not count
                file.close()
        # A mistake in the input leaves nothing behind; an interruption leaves what was done, to go on from.
        if kind is None or (isinstance(error, GPTWorksError) and not isinstance(error, _WorkIsKept)):
            self.abandon()
        lock.close()

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _states_to_go_on_from(self) -> list[State]:
        if _plan_of(self.prefix) != self.fingerprint:
            return []
        try:
            lines = (self.folder / "journal").read_bytes().splitlines(keepends=True)
        except OSError:
            return []
        states = []
        for line in lines:
            try:
                state = State(**json.loads(line))
            except (ValueError, TypeError):
                break  # the line that was being written when the power went
            if not line.endswith(b"\n"):
                break
            states.append(state)
            self.lengths.append(len(line))
        return states

    def _checked(self, states: list[State]) -> list[State]:
        """The finished blocks whose tokens are all there and whole."""
        before = State()
        for number, state in enumerate(states):
            length = (state.tokens - before.tokens) * self.itemsize
            data = self.tokens.read(length)
            sizes = self.sizes.read((state.sequences - before.sequences) * 8)
            # The checksum of nothing is 0: lengths count as well.
            if (
                (len(data), zlib.crc32(data)) != (length, state.tokens_checksum)
                or len(sizes) != (state.sequences - before.sequences) * 8
                or zlib.crc32(sizes) != state.sizes_checksum
            ):
                return states[:number]
            self.hash.update(data)
            before = state
        return states

    def _cut_back(self) -> None:
        if self.done:
            self.state = self.done[-1]
        self.tokens.truncate(self.state.tokens * self.itemsize)
        self.sizes.truncate(self.state.sequences * 8)
        self.journal.truncate(sum(self.lengths[: len(self.done)]))
        for file in (self.tokens, self.sizes, self.journal):
            file.seek(0, os.SEEK_END)

    def skip_done(self, blocks: Iterator[Block]) -> int:
        """Pass over the blocks of an earlier run, making sure that they are the same."""
        for state in self.done:
            block = next(blocks, None)
            if block is None or block.checksum != state.input_checksum:
                raise _WorkIsKept(
                    f"{self.folder}: holds the beginning of this work, but the text that comes now is another. Remove "
                    "that folder to start anew."
                )
        return len(self.done)

    def add(self, block: Block, encoded: Encoded, skipped: corpus.Skipped) -> None:
        lines = 0 if block.is_first else self.state.lines
        skipped.report_all(block, encoded.problems, lines)
        sizes = encoded.sizes
        if block.continues and len(sizes):
            sizes[0] += self.state.pending
        pending = int(sizes[-1]) if block.unfinished else 0
        closed = sizes[:-1] if block.unfinished else sizes
        sizes_data = closed.astype("<i8").tobytes()
        self.hash.update(encoded.tokens)
        state = self.state
        self.state = State(
            blocks=state.blocks + 1,
            tokens=state.tokens + len(encoded.tokens) // self.itemsize,
            sequences=state.sequences + len(closed),
            pending=pending,
            characters=state.characters + encoded.characters,
            text_bytes=state.text_bytes + encoded.text_bytes,
            empty=state.empty + encoded.empty,
            lines=lines + encoded.num_lines,
            position=block.position,
            input_checksum=block.checksum,
            tokens_checksum=encoded.checksum,
            sizes_checksum=zlib.crc32(sizes_data),
            skipped=skipped.count,
            first=list(skipped.first),
        )
        note = json.dumps(asdict(self.state)).encode() + b"\n"
        try:
            for file, data in ((self.tokens, encoded.tokens), (self.sizes, sizes_data), (self.journal, note)):
                file.write(data)
                file.flush()
        except OSError as error:
            raise _WorkIsKept(
                f"{self.folder}: cannot be written: {error.strerror}. Mend that; the same command goes on where this "
                "one stopped."
            ) from None

    def finish(
        self,
        format_: registry.Format,
        tokenizer: Tokenizer,
        sidecar: Sidecar,
        per_document: int,
        row_length: int | None,
    ) -> None:
        dtype = np.dtype(self.fingerprint["dtype"])
        tokens = self.folder / f"{self.prefix.name}.bin"
        (self.folder / "tokens").rename(tokens)
        sizes = np.memmap(self.folder / "sizes", "<i8", "r", shape=(self.state.sequences,))
        documents = np.arange(0, self.state.sequences + 1, per_document, dtype=np.int64)
        contents = Contents(np.memmap(tokens, dtype, "r"), sizes, documents)
        if row_length is not None:
            contents = as_rows(contents, row_length, self.prefix)
        staged, hashes = self.folder / self.prefix.name, {}
        if format_.NAME == "megatron" and row_length is None:
            # The tokens were written in this format from the start.
            written = [tokens, megatron.write_index_file(staged, dtype, contents)]
            hashes = {tokens: self.hash.hexdigest()}
        else:
            (self.folder / "out").mkdir(exist_ok=True)
            written = format_.write(self.folder / "out" / self.prefix.name, contents, tokenizer.vocab_size)
        self.published = publish(written, hashes, contents, self.prefix, format_, sidecar, tokenizer)


def as_rows(contents: Contents, row_length: int, name: Path) -> Contents:
    """The same tokens as rows of one length, each a training sample; what is left at the end is dropped."""
    rows = contents.num_tokens // row_length
    if not rows:
        raise DataError(f"{name}: {contents.num_tokens} tokens do not fill one row of {row_length}. Use more text.")
    sizes = np.full(rows, row_length, np.int64)
    return Contents(contents.tokens[: rows * row_length], sizes, np.arange(rows + 1), is_rows=True)


def _open_for_update(path: Path) -> IO[bytes]:
    path.touch()
    return path.open("r+b")


def _lock(path: Path, prefix: Path) -> IO[bytes]:
    """Held while this process works on the folder; the system lets go of it when the process dies."""
    file = path.open("wb")
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass  # not a POSIX system: nobody checks
    except BlockingIOError:
        file.close()
        raise DataError(
            f"{prefix}: another `gptworks prepare` is writing it. Wait for it, or choose another --out."
        ) from None
    return file
