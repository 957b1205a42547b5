"""Several tokens at a time: guessed cheaply, then read by the model in one pass, which takes hardly longer than one.

A token is always drawn from the model's own logits, by the row's own settings and random generator; a guess only says
what to read ahead. So the text is the one that would have been written without guesses, token for token, be it greedy
or sampled, as far as the model's logits do not depend on how many tokens are read at once: not at all in the C++
function, in the last bits with torch. What can be lost is time, so the time is watched.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from gptworks.config.schema import GenerateConfig
from gptworks.errors import GenerationError
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.result import Drawn
from gptworks.generate.sampler import IsStop, Row, choose, draw
from gptworks.generate.slots import common_length

NGRAM = 3  # tokens that must have been there before
MOST_GUESSED = 15
PLAIN_FIRST = 2  # steps without guesses, to know what they take
SHORTEST_REST, LONGEST_REST = 48, 1024  # steps without guesses after guessing was slower


class Guesser(Protocol):
    first_length: int

    def guesses(self, rows: Mapping[int, tuple[Row, int]]) -> dict[int, list[int]]:
        """Row number -> what may follow the tokens it has, at most so many; nothing where there is no idea."""
        ...


class NgramGuesser:
    """What followed the last tokens when they stood in the text before."""

    first_length = 3  # with the token before them a tile of the C++ function

    def __init__(self) -> None:
        self._follows: dict[int, dict[tuple[int, ...], int]] = {}  # row -> tokens -> where they last ended
        self._num_known: dict[int, int] = {}

    def guesses(self, rows: Mapping[int, tuple[Row, int]]) -> dict[int, list[int]]:
        return {number: self._guess(number, row, most) for number, (row, most) in rows.items()}

    def _guess(self, number: int, row: Row, most: int) -> list[int]:
        tokens = [*row.prompt_tokens, *row.tokens]
        follows = self._follows.setdefault(number, {})
        for end in range(max(NGRAM, self._num_known.get(number, 0)), len(tokens)):
            follows[tuple(tokens[end - NGRAM : end])] = end
        self._num_known[number] = len(tokens)
        at = follows.get(tuple(tokens[-NGRAM:]))
        if at is None:
            return []
        for place in range(at, at + most):  # may run into what is being guessed: a short text that repeats itself
            tokens.append(tokens[place])
        return tokens[len(tokens) - most :]


class ModelGuesser:
    """What a smaller model with the same vocabulary would write.

    It draws with a copy of the row's random generator. torch draws by dividing the probabilities by the same random
    numbers, so where the two models agree about the probabilities they mostly draw the same token.
    """

    first_length = 2

    def __init__(self, state: DecodeState, rows: list[Row], cfg: GenerateConfig, eod_id: int | None) -> None:
        self.state, self.cfg, self.eod_id = state, cfg, eod_id
        state.read_prompts()
        state.select([row.prompt for row in rows])

    def guesses(self, rows: Mapping[int, tuple[Row, int]]) -> dict[int, list[int]]:
        guesses: dict[int, list[int]] = {number: [] for number in rows}
        copies = {number: _copy_of(row) for number, (row, _) in rows.items()}
        unread = {number: self._catch_up(number, row) for number, (row, _) in rows.items()}
        more = {n: tokens for n, tokens in unread.items() if 0 < len(tokens) <= self.state.room(n)}
        logits = {number: logits_TV[-1] for number, logits_TV in self.state.read_each(more).items()} if more else {}
        while logits:
            for number, logits_V in list(logits.items()):
                token = self._guess(logits_V, copies[number])
                if token is not None:
                    guesses[number].append(token)
                if token is None or len(guesses[number]) == rows[number][1] or not self.state.room(number):
                    del logits[number]
            logits = self.state.read({number: guesses[number][-1] for number in logits}) if logits else {}
        return guesses

    def _catch_up(self, number: int, row: Row) -> list[int]:
        """Forgets what was guessed and not written; returns what was written and not read."""
        tokens, read = [*row.prompt_tokens, *row.tokens], self.state.tokens[number]
        common = common_length(tokens, read)
        if common < len(read):
            self.state.forget(number, len(read) - common)
        return tokens[common:]

    def _guess(self, logits_V: Tensor, row: Row) -> int | None:
        try:
            token = choose(logits_V, row, self.cfg, self.eod_id)
        except GenerationError:  # nothing can be drawn; what the model itself says of it is told
            return None
        row.tokens.append(token)
        return token


def _copy_of(row: Row) -> Row:
    generator = torch.Generator()
    generator.set_state(row.generator.get_state())
    copy = Row(row.prompt, row.prompt_tokens, generator, row.limit)
    copy.tokens = list(row.tokens)
    return copy


class Pace:
    """Whether guessing is worth its time: seconds per token with it and without it."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=9)
        self._seconds, self._tokens, self._num_steps = 0.0, 0.0, 0  # of steps with guesses, of late
        self._rest, self._next_rest = PLAIN_FIRST, SHORTEST_REST

    @property
    def may_guess(self) -> bool:
        return self._rest == 0

    def record(self, seconds: float, num_tokens: int, *, was_guessed: bool) -> None:
        """A step that wrote so many tokens."""
        if not was_guessed:
            self._plain.append(seconds / num_tokens)
            self._rest = max(0, self._rest - 1)
            return
        self._seconds += seconds
        self._tokens += num_tokens
        self._num_steps += 1
        if self._num_steps < 2 or not self._plain:
            return
        if self._seconds > self._tokens * statistics.median(self._plain):
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            self._seconds, self._tokens, self._num_steps = 0.0, 0.0, 0
        elif self._num_steps >= 8:  # what is long ago counts half
            self._seconds, self._tokens, self._num_steps = self._seconds / 2, self._tokens / 2, self._num_steps // 2
            self._next_rest = SHORTEST_REST


