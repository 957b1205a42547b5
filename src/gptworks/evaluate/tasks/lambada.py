"""LAMBADA: does the model know the last word of a passage? There are several ways to ask, each with a name."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptworks import json_text
from gptworks.errors import DataError
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
    from gptworks.evaluate.measurement import Measurement
    from gptworks.evaluate.request import Request
    from gptworks.tokenizer import Tokenizer

_NEEDED = "Needed: JSON lines such as lambada_test.jsonl."


@dataclass(frozen=True)
class Question:
    """What is given and what is asked for, as tokens."""

    context: list[int]
    target: list[int]


@dataclass(frozen=True)
class Protocol:
    name: str
    meaning: str
    ask: "Callable[[str, Tokenizer], Question]"
    drops_the_beginning: bool  # of passages that are longer than the context, instead of refusing them


def _strict(text: str, tokenizer: "Tokenizer") -> Question:
    word = text.split()[-1]
    before = text[: text.rfind(word)].strip()
    return Question(tokenizer.encode(before), tokenizer.encode(" " + word))


def _last_token(text: str, tokenizer: "Tokenizer") -> Question:
    ids = tokenizer.encode(text)
    return Question(ids[:-1], ids[-1:])


def _harness(text: str, tokenizer: "Tokenizer") -> Question:
    before, _, word = text.rpartition(" ")
    return encode_pair(before, " " + word, tokenizer)


def encode_pair(context: str, continuation: str, tokenizer: "Tokenizer") -> Question:
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
        raise DataError(f"{path}: cannot be read ({error.strerror}). {_NEEDED}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 ({error.reason}). {_NEEDED}") from None
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
    tokenizer: "Tokenizer",
    protocol: Protocol,
    length: int,
    *,
    where: str = "lambada",
    shorten: bool = False,
) -> Questions:
    """`length`: the context of the model, in tokens. `shorten`: under every protocol."""
    import numpy as np

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
                    f"--protocol {protocol.name} shortens none. Use a model with more, a --protocol that drops the "
                    f"beginning ({', '.join(each.name for each in PROTOCOLS.values() if each.drops_the_beginning)}), "
                    "or --shorten."
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


def _asked(request: "Request", tokenizer: "Tokenizer", length: int) -> tuple[list[str], Questions]:
    """What is measured: the passages, and the questions that they become."""
    passages = read_passages(Path(request.data), request.limit)
    shorten, protocol = request.settings["shorten"], PROTOCOLS[request.protocol]
    return passages, rows_of(passages, tokenizer, protocol, length, where=request.data, shorten=shorten)


def _measure(measurement: "Measurement") -> dict[str, Any]:
    request, shorten = measurement.request, measurement.request.settings["shorten"]
    protocol = PROTOCOLS[request.protocol]
    shortens = "; long passages lose their beginning" if shorten and not protocol.drops_the_beginning else ""
    head = measurement.file_head(f"{protocol.name}: {protocol.meaning}{shortens}")
    passages, questions = _asked(request, measurement.tokenizer, measurement.model.cfg.max_positions)
    scores = measurement.score(head, [[row] for row in questions.rows])
    measured = summarize(scores, questions.shortened)
    values = {name: getattr(measured, name) for name in TASK.metrics}
    values |= {"tokens": sum(score.tokens for score in scores), "shortened": measured.shortened}
    remark = remark_on(protocol, passages)
    return measurement.result(head, [values], [remark] if remark else [])


def _paddle_summary(row: Mapping[str, Any]) -> str:
    return (
        f"number correct: {row['correct']:.4E} | total examples: {row['total']:.4E} | "
        f"avg accuracy: {row['accuracy']:.4E}"
    )


_PADDLE = "PaddleNLP, examples/language_model/gpt, log of run_eval"
_STRICT = "strict last word"
_STRICT_BUGGY = "strict last word; sums slightly off (a batch repeated, the last dropped)"
_STRICT_CUT = "strict last word; drops the last incomplete batch"
_OWN_RULE = "last word, with a filter of stop words"

_PUBLISHED = (
    Published("GPT-2 124M (gpt2-en)", "accuracy", 1678 / 5153, _PADDLE, _STRICT),
    Published("FleetX 345M", "accuracy", 0.4417, FLEETX_README, _STRICT_BUGGY),
    Published("FleetX 345M, single card", "accuracy", 2124 / 5153, FLEETX_LOG, _STRICT_BUGGY),
    Published("FleetX 345M, int8 (QAT)", "accuracy", 0.4494, "FleetX/PaddleFleetX, README", _STRICT_BUGGY),
    Published("OneFlow 117M, 500k iterations", "accuracy", 1345 / 5152, "OneFlow-Benchmark", _STRICT_CUT),
    Published("bflm GPT-2", "accuracy", 0.4667, "bflm", "last BPE token"),
    *of_gpt2_paper("accuracy", (0.4599, 0.5548, 0.6012, 0.6324), _OWN_RULE),
    *of_gpt2_paper("target_perplexity", (35.13, 15.60, 10.87, 8.63), _OWN_RULE),
)  # fmt: skip

TASK = Task(
    name="lambada",
    title="LAMBADA accuracy",
    data="JSON lines",
    metrics={
        "correct": Metric("correct", "{:,}", higher_is_better=True),
        "total": Metric("total", "{:,}"),
        "accuracy": Metric("accuracy", "{:.3%}", higher_is_better=True),
        "target_perplexity": Metric("target perplexity"),
    },
    counts=("tokens", "shortened"),
    measure=_measure,
    read=_asked,
    protocols=tuple(PROTOCOLS),
    options=(
        Option(
            "shorten",
            "a passage longer than the context loses its beginning",
            default=False,
            is_refused_elsewhere=False,
        ),
    ),
    published=_PUBLISHED,
    paddle=PaddleLog("number correct", _paddle_summary),
)
