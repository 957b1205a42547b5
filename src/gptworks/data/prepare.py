"""Text to a store. The store appears under its name only when it is whole."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptworks.data import corpus
from gptworks.data.formats import megatron
from gptworks.data.formats.megatron import beside
from gptworks.data.store import Sidecar
from gptworks.errors import DataError
from gptworks.tokenizer import Tokenizer

_BATCH_CHARACTERS = 2_000_000  # encoded at a time: enough to keep the tokenizer's threads busy


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


Progress = Callable[[int, int], None]  # documents, tokens so far


def prepare(
    inputs: list[str],
    prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    rules: corpus.TextRules | None = None,
    append_eod: bool = False,
    strict: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Tokenize files into PREFIX.bin, PREFIX.idx and PREFIX.json."""
    prefix, rules = Path(prefix), rules or corpus.TextRules()
    corpus.check_inputs(inputs)
    if append_eod and tokenizer.eod_id is None:
        raise DataError(f"--append-eod: {tokenizer.name} has no end-of-document token such as <|endoftext|>.")
    is_examples = len(rules.keys) == 2
    if is_examples and not append_eod:
        raise DataError("prompt and completion: add --append-eod, so that the model learns where a completion ends.")
    started = time.perf_counter()
    skipped = corpus.Skipped(strict)
    if not prefix.name:
        raise DataError(f"--out: {str(prefix)!r} has no name. Needed: a prefix such as data/corpus.")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        writer = _Writer(prefix, megatron.dtype_for(tokenizer.vocab_size))
    except OSError as error:
        raise DataError(f"{prefix}.bin cannot be written: {error.strerror} ({error.filename}).") from None
    characters = text_bytes = empty = 0
    try:
        for batch in _batches(corpus.read_documents(inputs, rules, skipped)):
            texts = [text for document in batch for text in document]
            characters += sum(len(text) for text in texts)
            text_bytes += sum(len(text.encode("utf-8", "replace")) for text in texts)
            encoded = iter(tokenizer.encode_batch(texts))
            for document in batch:
                sequences = [next(encoded) for _ in document]
                if not sequences[-1]:
                    empty += 1
                    continue
                if append_eod:
                    sequences[-1].append(tokenizer.eod_id)  # type: ignore[arg-type]
                writer.add(sequences)
            if progress:
                progress(writer.num_documents, writer.num_tokens)
        if writer.num_tokens == 0:
            first = f" First problem: {skipped.first[0]}." if skipped.first else ""
            raise DataError(f"{', '.join(inputs)}: no text found; {skipped.count} lines were skipped.{first}")
        writer.finish(tokenizer, "examples" if is_examples else "text", append_eod)
    except BaseException:
        writer.abandon()
        raise
    seconds = time.perf_counter() - started
    return Summary(
        prefix,
        writer.num_documents,
        writer.num_tokens,
        characters,
        text_bytes,
        seconds,
        skipped,
        empty,
        eod_appended=append_eod,
    )


def train_tokenizer(inputs: list[str], vocab_size: int, rules: corpus.TextRules, *, strict: bool = False) -> Tokenizer:
    """A new BPE learned from the corpus itself."""
    corpus.check_inputs(inputs)
    skipped = corpus.Skipped(strict)
    texts = (text for document in corpus.read_documents(inputs, rules, skipped) for text in document)
    return Tokenizer.train(texts, vocab_size)


def _batches(documents: Iterator[tuple[str, ...]]) -> Iterator[list[tuple[str, ...]]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += sum(len(text) for text in document)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Writer:
    """Writes under temporary names beside the final ones, then renames: the sidecar last, as the sign of wholeness."""

    def __init__(self, prefix: Path, dtype: np.dtype) -> None:
        self.prefix, self.dtype = prefix, dtype
        self.sizes: list[int] = []
        self.documents = [0]
        self.num_tokens = 0
        self.hash = hashlib.sha256()
        self.file = self._temporary(".bin").open("wb")

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    def _temporary(self, suffix: str) -> Path:
        return beside(self.prefix, f"{suffix}.part")

    def add(self, sequences: list[list[int]]) -> None:
        for ids in sequences:
            data = np.asarray(ids, dtype=np.int64).astype(self.dtype).tobytes()
            self.file.write(data)
            self.hash.update(data)
            self.sizes.append(len(ids))
            self.num_tokens += len(ids)
        self.documents.append(len(self.sizes))

    def finish(self, tokenizer: Tokenizer, kind: str, eod_appended: bool) -> None:
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        index = megatron.Index(self.dtype, np.array(self.sizes, np.int32), np.array(self.documents, np.int64))
        with self._temporary(".idx").open("wb") as file:
            megatron.write_index(file, index)
        tokenizer_name = "gpt2" if tokenizer.name == "gpt2" else f"{self.prefix.name}.tokenizer.json"
        if tokenizer_name != "gpt2":
            tokenizer.backend.save(str(self._temporary(".tokenizer.json")))
        sidecar = Sidecar(
            kind=kind,
            tokenizer=tokenizer_name,
            tokenizer_identity=tokenizer.identity,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            eod_appended=eod_appended,
            documents=self.num_documents,
            tokens=self.num_tokens,
            dtype=self.dtype.name,
            sha256={
                ".bin": self.hash.hexdigest(),
                ".idx": hashlib.sha256(self._temporary(".idx").read_bytes()).hexdigest(),
            },
        )
        sidecar.write(self._temporary(".json"))
        for suffix in (".bin", ".idx", ".tokenizer.json", ".json"):
            if self._temporary(suffix).exists():
                self._temporary(suffix).replace(beside(self.prefix, suffix))

    def abandon(self) -> None:
        self.file.close()
        for suffix in (".bin", ".idx", ".tokenizer.json", ".json"):
            self._temporary(suffix).unlink(missing_ok=True)