class Speculation:
    """Draws the tokens of rows as `sampler.run` does, and reads guesses ahead."""

    def __init__(
        self, rows: list[Row], state: DecodeState, guesser: Guesser, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.rows, self.state, self.guesser, self.clock = rows, state, guesser, clock
        self.pace = Pace()
        self.num_guessed = self.num_right = 0
        self._lengths = dict.fromkeys(range(len(rows)), guesser.first_length)

    def run(self, cfg: GenerateConfig, *, eod_id: int | None, is_stop: IsStop) -> Iterator[dict[int, Drawn]]:
        first = self.state.read_prompts()
        self.state.select([row.prompt for row in self.rows])
        logits = {number: first[row.prompt][None] for number, row in enumerate(self.rows)}
        guesses: dict[int, list[int]] = {}
        begun: float | None = None
        while logits:
            num_drawn = 0
            for number, logits_TV in logits.items():
                for drawn in self._drawn(number, logits_TV, guesses.get(number, []), cfg, eod_id, is_stop):
                    num_drawn += 1
                    yield {number: drawn}
            if begun is not None:
                self.pace.record(self.clock() - begun, num_drawn, was_guessed=bool(guesses))
            begun = self.clock()
            going_on = [number for number in logits if self.rows[number].finish is None]
            guesses = self._guesses(going_on) if going_on and self.pace.may_guess else {}
            read = {number: [self.rows[number].tokens[-1], *guesses.get(number, [])] for number in going_on}
            logits = self.state.read_each(read) if read else {}

    def _drawn(
        self,
        number: int,
        logits_TV: Tensor,
        guessed: list[int],
        cfg: GenerateConfig,
        eod_id: int | None,
        is_stop: IsStop,
    ) -> Iterator[Drawn]:
        """Tokens until one is not what was guessed, and so not what was read behind it."""
        row, num_right = self.rows[number], 0
        for logits_V in logits_TV:
            drawn = draw(logits_V, row, cfg, eod_id)
            row.add(drawn, None if cfg.ignore_eod else eod_id, is_stop)
            yield drawn
            if row.finish or num_right == len(guessed) or drawn.token != guessed[num_right]:
                break
            num_right += 1
        self._learn(number, len(guessed), num_right)

    def _guesses(self, numbers: list[int]) -> dict[int, list[int]]:
        wanted: dict[int, tuple[Row, int]] = {}
        for number in numbers:
            row = self.rows[number]
            # One token is written anyhow, and the last one is never read.
            most = min(self._lengths[number], row.limit - len(row.tokens) - 1, self.state.room(number) - 1)
            if most > 0:
                wanted[number] = (row, most)
        return {number: tokens for number, tokens in self.guesser.guesses(wanted).items() if tokens}

    def _learn(self, number: int, num_guessed: int, num_right: int) -> None:
        if not num_guessed:
            return
        self.num_guessed += num_guessed
        self.num_right += num_right
        if num_right < num_guessed:
            self.state.forget(number, num_guessed - num_right)
            self._lengths[number] = max(1, num_right)
        else:
            self._lengths[number] = min(2 * self._lengths[number] + 1, MOST_GUESSED)
