"""Perplexity of WikiText: one stream of tokens under a sliding window, as Megatron and the systems after it count."""

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks.errors import DataError, UsageError
from gptworks.evaluate.rows import Row, Score
from gptworks.evaluate.task import (
    FLEETX_LOG,
    FLEETX_README,
    Metric,
    Option,
    PaddleLog,
    Published,
    Task,
    of_gpt2_paper,
)

if TYPE_CHECKING:
    import numpy as np

    from gptworks.evaluate.measurement import Measurement
    from gptworks.evaluate.request import Request
    from gptworks.tokenizer import Tokenizer

PROTOCOLS = ("detokenized", "as-is")
_HIGHEST_LOSS = 20.0  # perplexities are exp(min(20, loss)), as in the documents
_NEEDED = "Needed: a text file such as wiki.valid.tokens."


# Text


def detokenize(text: str) -> str:
    """The spaces that WikiText's word tokenizer put in, taken out again. The order of the rules decides the result."""
    text = text.replace("s '", "s'")
    text = _apply_slash_rule(text)
    for sign in "-,.":
        text = text.replace(f" @{sign}@ ", sign)
    for sign in ":;.!?,":
        text = text.replace(f" {sign} ", f"{sign} ")
    for opening, closing in ("()", "[]", "{}", '""', "''"):
        text = _trim_between(text, opening, closing)
    for signs in (4, 3, 2):  # headings
        text = text.replace(" ".join("=" * signs), "=" * signs)
    text = text.replace(" ° ", "°")
    text = text.replace(" \n", "\n").replace("\n ", "\n")
    return text.replace(" N ", " 1 ").replace(" 's", "'s")


def _apply_slash_rule(text: str) -> str:
    """Meant for years such as ' 98, but the original is written with slashes, so that it finds them only between two,
    and puts its own pattern there instead of the digit. Kept, because figures are compared with the original's."""
    for digit in "0123456789":
        text = text.replace(f"/' {digit}/", "/'[0-9]/")
    return text


def _trim_between(text: str, opening: str, closing: str) -> str:
    """No white space just inside a pair. A pair is an opening sign and the next closing one, wherever that is: quotes
    pair up by turns over the whole text, across lines."""
    pieces, at = [], 0
    while (begin := text.find(opening, at)) >= 0 and (end := text.find(closing, begin + 1)) >= 0:
        pieces += [text[at : begin + 1], text[begin + 1 : end].strip(), closing]
        at = end + 1
    return "".join([*pieces, text[at:]])


@dataclass(frozen=True)
class Stream:
    """A file as the model sees it, and how many pieces it had between single spaces before that."""

    path: Path
    tokens: "np.ndarray"
    num_original: int

    @property
    def token_ratio(self) -> float:
        return (len(self.tokens) - 1) / (self.num_original - 1)


def read_stream(path: Path, tokenizer: "Tokenizer", protocol: str = "detokenized") -> Stream:
    import numpy as np

    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_NEEDED}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 at byte {error.start}. {_NEEDED}") from None
    if not text.strip():
        raise DataError(f"{path}: empty. {_NEEDED}")
    num_original = len(text.strip().split(" "))
    ids = tokenizer.encode(detokenize(text) if protocol == "detokenized" else text)
    if num_original < 2 or len(ids) < 2:
        raise DataError(f"{path}: {len(ids)} tokens in {num_original} words. Needed: at least 2 words of text.")
    return Stream(path, np.array(ids, dtype=np.int64), num_original)


# Windows


def num_windows(num_tokens: int, overlap: int) -> int:
    """As the systems count them; the last ones may have nothing left to score."""
    targets = num_tokens - 1
    return max(math.ceil(max(targets - overlap, 0) / overlap) + 1, 1)


def window_rows(stream: "np.ndarray", length: int, overlap: int) -> list[Row]:
    """Windows of `length` targets begin every `overlap` tokens. The first scores all of its targets, each later one its
    last `overlap`: every token of the stream but the first is scored once. Windows without any are left out."""
    if not 1 <= overlap <= length:
        raise UsageError(f"--overlap: got {overlap}; needs 1 to {length}, the context of the model.")
    rows = []
    for window in range(num_windows(len(stream), overlap)):
        start = window * overlap
        first = 1 if window == 0 else length - overlap + 1
        tokens = stream[start : start + length + 1]
        if len(tokens) > first:
            rows.append(Row(tokens, first))
    return rows


# Result


@dataclass(frozen=True)
class WikiText:
    nats: float
    tokens: int  # scored
    windows: int
    token_ratio: float
    text_bytes: int | None  # of the scored tokens, after detokenizing; None when the vocabulary does not tell

    @property
    def loss(self) -> float:
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        return math.exp(min(_HIGHEST_LOSS, self.loss))

    @property
    def adjusted_perplexity(self) -> float:
        """Per piece of the file instead of per token."""
        return math.exp(min(_HIGHEST_LOSS, self.loss * self.token_ratio))

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None


