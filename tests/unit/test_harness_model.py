"""The three questions of lm-evaluation-harness against direct computation; the harness itself is not needed here."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import TokenizerError, UsageError
from gptworks.evaluate import harness
from gptworks.evaluate.harness import HarnessAnswers
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.build import FreshWeights, build_gpt

CONTEXT = 24


@pytest.fixture(scope="module")
def folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gptworks.checkpoint.systems import huggingface

    path = tmp_path_factory.mktemp("harness")
    shape = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "vocab_size": 512, "max_positions": CONTEXT}
    cfg = ModelConfig.model_validate(shape)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.3), 2, seed=3))
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=511)
    small_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def answers(folder: Path) -> HarnessAnswers:
    made = HarnessAnswers()
    made.load(str(folder), "cpu", 4)
    return made


def ask(*args: object) -> Any:
    return SimpleNamespace(args=args)


@torch.no_grad()
def log_probability(model: GPT, context: list[int], target: list[int]) -> tuple[float, bool]:
    total, greedy, read = 0.0, True, list(context)
    for token in target:
        logits = model(torch.tensor([read[-CONTEXT:]]))[0, -1].double()
        total += logits.log_softmax(-1)[token].item()
        greedy &= int(logits.argmax()) == token
        read.append(token)
    return total, greedy


def test_loglikelihood(answers: HarnessAnswers) -> None:
    tokenizer, model = answers.tokenizer, answers.model
    likeliest = answers.generate_until([ask("The river", {"max_gen_toks": 1})])[0]
    pairs = [("The river", " was cold"), ("The river ", "was"), ("", "Once"), ("The river", likeliest)]
    got = answers.loglikelihood([ask(*pair) for pair in pairs])
    for (context, continuation), (total, greedy) in zip(pairs, got, strict=True):
        kept = context.rstrip()
        whole, before = tokenizer.encode(context + continuation), tokenizer.encode(kept)
        expected = log_probability(model, before or [511], whole[len(before) :])
        assert total == pytest.approx(expected[0], abs=1e-4)
        assert greedy is expected[1]
    assert [greedy for _, greedy in got] == [False, False, False, True]


def test_loglikelihood_drops_the_beginning_of_what_is_too_long(answers: HarnessAnswers) -> None:
    context, continuation = "a letter by the river and " * 8 + "then", " it was gone"
    whole = answers.tokenizer.encode(context + continuation)
    target = whole[len(answers.tokenizer.encode(context)) :]
    assert len(whole) > CONTEXT + 1
    ((total, _),) = answers.loglikelihood([ask(context, continuation)])
    shown = whole[-(CONTEXT + 1) :]
    with torch.no_grad():
        logits = answers.model(torch.tensor([shown[:-1]]))[0].double().log_softmax(-1)
    expected = sum(logits[place - 1, shown[place]].item() for place in range(len(shown) - len(target), len(shown)))
    assert total == pytest.approx(expected, abs=1e-4)
    with pytest.raises(UsageError, match="does not fit the model's context of 24"):
        answers.loglikelihood([ask("a", " " + "river " * 40)])


def test_loglikelihood_rolling(answers: HarnessAnswers) -> None:
    texts = ["Once", "On Friday morning Anna found a letter by the river. " * 6, ""]
    got = answers.loglikelihood_rolling([ask(text) for text in texts])
    for text, total in zip(texts, got, strict=True):
        ids = answers.tokenizer.encode(text)
        expected = 0.0
        for begin in range(0, len(ids), CONTEXT):
            end = min(begin + CONTEXT, len(ids))
            shown = [511, *ids][max(0, end - CONTEXT) : end]
            with torch.no_grad():
                logits = answers.model(torch.tensor([shown]))[0].double().log_softmax(-1)
            expected += sum(logits[n - end, ids[n]].item() for n in range(begin, end))
        assert total == pytest.approx(expected, abs=1e-3)
    assert len(answers.tokenizer.encode(texts[1])) % CONTEXT and got[2] == 0.0


def test_generate_until(answers: HarnessAnswers) -> None:
    import gptworks

    full = gptworks.generate(answers.model, "The river", max_new_tokens=12, strategy="greedy")[0]
    settings = {"max_gen_toks": 12, "do_sample": False, "temperature": 0.0}
    assert answers.generate_until([ask("The river", {**settings, "until": ["\0never"]})]) == [full]
    stop = full[len(full) // 2 :][:2]
    for until in (stop, [stop], ["\0never", stop]):
        assert answers.generate_until([ask("The river", {**settings, "until": until})]) == [full[: full.find(stop)]]
    sampled = {"max_gen_toks": 12, "do_sample": True, "temperature": 5.0, "top_k": 50}
    assert answers.generate_until([ask("The river", sampled)]) != [full]
    assert answers.generate_until([ask("a letter by the river " * 9, settings)])[0], "a long prompt is shortened"
    with pytest.raises(UsageError, match="max_gen_toks: got 24; the model's context of 24"):
        answers.generate_until([ask("a", {"max_gen_toks": 24})])


def test_without_the_harness_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(UsageError, match=r'pip install "gptworks\[eval\]"'):
        harness.harness_class()


def test_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert json.loads((tmp_path / "config.json").read_text())["n_layer"] == 2
    with pytest.raises(TokenizerError, match=f"{tmp_path}: has no tokenizer"):
        HarnessAnswers().load(str(tmp_path), "cpu", 1)
