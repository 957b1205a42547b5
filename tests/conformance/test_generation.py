"""Generation as the documents promise it. Rows of the conformance list: S0-17."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2LMHeadModel

import gptworks
from gptworks.checkpoint.systems import huggingface
from gptworks.cli.main import main
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

PROMPTS = ["Hi, GPT2. Tell me who Jack Ma is.", "Tell us about the river."]
# The keys of FleetX's Generation group in our words.
KEYS = {"top_k": 50, "top_p": 0.75, "temperature": 1.0, "min_new_tokens": 1, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=512, max_positions=64, tied=False)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.25), 2, seed=4))
    path = tmp_path_factory.mktemp("s0_17")
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(path)
    return path


def reference(folder: Path, prompt: str, tokenizer: Any, **options: Any) -> list[list[int]]:
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    ids = torch.tensor([tokenizer.encode(prompt)])
    eod = tokenizer.eod_id
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=eod, **options
    )
    rows = [row[ids.shape[1] :].tolist() for row in found]
    return [row[: row.index(eod)] if eod in row else row for row in rows]


def test_s0_17_greedy_search_equals_hugging_face(folder: Path, small_tokenizer: Any) -> None:
    found = gptworks.generations(gptworks.GPT.from_pretrained(folder), PROMPTS, strategy="greedy", max_new_tokens=12)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        assert [generation.tokens] == reference(folder, prompt, small_tokenizer)
        assert generation.text == small_tokenizer.decode(generation.tokens)


def test_s0_17_beam_search_equals_hugging_face(folder: Path, small_tokenizer: Any) -> None:
    options = {"num_beams": 4, "length_penalty": 0.6, "early_stopping": True, "num_return_sequences": 2}
    model = gptworks.GPT.from_pretrained(folder)
    found = gptworks.generations(model, PROMPTS, strategy="beam", max_new_tokens=12, **options)
    for number, prompt in enumerate(PROMPTS):
        ours = [generation.tokens for generation in found[2 * number : 2 * number + 2]]
        assert ours == reference(folder, prompt, small_tokenizer, **options)


@pytest.mark.parametrize("rules", ["huggingface", "paddle"])
def test_s0_17_sampling_with_every_key(folder: Path, rules: str) -> None:
    model = gptworks.GPT.from_pretrained(folder)
    settings: dict[str, Any] = {**KEYS, "rules": rules, "strategy": "sampling", "num_return_sequences": 3}
    first = gptworks.generate(model, PROMPTS, **settings, seed=1)
    assert len(first) == 6 and len(set(first)) == 6
    assert gptworks.generate(model, PROMPTS, **settings, seed=1) == first
    assert gptworks.generate(model, PROMPTS, **settings, seed=2) != first


@pytest.mark.parametrize("strategy", ["greedy", "sampling", "beam"])
def test_s0_17_from_the_command_line(folder: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--num-beams", "3"] if strategy == "beam" else ["--top-k", "50", "--top-p", "0.75"]
    command = ["generate", "--model", str(folder), "--strategy", strategy, "--max-new-tokens", "12", *options]
    assert main([*command, "--prompt", PROMPTS[0], "--prompt", PROMPTS[1]]) == 0
    out = capsys.readouterr().out
    assert out.startswith(PROMPTS[0]) and f"\n{PROMPTS[1]}" in out
