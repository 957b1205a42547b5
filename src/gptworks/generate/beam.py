"""Beam search: several texts of each prompt are followed at the same time, and the best finished ones are kept.

Step by step as Hugging Face does it, or as Paddle does (`rules: paddle`). With groups each one searches alone, but
its scores are lowered for tokens that earlier groups took in the same step.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.result import Finish, Sequence
from gptworks.generate.rules import Past, adjusted, require_a_choice
from gptworks.generate.sampler import IsStop


@dataclass(frozen=True)
class Beam:
    tokens: list[int]
    logprobs: list[float]
    total: float  # sum of the adjusted log-probabilities; -inf = no beam, only its place


@dataclass(frozen=True)
class Candidate:
    beam: Beam  # with the new token
    parent: int
    finish: Finish | None


class Group:
    """The beams of one prompt that compete with each other."""

    def __init__(self, prompt: int, tokens: list[int], size: int, limit: int, cfg: GenerateConfig) -> None:
        self.prompt, self.prompt_tokens, self.size, self.limit, self.cfg = prompt, tokens, size, limit, cfg
        # All start alike: only the first may go on, or they would all choose the same tokens.
        self.beams = [Beam([], [], 0.0 if place == 0 else -math.inf) for place in range(size)]
        self.parents = list(range(size))
        self.finished: list[Sequence] = []
        self.is_done = False

    def step(self, logits_KV: Tensor, taken: list[int], eod_id: int | None, is_stop: IsStop) -> None:
        """From the logits after each beam to the next beams, their `parents`, and what has finished."""
        ranked = self._candidates(logits_KV, taken, eod_id, is_stop)
        for candidate in ranked[: self.size]:
            if candidate.finish is not None and not (self._is_paddle and candidate.finish == "length"):
                self._finish(candidate)
        going_on = [candidate for candidate in ranked if candidate.finish is None or self._is_paddles_last(candidate)]
        going_on = going_on[: self.size]
        best_of_all = ranked[0].beam.total
        self.parents = [candidate.parent for candidate in going_on]
        self.beams = [candidate.beam for candidate in going_on]
        self.is_done = not going_on or self._is_over(best_of_all)
        if not self.is_done and len(self.beams[0].tokens) == self.limit:  # Paddle: what is left at the end counts
            for candidate in going_on:
                self._finish(candidate)
            self.is_done = True
        while len(self.beams) < self.size:
            self.beams.append(Beam(self.beams[0].tokens, [], -math.inf) if self.beams else Beam([], [], -math.inf))
            self.parents.append(self.parents[0] if self.parents else 0)

    @property
    def _is_paddle(self) -> bool:
        return self.cfg.rules == "paddle"

    def _is_paddles_last(self, candidate: Candidate) -> bool:
        return self._is_paddle and candidate.finish == "length"

    def _candidates(self, logits_KV: Tensor, taken: list[int], eod_id: int | None, is_stop: IsStop) -> list[Candidate]:
        """The best continuations of all beams, twice as many as there are beams: some may end here."""
        log_KV = logits_KV.log_softmax(-1)
        total_KV = torch.stack(
            [
                adjusted(log_V, Past(self.prompt_tokens, beam.tokens, eod_id, taken), self.cfg) + beam.total
                for beam, log_V in zip(self.beams, log_KV, strict=True)
            ]
        )
        require_a_choice(total_KV)
        vocab_size = total_KV.shape[-1]
        totals, places = total_KV.flatten().topk(min(2 * self.size, total_KV.numel()))
        candidates = []
        for total, place in zip(totals.tolist(), places.tolist(), strict=True):
            if total == -math.inf:
                break
            parent, token = divmod(place, vocab_size)
            before = self.beams[parent]
            beam = Beam([*before.tokens, token], [*before.logprobs, float(log_KV[parent, token])], total)
            finish: Finish | None = None
            if token == eod_id:
                finish = "eod"
            elif is_stop(self.prompt, beam.tokens):
                finish = "stop"
            elif len(beam.tokens) == self.limit:
                finish = "length"
            candidates.append(Candidate(beam, parent, finish))
        return candidates

    def _finish(self, candidate: Candidate) -> None:
        assert candidate.finish is not None
        beam, ends = candidate.beam, candidate.finish == "eod"
        visible = len(beam.tokens) - 1 if ends else len(beam.tokens)
        score = self._score(beam.total, visible if self._is_paddle else len(beam.tokens))
        result = Sequence(beam.tokens[:visible], beam.logprobs[:visible], candidate.finish, score)
        self.finished = sorted([*self.finished, result], key=lambda one: -one.score)[: self.size]

    def _score(self, total: float, length: int) -> float:
        """Hugging Face counts the end of document, Paddle does not and has a softer scale."""
        scale = (length + 5) / 6 if self._is_paddle else length
        return total / scale**self.cfg.length_penalty

    def _is_over(self, best_of_all: float) -> bool:
        if len(self.finished) < self.size:
            return False
        if self.cfg.early_stopping is True:
            return True
        worst, length = self.finished[-1].score, len(self.beams[0].tokens)
        if self._is_paddle:
            return worst >= self._score(best_of_all, length - 1)
        if self.cfg.early_stopping == "never" and self.cfg.length_penalty > 0:
            length = self.limit
        return self._score(self.beams[0].total, length) <= worst


def search(
    prompts: list[list[int]],
    limits: list[int],
    state: DecodeState,
    cfg: GenerateConfig,
    *,
    eod_id: int | None,
    is_stop: IsStop,
) -> list[list[Sequence]]:
    """The best `num_return_sequences` continuations of each prompt, best first."""
    eod_id = None if cfg.ignore_eod else eod_id
    size = cfg.num_beams // cfg.num_beam_groups
    groups = [
        [Group(number, prompt, size, limits[number], cfg) for _ in range(cfg.num_beam_groups)]
        for number, prompt in enumerate(prompts)
    ]
    first = state.read_prompts()
    state.select([number for number in range(len(prompts)) for _ in range(cfg.num_beams)])
    logits = {row: first[row // cfg.num_beams] for row in range(len(prompts) * cfg.num_beams)}
    while logits:
        rows, next_tokens = list(range(len(prompts) * cfg.num_beams)), {}
        for number, of_prompt in enumerate(groups):
            taken: list[int] = []
            for place, group in enumerate(of_prompt):
                start = number * cfg.num_beams + place * size
                if group.is_done:
                    continue
                logits_KV = torch.stack([logits[row] for row in range(start, start + size)])
                group.step(logits_KV, taken, eod_id, is_stop)
                if group.is_done:
                    continue
                taken += [beam.tokens[-1] for beam in group.beams if beam.total > -math.inf]
                for beam in range(size):
                    rows[start + beam] = start + group.parents[beam]
                    next_tokens[start + beam] = group.beams[beam].tokens[-1]
        state.select(rows)
        logits = state.read(next_tokens) if next_tokens else {}
    return [
        _best(number, [text for group in of_prompt for text in group.finished], cfg)
        for number, of_prompt in enumerate(groups)
    ]


def _best(number: int, finished: list[Sequence], cfg: GenerateConfig) -> list[Sequence]:
    if len(finished) < cfg.num_return_sequences:
        raise GenerationError(
            f"prompt {number + 1}: {len(finished)} texts were found and {cfg.num_return_sequences} asked for: "
            "the settings forbid nearly every token. Relax logit_bias or no_repeat_ngram, or ask for fewer."
        )
    return sorted(finished, key=lambda text: -text.score)[: cfg.num_return_sequences]
