"""What an endpoint makes of the rows of a call: one object, or the events of a stream."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from gptworks.generate.row_request import Progress, RowRequest
from gptworks.serve.rows import failure_of, reason_of, text_of
from gptworks.serve.schema import Sampling
from gptworks.serve.service import Call


class Answer(ABC):
    """The rows are those of the first prompt, then those of the second; a choice is a row that is given out."""

    prefix = ""
    object_name = ""
    chunk_name = ""

    def __init__(self, call: Call, rows: list[RowRequest], body: Sampling) -> None:
        self.call, self.rows, self.body = call, rows, body
        self.served = call.served
        self.texts = self.served.token_texts
        self._head = {"id": f"{self.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": self.served.name}
        self._index = {id(row): index for index, row in enumerate(rows)}
        self._begun: set[int] = set()

    @abstractmethod
    def choice(self, index: int, row: RowRequest) -> dict[str, Any]:
        """A whole one."""

    @abstractmethod
    def piece(self, index: int, progress: Progress, *, is_first: bool) -> dict[str, Any]:
        """What is new of one, in a stream."""

    def whole(self) -> dict[str, Any]:
        for row in self.rows:
            if error := failure_of(row):
                raise error
        choices = [self.choice(index, row) for index, row in enumerate(self.given_out())]
        head = {**self._head, "object": self.object_name}
        return {**head, "choices": choices, "usage": self.usage(), "seed": self.rows[0].cfg.seed}

    def chunks(self, news: list[Progress]) -> Iterator[dict[str, Any]]:
        """Several tokens of a row that have come together go into one chunk."""
        for progress in _joined(news):
            row = progress.request
            if error := failure_of(row) if progress.finish else None:
                raise error
            is_first = id(row) not in self._begun
            self._begun.add(id(row))
            if not (progress.text or progress.tokens or progress.finish):
                continue
            piece = self.piece(self._index[id(row)], progress, is_first=is_first)
            yield self._chunk([{**piece, "finish_reason": reason_of(progress.finish)}])

    def last_chunks(self) -> Iterator[dict[str, Any]]:
        if self.body.wants_usage:
            yield {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if self.body.wants_usage else {}
        return {**self._head, "object": self.chunk_name, "choices": choices, **more}

    def given_out(self) -> list[RowRequest]:
        """With best_of the likeliest rows of each prompt."""
        cfg, number = self.rows[0].cfg, self.body.n or 1
        if not cfg.best_of:
            return self.rows
        best = []
        for begin in range(0, len(self.rows), cfg.best_of):
            of_prompt = self.rows[begin : begin + cfg.best_of]
            best += sorted(of_prompt, key=lambda row: -row.row.result().score)[:number]
        return best

    def usage(self) -> dict[str, int]:
        """A prompt counts once, however many texts it has; a token that ends a document was written."""
        prompts = {row.row.prompt: len(row.row.prompt_tokens) for row in self.rows}
        read, written = sum(prompts.values()), sum(row.num_drawn for row in self.rows)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def end_of(self, row: RowRequest) -> dict[str, Any]:
        """Which stop string it was is not OpenAI's to tell, but others do."""
        return {"finish_reason": reason_of(row.finish), "stop_reason": "stop" if row.finish == "stop" else None}

    def text(self, row: RowRequest) -> str:
        return text_of(self.served, row)


def _joined(news: list[Progress]) -> list[Progress]:
    merged: dict[int, Progress] = {}
    for each in news:
        old = merged.get(id(each.request))
        if old is None:
            merged[id(each.request)] = each
        else:
            merged[id(each.request)] = Progress(
                each.request, old.text + each.text, old.tokens + each.tokens, each.finish
            )
    return list(merged.values())
