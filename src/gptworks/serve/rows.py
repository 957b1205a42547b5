"""A request's words as rows for the engine: settings, prompts as tokens, how much may be written."""

import secrets
from typing import Any

from gptworks.config.schema import GenerateConfig
from gptworks.errors import ConfigError, GPTWorksError
from gptworks.generate.engine import require_in_vocabulary, settings_of
from gptworks.generate.remote import FIELDS
from gptworks.generate.row_request import RowRequest
from gptworks.generate.sampler import rows_of
from gptworks.generate.text import TextOut
from gptworks.serve.api_error import ApiError
from gptworks.serve.schema import MOST_ROWS, Sampling
from gptworks.serve.served_model import ServedModel

_FIELDS = {"temperature": "temperature", **FIELDS, "logit_bias": "logit_bias", "seed": "seed"}


def settings_from(body: Sampling, max_tokens: int, best_of: int | None = None) -> GenerateConfig:
    """The request in the settings of `gptworks generate`. Temperature 0 is greedy."""
    values = {key: getattr(body, field) for key, field in _FIELDS.items()}
    settings: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
    settings = {"seed": secrets.randbelow(2**31), **settings, "stop": body.stops, "max_new_tokens": max(1, max_tokens)}
    if body.temperature == 0:
        settings |= {"strategy": "greedy"}
        del settings["temperature"]
        if (best_of or 1) > (body.n or 1):
            raise ApiError(400, f"best_of: {best_of} with temperature 0, which has one text only.", param="best_of")
    else:
        settings |= {"num_return_sequences": body.n or 1}
        if best_of is not None and best_of < (body.n or 1):
            raise ApiError(400, f"best_of: got {best_of}; needs at least n, which is {body.n}.", param="best_of")
        if best_of is not None and best_of > (body.n or 1):
            settings |= {"best_of": best_of}
    try:
        return settings_of(settings)
    except ConfigError as error:
        raise ApiError(400, _in_api_words(error.problems[0]), param=_field_of(error.problems[0])) from None


def _in_api_words(problem: str) -> str:
    key, colon, rest = problem.removeprefix("generate.").partition(":")
    return f"{_FIELDS.get(key, key)}{colon}{rest}".replace("generate.", "")


def _field_of(problem: str) -> str | None:
    key = problem.removeprefix("generate.").partition(":")[0].partition(".")[0]
    return _FIELDS.get(key, key if key.isidentifier() else None)


def tokens_of(served: ServedModel, prompt: str | list[int], number: int) -> list[int]:
    if isinstance(prompt, list):
        beyond = next((token for token in prompt if token >= served.model.cfg.vocab_size), None)
        if beyond is not None:
            raise ApiError(400, f"prompt: token {beyond} is not in the vocabulary of {served.name}.", param="prompt")
        return prompt
    try:
        tokens = served.tokenizer.encode_prompt(prompt)
    except GPTWorksError as error:
        raise ApiError(400, f"prompt: {error}", param="prompt") from None
    if not tokens:
        raise ApiError(400, f"prompt: number {number} is empty. Needed: at least one token of text.", param="prompt")
    return tokens


def room_for(served: ServedModel, prompt: list[int], asked: int | None, usual: int | None) -> int:
    """How many tokens may be written: what was asked for, or an error; else as usual, as far as the context goes."""
    room = served.context - len(prompt)
    if asked is None and room >= 1:
        return room if usual is None else min(usual, room)
    wanted = 1 if asked is None else asked
    if wanted > room:
        raise ApiError(
            400,
            f"The context of {served.name} is {served.context} tokens; the prompt has {len(prompt)} and {wanted} new "
            f"were asked for. " + (f"Ask for at most {room}." if room > 0 else "Shorten the prompt."),
            param="prompt" if room <= 0 else "max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def rows_from(
    served: ServedModel, prompts: list[list[int]], rooms: list[int], body: Sampling, cfg: GenerateConfig
) -> list[RowRequest]:
    """All rows of the first prompt, then all of the second; with the random draws of `gptworks generate`."""
    copies = cfg.best_of or (body.n or 1)
    if len(prompts) * copies > MOST_ROWS:
        raise ApiError(
            400, f"{len(prompts)} prompts with {copies} texts each: at most {MOST_ROWS} in a call.", param="n"
        )
    try:
        require_in_vocabulary(cfg, served.tokenizer.vocab_size)
    except GPTWorksError as error:
        raise ApiError(400, _in_api_words(str(error)), param=_field_of(str(error))) from None
    times = copies if cfg.strategy == "greedy" else 1  # the section knows one greedy text only
    rows = sorted((row for _ in range(times) for row in rows_of(prompts, rooms, cfg)), key=lambda row: row.prompt)
    needs_text = bool(cfg.stop) or bool(body.stream)
    return [
        RowRequest(
            row,
            cfg,
            text=TextOut(served.tokenizer, row.prompt_tokens, cfg.stop) if needs_text else None,
            is_streamed=bool(body.stream),
            wants_logprobs=cfg.best_of > 0,
        )
        for row in rows
    ]


def text_of(served: ServedModel, request: RowRequest) -> str:
    """The text of a row that has ended."""
    if request.text is not None:
        return request.text.text
    out = TextOut(served.tokenizer, request.row.prompt_tokens)
    out.extend(request.row.tokens)
    out.close()
    return out.text


def reason_of(finish: str | None) -> str | None:
    return {"eod": "stop", "stop": "stop", "length": "length"}.get(finish or "")


def failure_of(request: RowRequest) -> ApiError | None:
    """Why a row has ended that has not ended well."""
    if request.finish == "deadline":
        return ApiError(504, "The answer was not finished within the time that the server gives a request.")
    if request.finish == "error":
        if isinstance(request.error, GPTWorksError):
            return ApiError(400, str(request.error))
        return ApiError(500, "The server failed; its log says why.")
    if request.finish == "cancelled":
        return ApiError(503, "The request was cancelled.")
    return None
