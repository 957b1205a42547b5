"""/v1/completions: text that goes on from a prompt, and how likely a text is (`echo` with `logprobs`)."""

import math
from typing import Any

from gptworks.generate.row_request import Progress, RowRequest, ScoredToken
from gptworks.serve.answer import Answer
from gptworks.serve.api_error import ApiError
from gptworks.serve.rows import room_for, rows_from, settings_from, tokens_of
from gptworks.serve.schema import CompletionRequest
from gptworks.serve.served_model import ServedModel
from gptworks.serve.service import Call

USUAL_TOKENS = 16  # as OpenAI's API has it


def prompts_of(served: ServedModel, body: CompletionRequest) -> list[list[int]]:
    prompt = body.prompt
    is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
    prompts: Any = [prompt] if is_one else prompt
    return [tokens_of(served, each, number) for number, each in enumerate(prompts, start=1)]


def answer_to(call: Call, body: CompletionRequest, prompts: list[list[int]]) -> "CompletionAnswer":
    if body.stream and body.best_of is not None and body.best_of > (body.n or 1):
        raise ApiError(400, "best_of: cannot be streamed; which is best is known at the end.", param="best_of")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens: got 0; needs 1 or more, or echo to score the prompt alone.", param="max_tokens"
        )
    rooms = [room_for(call.served, prompt, body.max_tokens, USUAL_TOKENS) for prompt in prompts]
    cfg = settings_from(body, max(rooms), body.best_of)
    rows = rows_from(call.served, prompts, rooms, body, cfg)
    if body.logprobs is not None:
        for row in rows:
            row.wants_logprobs, row.num_alternatives = True, body.logprobs
            row.score_prompt = bool(body.echo)
    return CompletionAnswer(call, rows, body)


class CompletionAnswer(Answer):
    prefix, object_name, chunk_name = "cmpl-", "text_completion", "text_completion"
    body: CompletionRequest

    def __init__(self, call: Call, rows: list[RowRequest], body: CompletionRequest) -> None:
        super().__init__(call, rows, body)
        self._num_shown: dict[int, int] = {}

    def choice(self, index: int, row: RowRequest) -> dict[str, Any]:
        prompt = self._prompt_text(row) if self.body.echo else ""
        scores = [*self._prompt_scores(row), *row.scores]
        begin = len(self._prompt_text(row)) if self._wants_logprobs and not self.body.echo else 0
        choice = {"index": index, "text": prompt + self.text(row), "logprobs": self._logprobs(scores, begin)}
        return {**choice, **self.end_of(row), **self._ids(row)}

    def piece(self, index: int, progress: Progress, *, is_first: bool) -> dict[str, Any]:
        row = progress.request
        has_prompt = is_first and bool(self.body.echo)
        scores = [*(self._prompt_scores(row) if has_prompt else []), *progress.tokens]
        text = (self._prompt_text(row) if has_prompt else "") + progress.text
        done = self._num_shown.get(index, 0)
        self._num_shown[index] = done + len(progress.tokens)
        begin = 0
        if self._wants_logprobs and not has_prompt:
            before = [score.token for score in row.scores[:done]]
            begin = len(self._prompt_text(row)) + self.texts.offsets([*before, 0])[-1]
        ids = {"token_ids": [score.token for score in progress.tokens]} if self.body.return_token_ids else {}
        if ids and is_first:
            ids["prompt_token_ids"] = row.row.prompt_tokens
        return {"index": index, "text": text, "logprobs": self._logprobs(scores, begin), **ids}

    @property
    def _wants_logprobs(self) -> bool:
        return self.body.logprobs is not None

    def _prompt_text(self, row: RowRequest) -> str:
        return self.served.tokenizer.decode(row.row.prompt_tokens)

    def _prompt_scores(self, row: RowRequest) -> list[ScoredToken]:
        """The scores of the prompt's tokens; of the first one nothing is known."""
        return [ScoredToken(row.row.prompt_tokens[0]), *row.prompt_scores] if row.score_prompt else []

    def _ids(self, row: RowRequest) -> dict[str, Any]:
        if not self.body.return_token_ids:
            return {}
        return {"token_ids": row.row.tokens, "prompt_token_ids": row.row.prompt_tokens}

    def _logprobs(self, scores: list[ScoredToken], begin: int) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        tokens = [score.token for score in scores]
        is_known = [not math.isnan(score.logprob) for score in scores]
        tops = [self._alternatives(score) if known else None for score, known in zip(scores, is_known, strict=True)]
        return {
            "tokens": [self.texts.text_of(token) for token in tokens],
            "token_logprobs": [score.logprob if known else None for score, known in zip(scores, is_known, strict=True)],
            "top_logprobs": tops if self.body.logprobs else None,
            "text_offset": self.texts.offsets(tokens, begin),
            **({"alternatives": [self._with_ids(score) for score in scores]} if self.body.return_token_ids else {}),
        }

    def _with_ids(self, score: ScoredToken) -> list[dict[str, Any]]:
        """Two tokens may have the same text: who goes on from one needs its number."""
        texts = self.texts
        return [
            {"id": token, "token": texts.text_of(token), "logprob": logprob} for token, logprob in score.alternatives
        ]

    def _alternatives(self, score: ScoredToken) -> dict[str, float]:
        """The likeliest tokens; two that look the same cannot both be named, and the likelier one is."""
        logprobs: dict[str, float] = {}
        for token, logprob in score.alternatives:
            logprobs.setdefault(self.texts.text_of(token), logprob)
        return logprobs
