"""/v1/completions against `generate` and `evaluate`, asked in plain HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks
from gptworks.generate.engine import generations_up_to, settings_of

PROMPTS = ["The river", "In the morning she", "Once"]


@pytest.fixture(scope="module")
def model(base_folder: Path) -> Any:
    return gptworks.GPT.from_pretrained(base_folder)


def texts(answer: Any) -> list[str]:
    return [choice["text"] for choice in answer["choices"]]


def expected(model: Any, prompts: list[str], **settings: Any) -> list[Any]:
    return generations_up_to(model, prompts, settings_of(settings), None)


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"temperature": 0}, {"strategy": "greedy"}),
        ({"seed": 3}, {"seed": 3}),
        (
            {"seed": 4, "temperature": 0.7, "top_p": 0.8, "top_k": 30},
            {"seed": 4, "temperature": 0.7, "top_p": 0.8, "top_k": 30},
        ),
        ({"seed": 5, "n": 3}, {"seed": 5, "num_return_sequences": 3}),
        ({"seed": 6, "n": 2, "best_of": 4}, {"seed": 6, "num_return_sequences": 2, "best_of": 4}),
        (
            {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {"40": 3.0}},
            {"seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logit_bias": {40: 3.0}},
        ),
        (
            {"temperature": 0, "repetition_penalty": 1.3, "min_tokens": 8, "no_repeat_ngram_size": 3},
            {"strategy": "greedy", "repetition_penalty": 1.3, "min_new_tokens": 8, "no_repeat_ngram": 3},
        ),
        (
            {"seed": 8, "ignore_eos": True, "min_p": 0.05, "typical_p": 0.9},
            {"seed": 8, "ignore_eod": True, "min_p": 0.05, "typical_p": 0.9},
        ),
    ],
)
def test_the_text_is_that_of_generate(served: Any, model: Any, fields: Any, settings: Any) -> None:
    answer = served.complete(model="base", prompt=PROMPTS, max_tokens=20, **fields)
    found = expected(model, PROMPTS, max_new_tokens=20, **settings)
    assert texts(answer) == [generation.text for generation in found]
    reasons = {"eod": "stop", "stop": "stop", "length": "length"}
    assert [choice["finish_reason"] for choice in answer["choices"]] == [reasons[each.finish] for each in found]
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(found)))
    assert answer["object"] == "text_completion" and answer["model"] == "base"


def test_the_seed_that_was_drawn_is_told(served: Any) -> None:
    first = served.complete(model="base", prompt="The", max_tokens=20)
    again = served.complete(model="base", prompt="The", max_tokens=20, seed=first["seed"])
    other = served.complete(model="base", prompt="The", max_tokens=20)
    assert texts(first) == texts(again) != texts(other)


def test_a_greedy_text_can_be_asked_for_twice(served: Any) -> None:
    answer = served.complete(model="base", prompt=["The", "A"], temperature=0, n=2, max_tokens=9)
    found = texts(answer)
    assert found[0] == found[1] != found[2] == found[3]


def test_prompts_may_be_tokens(served: Any, model: Any) -> None:
    ids = [model.tokenizer.encode(prompt) for prompt in PROMPTS]
    fields = {"model": "base", "temperature": 0, "max_tokens": 12}
    by_text = served.complete(prompt=PROMPTS, **fields)
    assert texts(served.complete(prompt=ids, **fields)) == texts(by_text)
    assert texts(served.complete(prompt=ids[1], **fields)) == texts(by_text)[1:2]
    total = sum(map(len, ids))
    usage = by_text["usage"]
    assert usage["prompt_tokens"] == total and usage["total_tokens"] == total + usage["completion_tokens"]


def test_without_a_number_16_tokens_are_written_or_as_many_as_fit(served: Any, model: Any) -> None:
    answer = served.complete(model="base", prompt="The", temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 16
    answer = served.complete(model="base", prompt=[7] * 90, temperature=0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 6 and answer["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_ends_the_text(served: Any, model: Any) -> None:
    fields = {"model": "base", "prompt": "The river", "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    whole = texts(served.complete(**fields))[0]
    stop = whole[7:9]
    answer = served.complete(**fields, stop=[stop, "never said"])
    assert texts(answer) == [whole[: whole.index(stop)]]
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["stop_reason"] == "stop"
    assert texts(served.complete(**fields, stop=stop)) == texts(answer)


@pytest.mark.parametrize(
    "more",
    [{}, {"stop": ["e"]}, {"n": 3, "seed": 9, "temperature": 1}, {"echo": True}, {"echo": True, "max_tokens": 0}],
)
def test_a_stream_is_the_text_in_pieces(served: Any, more: dict[str, Any]) -> None:
    fields = {"model": "base", "prompt": ["The river", "A"], "temperature": 0, "max_tokens": 20, "logprobs": 2, **more}
    whole = served.complete(**fields)
    status, text, headers = served.ask(
        "/v1/completions", {**fields, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1]) and len({chunk["id"] for chunk in chunks}) == 1
    pieces = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in whole["choices"]:
        mine = [piece for piece in pieces if piece["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [piece["finish_reason"] for piece in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for key in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            joined = [each for piece in mine for each in piece["logprobs"][key]]
            assert joined == choice["logprobs"][key], key


def test_echo_scores_the_prompt_as_the_model_does(served: Any, model: Any) -> None:
    ids = model.tokenizer.encode("In the morning she went to the river")
    answer = served.complete(model="base", prompt=ids, echo=True, logprobs=1, max_tokens=1, temperature=0)
    found = answer["choices"][0]["logprobs"]
    with torch.no_grad():
        log_TV = model(torch.tensor([ids]))[0, :, : model.tokenizer.vocab_size].log_softmax(-1)
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    wanted = [float(log_TV[place, token]) for place, token in enumerate(ids[1:])]
    assert found["token_logprobs"][1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    assert len(found["tokens"]) == len(ids) + 1
    for place, top in enumerate(found["top_logprobs"][1:]):
        assert list(top.values()) == pytest.approx([float(log_TV[place].max())], abs=1e-4)
    text = answer["choices"][0]["text"]
    assert text.startswith("In the morning she went to the river") and "".join(found["tokens"]) == text
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        assert text[offset : offset + len(token)] == token


def test_a_prompt_can_be_scored_without_a_new_token(served: Any, model: Any) -> None:
    ids = model.tokenizer.encode("The river")
    answer = served.complete(model="base", prompt=ids, echo=True, logprobs=0, max_tokens=0)
    assert answer["choices"][0]["text"] == "The river" and answer["usage"]["completion_tokens"] == 0
    assert len(answer["choices"][0]["logprobs"]["token_logprobs"]) == len(ids)
    # As long as the context: there is nothing to write, so nothing is missing.
    assert served.complete(model="base", prompt=[5] * 96, echo=True, max_tokens=0)["usage"]["prompt_tokens"] == 96


def test_bytes_that_are_no_character_have_names(served: Any, model: Any) -> None:
    ids = model.tokenizer.encode("河流")
    answer = served.complete(model="base", prompt=ids, echo=True, logprobs=3, max_tokens=0)
    found = answer["choices"][0]["logprobs"]
    assert [each for each in found["tokens"] if each.startswith("bytes:\\x")] and found["text_offset"][-1] <= 2
    _, tokens, _ = served.ask("/tokenize", {"model": "base", "prompt": "河流"})
    assert tokens["tokens"] == ids and tokens["token_strs"] == found["tokens"] and tokens["max_model_len"] == 96
    _, back, _ = served.ask("/detokenize", {"model": "base", "tokens": ids})
    assert back == {"prompt": "河流"}


def test_ids_are_told_where_they_are_asked_for(served: Any, model: Any) -> None:
    fields = {"model": "base", "prompt": "The river", "temperature": 0, "max_tokens": 7}
    (choice,) = served.complete(**fields, return_token_ids=True)["choices"]
    (generation,) = expected(model, ["The river"], strategy="greedy", max_new_tokens=7)
    assert choice["token_ids"] == generation.tokens
    assert choice["prompt_token_ids"] == model.tokenizer.encode("The river")
