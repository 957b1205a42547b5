"""One row that is to be continued among others, and what comes out of it."""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field

from gptworks.config.schema import GenerateConfig
from gptworks.generate.sampler import Row
from gptworks.generate.text import TextOut


@dataclass(frozen=True)
class ScoredToken:
    """A token, its log-probability under the model before any setting, and the likeliest tokens in its place."""

    token: int
    logprob: float = math.nan  # where nobody asked
    alternatives: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class RowRequest:
    """What is asked for, and how far it has come. Only the scheduler changes it, but for `is_cancelled`."""

    row: Row  # prompt, random generator, number of new tokens (0: none, if the prompt is scored)
    cfg: GenerateConfig
    text: TextOut | None = None  # needed where text is streamed or ends it
    call: Hashable = 0  # rows of one call take turns with those of others
    is_streamed: bool = False  # tell every token, not only the end
    wants_logprobs: bool = False
    num_alternatives: int = 0
    score_prompt: bool = False
    deadline: float | None = None  # of time.monotonic()

    slot: int | None = None
    num_read: int = 0
    is_cancelled: bool = False
    finish: str | None = None  # eod, length, stop, cancelled, deadline or error
    error: Exception | None = None
    scores: list[ScoredToken] = field(default_factory=list)
    prompt_scores: list[ScoredToken] = field(default_factory=list)  # from the second token on

    @property
    def unread(self) -> list[int]:
        num_prompt = len(self.row.prompt_tokens)
        if self.num_read >= num_prompt:
            return self.row.tokens[self.num_read - num_prompt :]
        return self.row.prompt_tokens[self.num_read :]

    @property
    def num_drawn(self) -> int:
        """With the end of document that is not among the tokens."""
        return len(self.row.tokens) + (self.finish == "eod")

    @property
    def has_read_prompt(self) -> bool:
        return self.num_read >= len(self.row.prompt_tokens)


@dataclass(frozen=True)
class Progress:
    """What a step brought to a row: text that can be shown, tokens; at its end, why it ended."""

    request: RowRequest
    text: str
    tokens: tuple[ScoredToken, ...]
    finish: str | None
