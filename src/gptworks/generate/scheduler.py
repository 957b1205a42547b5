"""Continuous batching: rows join and leave the running batch at any token.   Shapes: M rows that draw, V vocabulary.

A step reads one token of every row that is writing and a piece of some prompts, in one pass of the model, and draws the
next tokens. Nothing here depends on who else is in the batch: a row has its own settings, random generator and place
in the cache. Rows that wait are taken in turn from the calls that sent them, so that a call of many rows does not keep
the others waiting; prompts are read in the order in which rows came in, a bounded piece of each.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gptworks.errors import GenerationError
from gptworks.generate.result import Drawn
from gptworks.generate.row_request import Progress, RowRequest, ScoredToken
from gptworks.generate.sampler import choose, is_plain_greedy, likeliest
from gptworks.generate.slots import LEAST_SHARED, Slots, common_length
from gptworks.generate.token_reader import TokenReader
from gptworks.model.cache import KVCache

PROMPT_TOKENS_PER_STEP = 256  # of all prompts together: how much longer a step may take than one of writing alone
PROMPT_TOKENS_PER_ROW = 128  # of one prompt, where others wait to be read too
SCORED_TOKENS_PER_STEP = 64  # of which every one has the logits of the whole vocabulary
WORTH_WAITING = 4 * LEAST_SHARED  # so many tokens that another row is reading are not read at the same time


@dataclass
class Counts:
    """Tokens so far; one object may count for several schedulers of one thread."""

    prompt: int = 0  # read
    shared: int = 0  # not read, because they were there
    drawn: int = 0


@dataclass(frozen=True)
class _Piece:
    """What a row reads in a step."""

    request: RowRequest
    tokens: list[int]
    is_last: bool  # then a token is drawn

    @property
    def num_wanted(self) -> int:
        return len(self.tokens) if self.request.score_prompt and not self.request.has_read_prompt else int(self.is_last)


class Scheduler:
    """The rows of one model. `submit` and `cancel` may be called by any thread, `step` by one."""

    def __init__(self, reader: TokenReader, cache: KVCache, *, vocab_size: int, eod_id: int | None) -> None:
        self.reader, self.vocab_size, self.eod_id = reader, vocab_size, eod_id
        self.slots = Slots(cache)
        self.counts = Counts()
        self.batch_size = 0  # rows of the last step
        self._incoming: deque[RowRequest] = deque()
        self._waiting: OrderedDict[Hashable, deque[RowRequest]] = OrderedDict()  # call -> its rows
        self._active: list[RowRequest] = []  # in the order in which they came in
        self._progress: list[Progress] = []
        self._logits_V: Tensor | None = None  # room that every step uses
        self._num_logits = 0  # rows of them that it is for

    def submit(self, request: RowRequest) -> None:
        self._incoming.append(request)

    @staticmethod
    def cancel(request: RowRequest) -> None:
        """Ends a request; its slot is free when the next step begins."""
        request.is_cancelled = True

    @property
    def has_work(self) -> bool:
        return bool(self._incoming or self._waiting or self._active)

    @property
    def num_waiting(self) -> int:
        return len(self._incoming) + sum(map(len, tuple(self._waiting.values())))

    @property
    def num_active(self) -> int:
        return len(self._active)

    def step(self) -> list[Progress]:
        """One token for every row that is writing; what became of whom."""
        while self._incoming:
            request = self._incoming.popleft()
            self._waiting.setdefault(request.call, deque()).append(request)
        self._end_those_not_wanted()
        self._admit()
        pieces = list(self._pieces())
        self.batch_size = len(pieces)
        if pieces:
            try:
                self._advance(pieces, self._read(pieces))
            except Exception as error:
                self._fail_all(error)
                raise
        return self.take_progress()

    def take_progress(self) -> list[Progress]:
        """What became of whom; also after a step that failed."""
        taken, self._progress = self._progress, []
        return taken

    # Who is in the batch

    def _end_those_not_wanted(self) -> None:
        now = time.monotonic()
        for request in [*self._active, *(each for rows in self._waiting.values() for each in rows)]:
            if request.is_cancelled:
                self._end(request, "cancelled")
            elif request.deadline is not None and now > request.deadline:
                self._end(request, "deadline")

    def _end(self, request: RowRequest, finish: str) -> None:
        if request.slot is not None:
            self.slots.free(request.slot)
            request.slot = None
            self._active.remove(request)
        elif request.call in self._waiting:
            rows = self._waiting[request.call]
            rows.remove(request)
            if not rows:
                del self._waiting[request.call]
        request.finish = finish
        text = request.text.close() if request.text is not None and finish in ("eod", "length", "stop") else ""
        self._progress.append(Progress(request, text, (), finish))

    def _admit(self) -> None:
        held_back: set[Hashable] = set()
        while self.slots.num_free:
            calls = [call for call in self._waiting if call not in held_back]
            if not calls:
                return
            call = calls[0]
            request = self._waiting[call][0]
            if self._is_worth_waiting(request):
                held_back.add(call)
                continue
            self._waiting[call].popleft()
            if self._waiting[call]:
                self._waiting.move_to_end(call)
            else:
                del self._waiting[call]
            prompt = request.row.prompt_tokens
            request.slot, request.num_read = self.slots.take(prompt, may_share=not request.score_prompt)
            self.counts.shared += request.num_read
            self._active.append(request)

    def _is_worth_waiting(self, request: RowRequest) -> bool:
        """Whether a row that is being read will soon hold more of this prompt than any does now."""
        if request.score_prompt:
            return False
        prompt = request.row.prompt_tokens[:-1]
        being_read = [each for each in self._active if not each.has_read_prompt]
        soon = max((common_length(each.row.prompt_tokens, prompt) for each in being_read), default=0)
        return soon >= WORTH_WAITING and soon >= self.slots.shared(prompt)[1] + WORTH_WAITING

    # What is read

    def _pieces(self) -> Iterator[_Piece]:
        budget = PROMPT_TOKENS_PER_STEP
        num_unread = sum(not request.has_read_prompt for request in self._active)
        most_of_row = PROMPT_TOKENS_PER_ROW if num_unread > 1 else PROMPT_TOKENS_PER_STEP
        for request in self._active:
            left = request.unread
            if request.has_read_prompt:
                yield _Piece(request, left, True)
                continue
            most = min(budget, SCORED_TOKENS_PER_STEP if request.score_prompt else most_of_row)
            # A scored token costs more than one that is only read.
            cost = PROMPT_TOKENS_PER_STEP // SCORED_TOKENS_PER_STEP if request.score_prompt else 1
            tokens = left[: max(0, min(most, budget // cost))]
            if tokens:
                budget -= len(tokens) * cost
                yield _Piece(request, tokens, len(tokens) == len(left))

    def _read(self, pieces: list[_Piece]) -> Tensor:
        tokens, slots, positions, wanted = list[int](), list[int](), list[int](), list[int]()
        for piece in pieces:
            assert piece.request.slot is not None
            tokens += piece.tokens
            slots += [piece.request.slot] * len(piece.tokens)
            positions += range(piece.request.num_read, piece.request.num_read + len(piece.tokens))
            wanted += range(len(tokens) - piece.num_wanted, len(tokens))
        tokens_N, slots_N, positions_N, wanted_M = (
            torch.tensor(each, dtype=torch.long) for each in (tokens, slots, positions, wanted)
        )
        if len(wanted) > self._num_logits:
            self._num_logits, self._logits_V = len(wanted), None  # what is kept is what the largest step needed
        logits_MV = self.reader.read(tokens_N, slots_N, positions_N, wanted_M, self.slots.cache, self._logits_V)
        self._logits_V = logits_MV.view(-1) if self._logits_V is None else self._logits_V
        # Rows of the embedding beyond the tokenizer exist for alignment only and are never drawn.
        return logits_MV[:, : self.vocab_size]

    # What is drawn

    def _advance(self, pieces: list[_Piece], logits_MV: Tensor) -> None:
        at = 0
        drawing: list[RowRequest] = []
        rows: list[int] = []
        for piece in pieces:
            request, end = piece.request, at + piece.num_wanted
            assert request.slot is not None
            if not request.has_read_prompt:
                self.counts.prompt += len(piece.tokens)
                if request.score_prompt:
                    self._score(request, logits_MV[at:end])
            request.num_read += len(piece.tokens)
            self.slots.tokens[request.slot] += piece.tokens
            if piece.is_last:
                drawing.append(request)
                rows.append(end - 1)
            at = end
        self._draw(drawing, [logits_MV[row] for row in rows])

    def _score(self, request: RowRequest, logits_TV: Tensor) -> None:
        """The tokens of the prompt that follow those just read."""
        follow = request.row.prompt_tokens[request.num_read + 1 : request.num_read + 1 + len(logits_TV)]
        log_TV = logits_TV[: len(follow)].log_softmax(-1)
        request.prompt_scores += [_scored(token, log_V, request) for token, log_V in zip(follow, log_TV, strict=True)]

    def _draw(self, requests: list[RowRequest], rows_of_logits: list[Tensor]) -> None:
        for request, logits_V in zip(requests, rows_of_logits, strict=True):
            if request.row.limit == 0:  # only the prompt was to be scored
                self._end(request, "length")
                continue
            token = likeliest(logits_V) if is_plain_greedy(request.cfg) else None
            try:
                if token is None:
                    token = choose(logits_V, request.row, request.cfg, self.eod_id)
            except GenerationError as error:
                request.error = error
                self._end(request, "error")
                continue
            self._add(request, token, logits_V)

    def _add(self, request: RowRequest, token: int, logits_V: Tensor) -> None:
        self.counts.drawn += 1
        row, before = request.row, len(request.row.tokens)
        scored = _scored(token, logits_V.log_softmax(-1), request) if request.wants_logprobs else ScoredToken(token)
        pieces: list[str] = []

        def is_stop(_: int, tokens: list[int]) -> bool:
            if request.text is not None:
                pieces.append(request.text.add(tokens[-1]))
                return request.text.is_stopped
            return False

        row.add(Drawn(token, scored.logprob), None if request.cfg.ignore_eod else self.eod_id, is_stop)
        is_kept = len(row.tokens) > before  # an end of document is not
        if is_kept:
            request.scores.append(scored)
        if request.is_streamed:
            self._progress.append(Progress(request, "".join(pieces), (scored,) if is_kept else (), None))
        if row.finish is not None:
            self._end(request, row.finish)

    def _fail_all(self, error: Exception) -> None:
        """A fault of ours or too little memory: nobody is left waiting, and nothing in the cache is trusted."""
        for request in list(self._active):
            request.error = error
            self._end(request, "error")
        self.slots.forget()


def _scored(token: int, log_V: Tensor, request: RowRequest) -> ScoredToken:
    if not request.num_alternatives:
        return ScoredToken(token, float(log_V[token]))
    best = log_V.topk(min(request.num_alternatives, len(log_V)))
    return ScoredToken(token, float(log_V[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
