"""Greedy and sampling: one token after the other for every row."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from gptworks.config.schema import GenerateConfig
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.result import Drawn, Finish, Sequence
from gptworks.generate.rules import Past, adjusted, distribution, require_a_choice
from gptworks.model.init import seed_of

IsStop = Callable[[int, list[int]], bool]  # (prompt, new tokens): does a stop string end here?


class Row:
    """One continuation in the making."""

    def __init__(self, prompt: int, tokens: list[int], generator: torch.Generator, limit: int) -> None:
        self.prompt, self.prompt_tokens, self.generator, self.limit = prompt, tokens, generator, limit
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.finish: Finish | None = None
        self._drawn_logprobs: list[float] = []

    def add(self, drawn: Drawn, eod_id: int | None, is_stop: IsStop) -> None:
        self._drawn_logprobs.append(drawn.logprob)
        if drawn.token == eod_id:
            self.finish = "eod"
            return
        self.tokens.append(drawn.token)
        self.logprobs.append(drawn.logprob)
        if is_stop(self.prompt, self.tokens):
            self.finish = "stop"
        elif len(self.tokens) == self.limit:
            self.finish = "length"

    def result(self) -> Sequence:
        assert self.finish is not None
        score = sum(self._drawn_logprobs) / len(self._drawn_logprobs)
        return Sequence(self.tokens, self.logprobs, self.finish, score)


def rows_of(prompts: list[list[int]], limits: list[int], cfg: GenerateConfig) -> list[Row]:
    """All rows of a prompt follow each other. Each has a random generator of its own, so that what it draws does not
    depend on its neighbours."""
    rows = []
    for number, prompt in enumerate(prompts):
        for copy in range(cfg.best_of or cfg.num_return_sequences):
            seed = seed_of(cfg.seed, "sample", number, *([copy] if copy else []))
            rows.append(Row(number, prompt, torch.Generator().manual_seed(seed), limits[number]))
    return rows


def run(
    rows: list[Row], state: DecodeState, cfg: GenerateConfig, *, eod_id: int | None, is_stop: IsStop
) -> Iterator[dict[int, Drawn]]:
    """Draw until every row has its `finish`; one dictionary {row: what it drew} per step."""
    first = state.read_prompts()
    state.select([row.prompt for row in rows])
    logits = {number: first[row.prompt] for number, row in enumerate(rows)}
    while logits:
        drawn = {number: draw(logits_V, rows[number], cfg, eod_id) for number, logits_V in logits.items()}
        for number, drawn_token in drawn.items():
            rows[number].add(drawn_token, None if cfg.ignore_eod else eod_id, is_stop)
        yield drawn
        going_on = {number: drawn_token.token for number, drawn_token in drawn.items() if rows[number].finish is None}
        logits = state.read(going_on) if going_on else {}


def draw(logits_V: Tensor, row: Row, cfg: GenerateConfig, eod_id: int | None) -> Drawn:
    if is_plain_greedy(cfg):  # a few passes over the vocabulary instead of ten
        best, at = logits_V.max(-1)
        if math.isfinite(value := float(best)):
            return Drawn(int(at), value - float(logits_V.logsumexp(-1)))
    token = choose(logits_V, row, cfg, eod_id)
    return Drawn(token, float(logits_V.log_softmax(-1)[token]))


def choose(logits_V: Tensor, row: Row, cfg: GenerateConfig, eod_id: int | None) -> int:
    past = Past(row.prompt_tokens, row.tokens, None if cfg.ignore_eod else eod_id)
    if cfg.strategy == "greedy":
        return int(require_a_choice(adjusted(logits_V, past, cfg)).argmax())
    return drawn_from(distribution(logits_V, past, cfg), row.generator)


def drawn_from(probabilities_V: Tensor, generator: torch.Generator) -> int:
    """By one random number: torch.multinomial draws one for every token of the vocabulary, a millisecond of them."""
    mass_V = probabilities_V.cumsum(-1, dtype=torch.float64)
    at = torch.rand((), dtype=torch.float64, generator=generator) * mass_V[-1]
    # The first whose mass is beyond it, which is none of probability 0; where rounding leaves none, the last that has.
    place = int(torch.searchsorted(mass_V, at, right=True))
    return place if place < len(mass_V) else int(torch.searchsorted(mass_V, mass_V[-1]))


def is_plain_greedy(cfg: GenerateConfig) -> bool:
    """Whether the likeliest token is drawn, whatever the row has read."""
    return (
        cfg.strategy == "greedy"
        and cfg.rules != "mindformers"
        and not cfg.logit_bias
        and cfg.repetition_penalty == 1.0
        and cfg.presence_penalty == cfg.frequency_penalty == 0.0
        and cfg.no_repeat_ngram == cfg.min_new_tokens == 0
    )


def likeliest(logits_V: Tensor) -> int | None:
    """The first of the largest; None where one is no number. numpy's is twenty times as fast as torch's."""
    values_V = logits_V.numpy()
    at = int(values_V.argmax())
    return at if math.isfinite(values_V[at]) else None
