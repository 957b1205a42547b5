"""Settings that contradict each other, and those that a prompt or a model makes impossible."""

from typing import Any

import pytest
import torch

from gptworks.config.load import load
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import ConfigError, GenerationError
from gptworks.generate.engine import continue_tokens, settings_of
from gptworks.generate.sampler import Row, draw
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt


@pytest.fixture(scope="module")
def model() -> GPT:
    cfg = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=50, max_positions=20)
    return build_gpt(
        cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 1, seed=2)
    ).eval()


BEAM = {"strategy": "beam", "num_beams": 4}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"temperature": 0}, "generate.temperature: got 0; needs a number above 0; for the likeliest token each time"),
        ({"temperature": -0.5}, "generate.temperature: got -0.5; needs a number above 0"),
        ({"strategy": "magic"}, "generate.strategy: got 'magic'"),
        ({"top_k": -1}, "generate.top_k: got -1"),
        ({"top_p": 0.0}, "generate.top_p: got 0.0"),
        ({"min_p": 1.5}, "generate.min_p: got 1.5"),
        ({"typical_p": 0.0}, "generate.typical_p: got 0.0"),
        ({"repetition_penalty": 0.0}, "generate.repetition_penalty: got 0.0"),
        ({"presence_penalty": float("nan")}, "generate.presence_penalty: got nan"),
        ({"no_repeat_ngram": -2}, "generate.no_repeat_ngram: got -2"),
        ({"stop": ""}, "generate.stop: got ''"),
        ({"stop": ["x", ""]}, "generate.stop: got ''"),
        ({"stop": 5}, "generate.stop: got 5"),
        ({"logit_bias": "five"}, "'five' is not ID:BIAS"),
        ({"logit_bias": ["3:inf"]}, "'3:inf' is not ID:BIAS"),
        ({"logit_bias": ["3:nan"]}, "'3:nan' is not ID:BIAS"),
        ({"logit_bias": ["-3:1"]}, "'-3:1' is not ID:BIAS"),
        ({"logit_bias": ["3:1", "3:2"]}, "token 3 has two biases"),
        ({"logit_bias": {"three": 1.0}}, "'three:1.0' is not ID:BIAS"),
        ({"early_stopping": "sometimes"}, "generate.early_stopping: got 'sometimes'"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens: 9 is above generate.max_new_tokens (8)"),
        ({"num_beams": 4}, "num_beams: 4 needs strategy: beam, got sampling"),
        ({"num_beam_groups": 2}, "num_beam_groups: 2 needs strategy: beam, got sampling"),
        ({"diversity_penalty": 0.5}, "diversity_penalty: 0.5 needs strategy: beam, got sampling"),
        ({"strategy": "beam"}, "num_beams: 1, but generate.strategy is beam"),
        ({**BEAM, "num_beam_groups": 3, "diversity_penalty": 1.0}, "num_beam_groups: 3 does not divide"),
        ({**BEAM, "num_beam_groups": 2}, "diversity_penalty: 0 with generate.num_beam_groups: 2"),
        ({**BEAM, "diversity_penalty": 0.5}, "diversity_penalty: 0.5 with generate.num_beam_groups: 1"),
        ({**BEAM, "num_return_sequences": 5}, "num_return_sequences: 5, but there are 4 beams"),
        ({**BEAM, "best_of": 5}, "best_of: 5 needs strategy: sampling, got beam"),
        ({"strategy": "greedy", "num_return_sequences": 2}, "num_return_sequences: 2, but greedy has one"),
        ({"best_of": 2, "num_return_sequences": 3}, "num_return_sequences: 3, but best_of draws 2"),
        ({"rules": "megatron"}, "generate.rules: got 'megatron'"),
        ({"rules": "paddle", "min_p": 0.1}, "min_p: is set, but generate.rules: paddle has no such setting"),
        ({"rules": "mindformers", "temperature": 0.7}, "temperature: is set, but generate.rules: mindformers"),
        ({**BEAM, "rules": "mindformers"}, "strategy: beam, but generate.rules: mindformers has none"),
        ({**BEAM, "rules": "paddle", "early_stopping": "never"}, "early_stopping: never, but generate.rules: paddle"),
        ({"window": "roll"}, "generate.window: got 'roll'"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(given)
    assert said in str(caught.value)


def test_forms_a_setting_may_have() -> None:
    assert settings_of({"stop": "\n"}).stop == ("\n",)
    assert settings_of({"stop": ["a", "b"]}).stop == ("a", "b")
    assert settings_of({"logit_bias": {3: -1, 7: 2.5}}).biases == {3: -1.0, 7: 2.5}
    assert settings_of({"logit_bias": "3:-inf"}).biases == {3: float("-inf")}
    loaded = load(overrides=["generate.stop=['a b', c]", "generate.logit_bias='4:2'", "generate.early_stopping=never"])
    assert loaded.generate.stop == ("a b", "c")
    assert loaded.generate.biases == {4: 2.0} and loaded.generate.early_stopping == "never"


@pytest.mark.parametrize(
    ("given", "prompt", "said"),
    [
        ({"top_k": 51}, [1], "generate.top_k: 51 is above the vocabulary (50 tokens). Give at most 50"),
        ({"logit_bias": ["50:1"]}, [1], "generate.logit_bias: token 50 is not in the vocabulary (50 tokens)"),
        ({}, [], "prompt 1 is empty"),
        ({"max_new_tokens": 16}, [1] * 5, "prompt 1 has 5 tokens and 16 more were asked for"),
        ({"max_new_tokens": 16}, [1] * 5, "Ask for at most 15, or let the window slide"),
        ({"max_new_tokens": 1}, [1] * 30, "Shorten it to 19 or fewer, or let the window slide"),
        ({"rules": "mindformers", "max_new_tokens": 5}, [1] * 5, "Set it to 6 or more"),
    ],
)
def test_what_prompt_and_model_make_impossible(model: GPT, given: dict[str, Any], prompt: list[int], said: str) -> None:
    with pytest.raises(GenerationError) as caught:
        continue_tokens(model, [prompt], GenerateConfig.model_validate({"max_new_tokens": 4, **given}))
    assert said in str(caught.value)


def test_top_k_of_the_whole_vocabulary_is_fine(model: GPT) -> None:
    cfg = GenerateConfig(max_new_tokens=4, top_k=50)
    everything = GenerateConfig(max_new_tokens=4)
    assert continue_tokens(model, [[1]], cfg) == continue_tokens(model, [[1]], everything)


@pytest.mark.parametrize("chosen", [{"strategy": "greedy"}, {"strategy": "sampling"}, BEAM])
def test_settings_that_forbid_every_token(model: GPT, chosen: dict[str, Any]) -> None:
    nothing = tuple(f"{token}:-inf" for token in range(50))
    cfg = GenerateConfig.model_validate({"max_new_tokens": 4, "logit_bias": nothing, **chosen})
    with pytest.raises(GenerationError, match="no token is left to choose from"):
        continue_tokens(model, [[1]], cfg)


def test_fewer_texts_than_were_asked_for(model: GPT) -> None:
    nearly = tuple(f"{token}:-inf" for token in range(2, 50))
    cfg = GenerateConfig(strategy="beam", num_beams=4, num_return_sequences=4, max_new_tokens=1, logit_bias=nearly)
    with pytest.raises(GenerationError, match="prompt 1: 2 texts were found and 4 asked for"):
        continue_tokens(model, [[1]], cfg)


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers(strategy: str, value: float) -> None:
    logits = torch.zeros(10)
    logits[3] = value
    cfg = GenerateConfig.model_validate({"strategy": strategy})
    with pytest.raises(GenerationError, match="not numbers"):
        draw(logits, Row(0, [1], torch.Generator(), 5), cfg, None)
