"""Any JSON, of the API's fields or not, gets an answer or a refusal: 200 or an error object of 400, never a fault."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gptworks.serve.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest


def require_answered(answer: tuple[int, Any, dict[str, str]]) -> None:
    status, body, _ = answer
    if status != 200:
        assert status == 400 and body.keys() == {"error"}, body
        assert body["error"].keys() == {"message", "type", "param", "code"} and "Traceback" not in str(body)


def body_of(kind: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the fields of the schema, and values that fit by chance only."""
    value = st.recursive(
        st.none() | st.booleans() | st.integers(-3, 40) | st.floats() | st.text(max_size=6) | st.sampled_from([10**40]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
        max_leaves=5,
    )
    names = st.sampled_from([*kind.model_fields, "other"])
    return st.dictionaries(names, value, max_size=5)


# What both kinds of request have: values of the right type, some of them beyond what is allowed.
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "max_tokens": st.integers(0, 6),
    "temperature": st.floats(0, 3),
    "top_p": st.floats(-0.5, 1.5),
    "n": st.integers(1, 3),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "stream": st.booleans(),
    "logit_bias": st.dictionaries(st.integers(0, 600).map(str), st.floats(-200, 200), max_size=3),
    "min_tokens": st.integers(0, 3),
    "presence_penalty": st.floats(-3, 3),
    "repetition_penalty": st.floats(-1, 3),
}
PLAUSIBLE = st.fixed_dictionaries(
    {
        "prompt": st.text(max_size=8)
        | st.lists(st.integers(0, 530), max_size=4)
        | st.lists(st.text(max_size=5), max_size=3)
    },
    optional={**SAMPLING, "best_of": st.integers(1, 3), "logprobs": st.integers(0, 5), "echo": st.booleans()},
)
often = settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])


@often
@given(body=body_of(CompletionRequest) | PLAUSIBLE)
def test_any_object_is_answered_or_refused(served: Any, body: dict[str, Any]) -> None:
    require_answered(served.ask("/v1/completions", {"model": "base", **body}))


@often
@given(body=body_of(ChatRequest))
def test_any_chat_is_answered_or_refused(served: Any, body: dict[str, Any]) -> None:
    require_answered(
        served.ask(
            "/v1/chat/completions",
            {"model": "chat", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **body},
        )
    )


CHAT = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["system", "user", "assistant", "developer", "tool"])},
                optional={
                    "content": st.text(max_size=8)
                    | st.lists(
                        st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=4)}), max_size=2
                    ),
                    "name": st.text(max_size=4),
                },
            ),
            max_size=3,
        )
    },
    optional={
        **SAMPLING,
        "max_completion_tokens": st.integers(0, 6),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 5),
    },
)


@often
@given(body=CHAT)
def test_a_plausible_chat_is_answered_or_refused(served: Any, body: dict[str, Any]) -> None:
    require_answered(served.ask("/v1/chat/completions", {"model": "chat", "max_tokens": 3, **body}))


@often
@given(st.data())
def test_any_text_or_tokens_are_converted_or_refused(served: Any, data: st.DataObject) -> None:
    path, kind, plausible = data.draw(
        st.sampled_from(
            [
                ("/tokenize", TokenizeRequest, st.fixed_dictionaries({"prompt": st.text()})),
                ("/detokenize", DetokenizeRequest, st.fixed_dictionaries({"tokens": st.lists(st.integers(0, 530))})),
            ]
        )
    )
    require_answered(served.ask(path, {"model": "base", **data.draw(plausible | body_of(kind))}))
