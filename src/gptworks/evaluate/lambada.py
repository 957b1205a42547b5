"""LAMBADA: does the model know the last word of a passage? There are several ways to ask, each with a name."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gptworks import json_text
from gptworks.errors import DataError, UsageError
from gptworks.evaluate.scoring import Row, Score
from gptworks.tokenizer import Tokenizer


@dataclass(frozen=True)
class Question:
    """What is given and what is asked for, as tokens."""

    context: list[int]
    target: list[int]


@dataclass(frozen=True)
class Protocol:
    name: str
    meaning: str
    ask: Callable[[str, Tokenizer], Question]
    drops_the_beginning: bool  # of passages that are longer than the context, instead of refusing them


def _strict(text: str, tokenizer: Tokenizer) -> Question:
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    return Question(tokenizer.encode(before), tokenizer.encode(" " + word))


def _last_token(text: str, tokenizer: Tokenizer) -> Question:
    ids = tokenizer.encode(text)
    return Question(ids[:-1], ids[-1:])


def _harness(text: str, tokenizer: Tokenizer) -> Question:
    before, _, word = text.rpartition(" ")
    return encode_pair(before, " " + word, tokenizer)


def encode_pair(context: str, continuation: str, tokenizer: Tokenizer) -> Question:
    """Both in one go, cut where the context alone would end: lm-evaluation-harness's way. White space at the end of
    the context belongs to the continuation; where nothing is left before it, the end of a document is put there."""
    kept = context.rstrip()
    continuation = context[len(kept) :] + continuation
    if kept:
        before = tokenizer.encode(kept)
        return Question(before, tokenizer.encode(kept + continuation)[len(before) :])
    asked = tokenizer.encode(continuation)
    if tokenizer.eod_id is None:
        raise DataError(
            f"no text before {continuation[:40]!r}, and the tokenizer has no end-of-document token to begin with."
        )
    return Question(asked[:1], asked[1:]) if asked[:1] == [tokenizer.eod_id] else Question([tokenizer.eod_id], asked)


PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "strict",
            "last whitespace word, encoded by itself; every token the likeliest (Megatron, PaddleNLP, FleetX, OneFlow)",
            _strict,
            drops_the_beginning=False,
        ),
        Protocol("last-token", "last BPE token only (non-strict)", _last_token, drops_the_beginning=False),
        Protocol(
            "openai",
            "word after the last space, encoded with the passage; greedy match (lm-evaluation-harness lambada_openai)",
            _harness,
            drops_the_beginning=True,
        ),
        Protocol(
            "standard",
            "the same rule on the original lower-case text (lm-evaluation-harness lambada_standard)",
            _harness,
            drops_the_beginning=True,
        ),
    )
}  # fmt: skip


def find_protocol(name: str) -> Protocol:
    if name not in PROTOCOLS:
        raise UsageError(f"--protocol: lambada has none called '{name}'. Protocols: {', '.join(PROTOCOLS)}.")
    return PROTOCOLS[name]


def read_passages(path: Path, limit: int = 0) -> list[str]:
    """The `text` of each line; blank lines do not count."""
    passages: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit and len(passages) == limit:
                    break
                if line.strip():
                    passages.append(_passage(line, f"{path}: line {number}"))
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}). Needed: JSON lines such as lambada_test.jsonl."
        ) from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}). Needed: JSON lines such as lambada_test.jsonl.") from None
    if not passages:
        raise DataError(f"{path}: no passage in it. Needed: one JSON object with 'text' per line.")
    return passages


def _passage(line: str, where: str) -> str:
    try:
        value = json_text.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: not JSON ({error}): {line.strip()[:40]!r}. Needed: one object per line.") from None
    if not isinstance(value, dict):
        raise DataError(f"{where}: holds {line.strip()[:40]!r}, needed a JSON object with 'text'.")
    if "text" not in value:
        raise DataError(f"{where}: has no 'text'; its keys: {', '.join(map(str, value)) or 'none'}.")
    text = value["text"]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: 'text' is {json.dumps(text)[:40]}, needed a passage of words.")
    return text


@dataclass(frozen=True)
class Questions:
    rows: list[Row]
    shortened: int  # passages whose beginning was dropped


def rows_of(
    passages: Sequence[str],
    tokenizer: Tokenizer,
    protocol: Protocol,
    length: int,
    *,
    where: str = "lambada",
    shorten: bool = False,
) -> Questions:
    """`length`: the context of the model, in tokens. `shorten`: under every protocol."""
    rows, shortened = [], 0
    for number, text in enumerate(passages, 1):
        question = protocol.ask(text, tokenizer)
        if not question.context or not question.target:
            raise DataError(
                f"{where}: passage {number} is {text[:40]!r}, which leaves nothing before its last word. "
                "Needed: at least two words."
            )
        tokens = question.context + question.target
        if len(tokens) > length + 1:
            if len(question.target) > length:
                raise DataError(
                    f"{where}: passage {number}: its last word alone has {len(question.target)} tokens, but the "
                    f"model's context is {length}. Use a model with more."
                )
            if not protocol.drops_the_beginning and not shorten:
                raise DataError(
                    f"{where}: passage {number} has {len(tokens)} tokens, but the model's context is {length}, and "
                    f"--protocol {protocol.name} shortens none. Use a model with more, or "
                    "--shorten."
                )
            tokens = tokens[-(length + 1) :]
            shortened += 1
        rows.append(Row(np.array(tokens), len(tokens) - len(question.target)))
    return Questions(rows, shortened)


@dataclass(frozen=True)
class Lambada:
    correct: int
    total: int
    nats: float
    shortened: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total

    @property
    def target_perplexity(self) -> float:
        """exp of the mean over passages of -log p(target), a target counting as one however many tokens it has."""
        mean = self.nats / self.total
        return math.exp(mean) if mean < 700 else math.inf


def summarize(scores: Sequence[Score], shortened: int = 0) -> Lambada:
    return Lambada(
        correct=sum(score.greedy for score in scores),
        total=len(scores),
        nats=-math.fsum(score.log_probability for score in scores),
        shortened=shortened,
    )


def remark_on(protocol: Protocol, passages: Sequence[str]) -> str | None:
    """The two tasks of the harness differ in their data, which a protocol cannot bring along."""
    has_capitals = any(text != text.lower() for text in passages)
    if protocol.name == "standard" and has_capitals:
        return "the data has capital letters, so it is not the text of lambada_standard: the rule of `openai` applied"
    if protocol.name == "openai" and not has_capitals:
        return (
            "the data has no capital letters, so it is not the text of lambada_openai: the rule of `standard` applied"
        )
    return None
