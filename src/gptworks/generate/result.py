"""What a generation is."""

from dataclasses import dataclass
from typing import Literal

Finish = Literal["eod", "length", "stop"]


@dataclass(frozen=True)
class Drawn:
    """A token and its log-probability under the model, before any setting touched the logits."""

    token: int
    logprob: float


@dataclass(frozen=True)
class Sequence:
    """New tokens of one row: the end of document that may follow them is not among them."""

    tokens: list[int]
    logprobs: list[float]
    finish: Finish
    # Mean log-probability of all that was drawn, the end of document included; of a beam, what beams are ranked by.
    score: float


@dataclass(frozen=True)
class Generation:
    """One continuation of a prompt. Where a stop string ended it, `tokens` has its tokens and `text` has not."""

    prompt: str
    text: str
    tokens: list[int]
    logprobs: list[float]  # empty where another engine wrote the text
    finish: Finish
    score: float | None
    seed: int | None = None  # with which the same settings give the same text again
