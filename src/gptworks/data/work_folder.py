"""The folder PREFIX.part, where `prepare` works: what is done stays there, so that a stopped run can go on."""

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from gptworks import file_errors
from gptworks.data import corpus
from gptworks.data.encode import Encoded
from gptworks.data.formats import file_names, megatron, registry
from gptworks.data.formats.contents import Contents, as_rows
from gptworks.data.publish import publish
from gptworks.data.store import Sidecar
from gptworks.data.text_blocks import Block
from gptworks.errors import DataError, GPTWorksError
from gptworks.tokenizer import Tokenizer

WORK_VERSION = 2  # another number starts anew


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


class WorkIsKept(DataError):
    """Not a mistake in the input: what was done stays, and the same command goes on."""


def _folder_of(prefix: Path) -> Path:
    return file_names.beside(prefix, ".part")


def plan_of(prefix: Path) -> Any:
    """What an earlier run was about; None: there was none."""
    try:
        return json.loads((_folder_of(prefix) / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


class WorkFolder:
    """The folder PREFIX.part: tokens, sizes and a journal with a line for each finished block."""

    def __init__(self, prefix: Path, fingerprint: dict[str, Any]) -> None:
        self.prefix, self.fingerprint = prefix, fingerprint
        self.folder = _folder_of(prefix)
        self.state = State()
        self.hash = hashlib.sha256()
        self.published: list[Path] = []
        self.notes: list[str] = []
        self.lengths: list[int] = []  # of the lines of the journal
        self.opened: list[IO[bytes]] = []  # the lock first
        self.itemsize = np.dtype(fingerprint["dtype"]).itemsize

    def __enter__(self) -> "WorkFolder":
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
            raise _refused(self.folder, error) from None
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        lock, *files = self.opened
        for file in files:
            with suppress(OSError):  # what is not noted in the journal does not count
                file.close()
        # A mistake in the input leaves nothing behind; an interruption leaves what was done, to go on from.
        if kind is None or (isinstance(error, GPTWorksError) and not isinstance(error, WorkIsKept)):
            self.abandon()
        lock.close()

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _states_to_go_on_from(self) -> list[State]:
        if plan_of(self.prefix) != self.fingerprint:
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

    def skip_done(self, blocks: Iterator[Block]) -> None:
        """Pass over the blocks of an earlier run, making sure that they are the same."""
        for state in self.done:
            block = next(blocks, None)
            if block is None or block.checksum != state.input_checksum:
                raise WorkIsKept(
                    f"{self.folder}: holds the beginning of this work, but the text that comes now is another. Remove "
                    "that folder to start anew."
                )

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
            reason = file_errors.explain(error, self.folder) or f"{self.folder}: {error.strerror}."
            raise WorkIsKept(f"{reason} The same command goes on where this one stopped.") from None

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
        self.published = publish(written, hashes, contents, self.prefix, format_, sidecar, tokenizer, self.notes)


def _refused(folder: Path, error: OSError) -> DataError:
    return DataError(file_errors.explain(error, folder) or f"{folder}: cannot be written ({error}).")


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
