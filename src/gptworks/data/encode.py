"""A block of text to tokens: what a worker does."""

import os
import signal
import threading
import zlib
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from gptworks import limits
from gptworks.data import corpus
from gptworks.data.text_blocks import SAFE_CUT, Block, TextRules
from gptworks.errors import DataError, TokenizerError
from gptworks.tokenizer import Tokenizer
from gptworks.tokenizer.characters import CharacterTokenizer
from gptworks.tokenizer.fast import FastEncoder, agrees, fast_encoder, is_plain_byte_level

_PIECE_BYTES = 1 << 20  # of a long document, encoded at a time: the reference library needs some 100 bytes a token
_GROUP_PIECES = 4  # of those, given to the reference library at a time
_SAMPLE = 400  # characters compared with the reference in each block


@dataclass(frozen=True)
class Encoded:
    """The tokens of a block. Sequences that a neighbouring block shares are told by the block."""

    tokens: bytes
    sizes: np.ndarray  # int64, tokens of each sequence
    checksum: int  # of the tokens
    characters: int
    text_bytes: int
    empty: int  # documents without a token
    num_lines: int
    problems: list[tuple[int, str]]
    disagreement: str = ""  # a text on which the quick encoder and the reference differ


class Encoder:
    """Tokenizer and rules, ready to encode blocks."""

    def __init__(
        self, tokenizer: Tokenizer, rules: TextRules, dtype: np.dtype, *, append_eod: bool, may_be_quick: bool
    ) -> None:
        self.tokenizer, self.rules, self.dtype, self.append_eod = tokenizer, rules, dtype, append_eod
        self.quick: FastEncoder | None = fast_encoder(tokenizer) if may_be_quick else None
        self.may_cut = is_plain_byte_level(tokenizer) or isinstance(tokenizer, CharacterTokenizer)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a worker that starts from nothing: the quick library's tables are built again there."""
        return _built_again, (self.tokenizer, self.rules, self.dtype, self.append_eod, self.quick is not None)

    def encode(self, block: Block) -> Encoded:
        parsed = corpus.parse(block, self.rules)
        texts = [text for document in parsed.documents for text in document]
        as_bytes = [text.encode() for text in texts]
        for text in as_bytes:
            _require_short_runs(text, block.name)
        try:
            tokens, sizes = self._ids(texts, as_bytes)
        except TokenizerError as error:
            raise TokenizerError(f"{block.name}: {error}") from None
        except BaseException as error:
            if self.quick is None or isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            # A panic of the quick library, or text that it refuses: the reference encodes all, as after a wrong id.
            return _nothing(disagreement=texts[0][:_SAMPLE] or " ")
        tokens, sizes, empty = self._finish_documents(tokens, sizes, block)
        data = tokens.astype(self.dtype).tobytes()
        return Encoded(
            tokens=data,
            sizes=sizes,
            checksum=zlib.crc32(data),
            characters=sum(map(len, texts)),
            text_bytes=sum(map(len, as_bytes)),
            empty=empty,
            num_lines=parsed.num_lines,
            problems=parsed.problems,
            disagreement=self._disagreement(texts),
        )

    def _ids(self, texts: list[str], as_bytes: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        if self.quick is not None:
            return self.quick.encode(as_bytes)
        pieces, owners = texts, None
        if self.may_cut and max(map(len, as_bytes)) > _PIECE_BYTES:
            cut = [_pieces(text) for text in as_bytes]
            pieces = [piece.decode() for document in cut for piece in document]
            owners = np.repeat(np.arange(len(cut)), [len(document) for document in cut])
        # A long document is encoded some pieces at a time: the library's own objects take many times the text.
        group = len(pieces) if owners is None else _GROUP_PIECES
        encoded = [self._reference_ids(pieces[at : at + group]) for at in range(0, len(pieces), group)]
        tokens, sizes = (np.concatenate(parts) for parts in zip(*encoded, strict=True))
        if owners is not None:
            sizes = np.bincount(owners, weights=sizes, minlength=len(texts)).astype(np.int64)
        return tokens, sizes

    def _reference_ids(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids = self.tokenizer.encode_batch(pieces)
        sizes = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter((i for row in ids for i in row), np.uint32, int(sizes.sum())), sizes

    def _finish_documents(
        self, tokens: np.ndarray, sizes: np.ndarray, block: Block
    ) -> tuple[np.ndarray, np.ndarray, int]:
        """Leave out documents without a token; mark the ends of those that end here."""
        per_document = len(self.rules.keys)
        last = sizes.reshape(-1, per_document)[:, -1]
        is_part = np.zeros(len(last), dtype=bool)
        if len(last):
            is_part[0] |= block.continues
            is_part[-1] |= block.unfinished
        keep = (last > 0) | is_part
        empty = int(len(keep) - keep.sum())
        if empty:
            tokens = tokens[np.repeat(np.repeat(keep, per_document), sizes)]
            sizes = sizes[np.repeat(keep, per_document)]
        eod_id = self.tokenizer.eod_id if self.append_eod else None
        if eod_id is not None and len(sizes):
            sizes = sizes.copy()
            ends_here = np.ones(len(sizes) // per_document, dtype=bool)
            ends_here[-1] = not block.unfinished
            sizes[per_document - 1 :: per_document] += ends_here
            ends = np.cumsum(sizes)[per_document - 1 :: per_document][ends_here]
            marked = np.empty(int(sizes.sum()), np.uint32)
            is_text = np.ones(len(marked), dtype=bool)
            is_text[ends - 1] = False
            marked[is_text] = tokens
            marked[ends - 1] = eod_id
            tokens = marked
        return tokens, sizes.astype(np.int64), empty

    def _disagreement(self, texts: list[str]) -> str:
        """A piece of this block that the two encoders differ on. Texts outside ASCII are looked at first."""
        if self.quick is None or not texts:
            return ""
        unusual = next((text for text in texts if not text.isascii()), None)
        samples = [texts[len(texts) // 2][:_SAMPLE]]
        if unusual is not None:
            at = next(i for i, character in enumerate(unusual) if not character.isascii())
            samples.append(unusual[max(0, at - _SAMPLE // 2) :][:_SAMPLE])
        return next((text for text in samples if not agrees(self.quick, self.tokenizer, text)), "")


_KINDS = np.full(256, 3, np.uint8)  # of bytes: 0 blanks, 1 digits, 2 letters and all beyond ASCII, 3 marks
_KINDS[[*b" \t\n\r\f\v"]] = 0
_KINDS[[*b"0123456789"]] = 1
_KINDS[[*range(ord("A"), ord("Z") + 1), *range(ord("a"), ord("z") + 1), *range(128, 256)]] = 2


def _require_short_runs(text: bytes, name: str) -> None:
    """Pre-tokenizers keep such a run together, and encoding it takes 160 times its size.

    Languages that are written without blanks have runs too: of sentences, not of megabytes.
    """
    most = limits.RUN_BYTES.value
    if len(text) <= most:
        return
    data = np.frombuffer(text, np.uint8)
    kinds = _KINDS[data]
    # Chinese and Japanese commas and full stops, U+3001, U+3002, U+FF00 to U+FF3F, are marks.
    first, second = data[:-1], data[1:]
    kinds[:-1][((first == 0xE3) & (second == 0x80)) | ((first == 0xEF) & (second == 0xBC))] = 3
    ends = np.flatnonzero(np.diff(kinds, append=np.uint8(4)))
    lengths = np.diff(ends, prepend=-1)
    longest = int(lengths.argmax())
    if lengths[longest] > most:
        kind = ("blanks", "digits", "letters", "marks")[kinds[ends[longest]]]
        start = int(ends[longest] - lengths[longest] + 1)
        raise DataError(
            f"{name}: {lengths[longest]:,} bytes of {kind} in a row, {text[start : start + 20]!r}..., needed at most "
            f"{most:,}. Remove them, or look at what it is. {limits.RUN_BYTES.advice(int(lengths[longest]))}"
        )


def _pieces(text: bytes) -> list[bytes]:
    """A long text cut where the tokenizer cuts anyway."""
    pieces, start = [], 0
    while len(text) - start > _PIECE_BYTES and (cut := SAFE_CUT.search(text, start + _PIECE_BYTES)):
        pieces.append(text[start : cut.end()])
        start = cut.end()
    return [*pieces, text[start:]]


def _nothing(disagreement: str) -> Encoded:
    return Encoded(b"", np.empty(0, np.int64), 0, 0, 0, 0, 0, [], disagreement)


def _built_again(
    tokenizer: Tokenizer, rules: TextRules, dtype: np.dtype, append_eod: bool, may_be_quick: bool
) -> Encoder:
    return Encoder(tokenizer, rules, dtype, append_eod=append_eod, may_be_quick=may_be_quick)


_encoder: Encoder | None = None


def start_worker(encoder: Encoder, lock: IO[bytes] | None) -> None:
    """In a worker process: leave Ctrl-C and the parent's lock to the parent, and end when the parent does."""
    from multiprocessing import parent_process

    global _encoder
    if lock is not None:
        lock.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    parent = parent_process()

    def follow() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=follow, daemon=True).start()
    _encoder = encoder


def encode_in_worker(block: Block) -> Encoded:
    assert _encoder is not None
    return _encoder.encode(block)
