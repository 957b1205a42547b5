"""The real `openai` client, unchanged: completions, chats, streams, models, errors."""

from pathlib import Path
from typing import Any

import openai
import pytest

import gptworks
from gptworks.tokenizer import chat

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "The river?"}]


@pytest.fixture(scope="module")
def client(served: Any) -> Any:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> Any:
    return gptworks.GPT.from_pretrained(chat_folder)


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["base", "chat"]
    card: Any = client.models.retrieve("chat").model_dump()
    assert card["gptworks"]["chat"] and card["gptworks"]["context"] == 96 and card["gptworks"]["vocabulary"] == 512


def test_a_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="base", prompt="The river", max_tokens=9, temperature=0, logprobs=2)
    (choice,) = answer.choices
    assert choice.logprobs is not None and len(choice.logprobs.tokens or []) == 9
    assert answer.usage is not None and answer.usage.completion_tokens == 9
    pieces = client.completions.create(model="base", prompt="The river", max_tokens=9, temperature=0, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text


def test_a_chat_is_the_template_continued(client: openai.OpenAI, model: Any) -> None:
    prompt = chat.render(model.tokenizer, MESSAGES, add_generation_prompt=True)
    assert prompt == "[system] Be short.\n[user] The river?\n[a] "
    (expected,) = gptworks.generations(model, prompt, strategy="greedy", max_new_tokens=12)
    answer = client.chat.completions.create(
        model="chat", messages=MESSAGES, temperature=0, max_completion_tokens=12, logprobs=True, top_logprobs=3
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == expected.text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    content = choice.logprobs.content
    assert [token.logprob for token in content] == pytest.approx(expected.logprobs, abs=1e-4)
    assert b"".join(bytes(token.bytes or []) for token in content).decode(errors="replace") == expected.text
    assert all(token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob for token in content)
    assert answer.object == "chat.completion"


def test_a_chat_in_pieces(client: openai.OpenAI) -> None:
    fields: Any = {"model": "chat", "messages": MESSAGES, "seed": 3, "max_tokens": 12, "n": 2}
    whole = client.chat.completions.create(**fields)
    pieces = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert pieces[-1].usage == whole.usage and pieces[-1].choices == []
    for choice in whole.choices:
        mine = [each for piece in pieces for each in piece.choices if each.index == choice.index]
        assert mine[0].delta.role == "assistant" and mine[-1].finish_reason == choice.finish_reason
        assert "".join(each.delta.content or "" for each in mine) == choice.message.content


def test_content_may_come_in_parts(client: openai.OpenAI) -> None:
    fields: Any = {"model": "chat", "temperature": 0, "max_tokens": 8}
    plain = client.chat.completions.create(messages=[{"role": "user", "content": "The river"}], **fields)
    parts: Any = [{"type": "text", "text": "The "}, {"type": "text", "text": "river"}]
    in_parts = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **fields)
    assert in_parts.choices[0].message.content == plain.choices[0].message.content
    picture: Any = [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]
    with pytest.raises(openai.BadRequestError, match="not text"):
        client.chat.completions.create(messages=[{"role": "user", "content": picture}], **fields)


def test_developer_is_the_new_word_for_system(client: openai.OpenAI) -> None:
    new: Any = [{"role": "developer", "content": "Be short."}, MESSAGES[1]]
    fields: Any = {"model": "chat", "temperature": 0, "max_tokens": 8}
    answers = [client.chat.completions.create(messages=each, **fields) for each in (MESSAGES, new)]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage == answers[1].usage


def test_a_base_model_names_the_other_endpoint(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"base is a base model.*/v1/completions") as caught:
        client.chat.completions.create(model="base", messages=MESSAGES)
    assert caught.value.code == "no_chat_template" and caught.value.param == "model"


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="no model 'gpt-9'") as caught:
        client.completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.BadRequestError, match="context of base is 96 tokens; the prompt has 90") as caught:
        client.completions.create(model="base", prompt=[5] * 90, max_tokens=7)
    assert caught.value.code == "context_length_exceeded" and "at most 6" in str(caught.value)
