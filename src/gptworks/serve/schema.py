"""What a request may say, field by field. What is not listed is refused by name: nothing is ignored in silence."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gptworks import json_text
from gptworks.serve.api_error import ApiError

MOST_STOPS, MOST_STOP_LENGTH, MOST_BIASES, MOST_LOGPROBS, MOST_ROWS = 16, 1000, 1024, 20, 128
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Stop = Annotated[str, Field(min_length=1, max_length=MOST_STOP_LENGTH)]
_Count = Annotated[int, Field(ge=1, le=MOST_ROWS)]
_Token = Annotated[int, Field(ge=0, le=2**31)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers, of which there is none


class Sampling(_Body):
    """What completions and chats have in common. None is what the API's documentation gives as default."""

    model: str | None = None  # needed where there is more than one
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: _Number | None = None
    n: _Count | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    logit_bias: Annotated[dict[str, _Number], Field(max_length=MOST_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks, for the caller's own books
    metadata: dict[str, Any] | None = None  # the same
    # Not OpenAI's; the names are those of other servers.
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: _Number | None = None
    typical_p: _Number | None = None
    repetition_penalty: _Number | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(Sampling):
    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_ROWS)]
        | Annotated[list[_Token], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Token], Field(min_length=1)]], Field(min_length=1, max_length=MOST_ROWS)]
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    best_of: _Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    suffix: None = None  # text after the gap: not what these models can do


class ChatMessage(BaseModel):
    """Templates may look at more than these two."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    role: Annotated[str, Field(max_length=64)]
    content: str | list[dict[str, Any]] | None = None


class ResponseFormat(_Body):
    type: Literal["text"]


class ChatRequest(Sampling):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None


class TokenizeRequest(_Body):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None


class DetokenizeRequest(_Body):
    model: str | None = None
    tokens: list[_Token]


Body = TypeVar("Body", bound=BaseModel)


def parsed(text: bytes, kind: type[Body]) -> Body:
    try:
        content = json_text.loads(text)
    except ValueError as error:  # also bytes that are no UTF-8, and numbers of thousands of digits
        raise ApiError(400, f"The body is not JSON: {str(error)[:200]}") from None
    if not isinstance(content, dict):
        raise ApiError(400, f"The body is JSON, but a {type(content).__name__} instead of an object.")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise _refusal(error, kind) from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deep.") from None


def _refusal(error: ValidationError, kind: type[BaseModel]) -> ApiError:
    """The first thing that is wrong, in one sentence."""
    first = error.errors(include_url=False, include_context=False)[0]
    place = [str(part) for part in first["loc"]]
    field, value = place[0], repr(first["input"])[:100]
    if first["type"] == "extra_forbidden" and len(place) == 1:
        known = ", ".join(kind.model_fields)
        return ApiError(400, f"Unknown field {field[:100]!r}. Known: {known}.", param=field[:100])
    if first["type"] == "missing" and len(place) == 1:
        return ApiError(400, f"{field}: is missing, and needed.", param=field)
    if field == "prompt":
        return ApiError(
            400,
            f"prompt: got {repr_of_prompt(error)}; needs a text, a list of texts, a list of token ids, or a list of "
            f"such lists, none of them empty, at most {MOST_ROWS} in a call.",
            param=field,
        )
    if field == "stop":
        needed = f"a text, or a list of at most {MOST_STOPS}, each of 1 to {MOST_STOP_LENGTH} characters"
        return ApiError(400, f"stop: got {value}; needs {needed}.", param=field)
    return ApiError(400, f"{field}: got {value}: {first['msg']}.", param=field)


def repr_of_prompt(error: ValidationError) -> str:
    inputs = [each["input"] for each in error.errors(include_url=False, include_context=False)]
    return max((repr(each)[:100] for each in inputs), key=len)