def summarize(
    stream: Stream, rows: Sequence[Row], scores: Sequence[Score], byte_lengths: "np.ndarray | None"
) -> WikiText:
    text_bytes = None
    if byte_lengths is not None:
        text_bytes = sum(int(byte_lengths[row.tokens[row.first :]].sum()) for row in rows)
    return WikiText(
        nats=-math.fsum(score.log_probability for score in scores),
        tokens=sum(score.tokens for score in scores),
        windows=len(rows),
        token_ratio=stream.token_ratio,
        text_bytes=text_bytes,
    )


def protocol_name(protocol: str, overlap: int | None) -> str:
    window = f"sliding window, overlap {overlap}" if overlap else "windows side by side"
    return f"wikitext, {window}, " + ("detokenized (Megatron)" if protocol == "detokenized" else "text as it is")


# The task


def _asked(request: "Request", tokenizer: "Tokenizer", length: int) -> tuple[Stream, list[Row]]:
    """What is measured: the text, and the windows that it is cut into."""
    stream, overlap = read_stream(Path(request.data), tokenizer, request.protocol), request.settings["overlap"]
    return stream, window_rows(stream.tokens, length, length if overlap is None else overlap)[: request.limit or None]


def _measure(measurement: "Measurement") -> dict[str, Any]:
    request, length, tokenizer = measurement.request, measurement.model.cfg.max_positions, measurement.tokenizer
    overlap = request.settings["overlap"]
    head = measurement.file_head(protocol_name(request.protocol, overlap)) | {"context": length}
    stream, rows = _asked(request, tokenizer, length)
    scores = measurement.score(head, [[row] for row in rows])
    measured = summarize(stream, rows, scores, tokenizer.byte_lengths)
    values = {name: getattr(measured, name) for name in TASK.metrics} | {
        "tokens": measured.tokens,
        "windows": measured.windows,
        "bytes": measured.text_bytes,
        "stream_tokens": len(stream.tokens),
        "original_pieces": stream.num_original,
        "context": length,
    }
    return measurement.result(head, [values])


def _overlap(text: str) -> int | None:
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; needs a number of tokens, or none") from None


def _paddle_summary(row: Mapping[str, Any]) -> str:
    return (
        f"avg loss: {row['loss']:.4E} | ppl: {row['perplexity']:.4E} | "
        f"adjusted ppl: {row['adjusted_perplexity']:.4E} | token ratio: {row['token_ratio']} |"
    )


_MINDFORMERS = "MindFormers, document of gpt2"
_WORDS_2 = "WikiText-2, reversible detokenizers"
_WORDS_103 = "WikiText-103, reversible detokenizers"
_SLIDING = "sliding window, detokenized"
_ZERO_SHOT = "WikiText-2, zero-shot, exp of the mean of batch losses"
_BATCHES = "WikiText-2, exp of the mean of batch losses"

_PUBLISHED = (
    Published("FleetX 345M", "perplexity", 18.01, FLEETX_README, _SLIDING),
    Published("FleetX 345M, single card", "perplexity", 19.21, FLEETX_LOG, _SLIDING),
    Published("FleetX 345M, single card", "adjusted_perplexity", 24.948, FLEETX_LOG, _SLIDING),
    *of_gpt2_paper("adjusted_perplexity", (29.41, 22.76, 19.93, 18.34), _WORDS_2),
    *of_gpt2_paper("adjusted_perplexity", (37.50, 26.37, 22.05, 17.48), _WORDS_103),
    Published("MindFormers gpt2", "perplexity", 25.55, _MINDFORMERS, _ZERO_SHOT),
    Published("MindFormers gpt2, fine-tuned", "perplexity", 22.11, _MINDFORMERS, _BATCHES),
    Published("MindFormers gpt2, LoRA", "perplexity", 22.46, _MINDFORMERS, _BATCHES),
    Published("MindFormers gpt2 13B", "perplexity", 10.49, _MINDFORMERS, _BATCHES),
)  # fmt: skip

TASK = Task(
    name="wikitext",
    title="WikiText perplexity",
    data="a text file",
    metrics={
        "loss": Metric("loss"),
        "perplexity": Metric("perplexity"),
        "adjusted_perplexity": Metric("adjusted (word) perplexity"),
        "token_ratio": Metric("token ratio", "{:.5f}"),
        "bits_per_byte": Metric("bits per byte"),
    },
    counts=("windows", "tokens", "bytes"),
    measure=_measure,
    read=_asked,
    protocols=PROTOCOLS,
    options=(
        Option(
            "overlap",
            "tokens between windows; none = no overlap",
            default=32,
            parse=_overlap,
            metavar="N",
            is_refused_elsewhere=False,
        ),
    ),
    published=_PUBLISHED,
    paddle=PaddleLog("loss", _paddle_summary),
)
