"""/v1/chat/completions: a conversation, in the words of the model's own template."""

from typing import Any

from gptworks.errors import GPTWorksError
from gptworks.generate.row_request import Progress, RowRequest, ScoredToken
from gptworks.serve.answer import Answer
from gptworks.serve.api_error import ApiError
from gptworks.serve.rows import room_for, rows_from, settings_from, tokens_of
from gptworks.serve.schema import ChatMessage, ChatRequest
from gptworks.serve.served_model import ServedModel
from gptworks.serve.service import Call
from gptworks.tokenizer import chat


def prompt_of(served: ServedModel, messages: list[ChatMessage]) -> list[int]:
    if not served.has_chat_template:
        raise ApiError(
            400,
            f"{served.name} is a base model: it goes on from a text and has no chat template. Use /v1/completions.",
            param="model",
            code="no_chat_template",
        )
    turns = [_plain(message) for message in messages]
    if "developer" not in (served.tokenizer.special.chat_template or ""):
        # OpenAI's new word for it, which a template that does not know it leaves out or refuses.
        turns = [{**each, "role": "system"} if each["role"] == "developer" else each for each in turns]
    try:
        text = chat.render(served.tokenizer, turns, add_generation_prompt=True)
    except GPTWorksError as error:
        raise ApiError(400, f"messages: {error}", param="messages") from None
    return tokens_of(served, text, 1)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """Content may come as a list of parts; templates want text."""
    plain = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        parts = message.content
        if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in parts):
            raise ApiError(400, "messages: a part of the content is not text, and only text is read.", param="messages")
        plain["content"] = "".join(part["text"] for part in parts)
    return plain


def answer_to(call: Call, body: ChatRequest, prompt: list[int]) -> "ChatAnswer":
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: needs logprobs: true.", param="top_logprobs")
    room = room_for(call.served, prompt, body.max_completion_tokens or body.max_tokens, None)
    rows = rows_from(call.served, [prompt], [room], body, settings_from(body, room))
    if body.logprobs:
        for row in rows:
            row.wants_logprobs, row.num_alternatives = True, body.top_logprobs or 0
    return ChatAnswer(call, rows, body)


class ChatAnswer(Answer):
    prefix, object_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    body: ChatRequest

    def choice(self, index: int, row: RowRequest) -> dict[str, Any]:
        message = {"role": "assistant", "content": self.text(row), "refusal": None}
        ids = {"token_ids": row.row.tokens} if self.body.return_token_ids else {}
        return {"index": index, "message": message, "logprobs": self._logprobs(row.scores), **self.end_of(row), **ids}

    def piece(self, index: int, progress: Progress, *, is_first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if is_first else {}
        if progress.text or is_first:
            delta["content"] = progress.text
        ids = {"token_ids": [score.token for score in progress.tokens]} if self.body.return_token_ids else {}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(list(progress.tokens)), **ids}

    def _logprobs(self, scores: list[ScoredToken]) -> dict[str, Any] | None:
        if not self.body.logprobs:
            return None
        content = [
            {
                **self._token(score.token, score.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in score.alternatives],
            }
            for score in scores
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        entry = {"token": self.texts.text_of(token), "logprob": logprob, "bytes": list(self.texts.bytes_of(token))}
        return {**entry, **({"id": token} if self.body.return_token_ids else {})}
