"""gw.pipeline and gw.evaluate: thin over generate and the held-out loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

import gptworks as gw
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import InitConfig, ModelConfig
from gptworks.errors import ConfigError, DataError, GenerationError, TokenizerError, UsageError
from gptworks.evaluate.heldout import held_out_loss
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

CONTEXT = 24


@pytest.fixture(scope="module")
def folder(small_tokenizer: gw.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=512, max_positions=CONTEXT, tied=False)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.4), 1, seed=4))
    path = tmp_path_factory.mktemp("pipeline")
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=None)
    small_tokenizer.save(path)
    return path


@pytest.fixture
def model(folder: Path) -> gw.GPT:
    return gw.GPT.from_pretrained(folder)


PROMPTS = ["Anna walked to", "Tom", "It was a letter", "Tom"]


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_max_length_counts_the_prompt(model: gw.GPT, small_tokenizer: gw.Tokenizer, strategy: str) -> None:
    settings = {"strategy": strategy, "top_k": 3, "seed": 5}
    write = gw.pipeline("text_generation", model=model, max_length=12, **settings)
    assert model.tokenizer is not None
    for prompt in PROMPTS[:3]:
        room = 12 - len(small_tokenizer.encode(prompt))
        expected = gw.generate(model, prompt, max_new_tokens=room, **settings)
        assert write(prompt) == [{"text_generation_text": [prompt + expected[0]]}]
    assert len({len(small_tokenizer.encode(prompt)) for prompt in PROMPTS}) > 1
    together = write(PROMPTS)
    assert all(result["text_generation_text"][0].startswith(p) for result, p in zip(together, PROMPTS, strict=True))
    if strategy == "greedy":
        assert together == [write(prompt)[0] for prompt in PROMPTS]


def test_new_tokens_and_settings_of_the_call_come_first(model: gw.GPT, folder: Path) -> None:
    write = gw.pipeline("text-generation", folder, max_length=4, strategy="sampling", device="cpu")
    settings = {"strategy": "greedy", "max_new_tokens": 5}
    expected = [
        {"text_generation_text": [p + t]} for p, t in zip(PROMPTS, gw.generate(model, PROMPTS, **settings), strict=True)
    ]
    assert write(PROMPTS, **settings) == expected
    longer = gw.pipeline(model=model, strategy="greedy", max_new_tokens=1)("Tom", max_length=6)
    assert longer[0]["text_generation_text"][0].startswith(expected[1]["text_generation_text"][0][:4])
    assert write.settings == {"max_length": 4, "strategy": "sampling"}


def test_the_settings_of_a_run_are_the_defaults(small_store: Path, tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 512, "max_positions": 16}
    out = tmp_path / "run"
    generate = {"strategy": "greedy", "max_new_tokens": 3}
    gw.Trainer(model=shape, train_dataset=small_store, out=out, train={"steps": 1}, generate=generate).train()
    write = gw.pipeline(model=out)
    assert write.settings["strategy"] == "greedy" and write.settings["max_new_tokens"] == 3
    assert write("Tom") == gw.pipeline(model=out)("Tom", **generate)
    assert "max_new_tokens" not in gw.pipeline(model=out, max_length=9).settings


def test_another_tokenizer_leaves_the_callers_model_as_it_is(model: gw.GPT, small_tokenizer: gw.Tokenizer) -> None:
    model.tokenizer = None
    with pytest.raises(TokenizerError, match="pipeline: the model has no tokenizer"):
        gw.pipeline(model=model)
    write = gw.pipeline(model=model, tokenizer=small_tokenizer)
    assert write("Tom", max_new_tokens=1) and model.tokenizer is None
    with pytest.raises(TokenizerError, match="the tokenizer has 50257 tokens, but the model only 512"):
        gw.pipeline(model=model, tokenizer="gpt2")


@pytest.mark.parametrize(
    ("text", "settings", "error", "said"),
    [
        ("Tom", {"max_length": 0}, GenerationError, "max_length: got 0"),
        ("Tom", {"max_length": 2.5}, GenerationError, "max_length: got 2.5"),
        ("Tom", {"max_length": 1}, GenerationError, "text 1 has . tokens, and max_length=1"),
        (["Tom", "Anna walked to"], {"max_length": 4}, GenerationError, "text 2 has . tokens, and max_length=4"),
        ("Tom", {"max_length": 99}, GenerationError, f"the model's context is {CONTEXT}"),
        ("Tom", {"max_length": 9, "max_new_tokens": 3}, UsageError, "max_length=9 .*max_new_tokens=3"),
        ("", {"max_length": 9}, GenerationError, "prompt 1 is empty"),
        ([], {}, GenerationError, "no text"),
        (None, {}, UsageError, "got None"),
        (["Tom", 3], {}, UsageError, "got 3"),
        ("Tom", {"temperatur": 3}, ConfigError, "temperatur: unknown key"),
    ],
)  # fmt: skip
def test_what_a_pipeline_refuses(
    model: gw.GPT, text: Any, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        gw.pipeline(model=model)(text, **settings)


def test_unknown_tasks_are_answered_with_the_known(model: gw.GPT) -> None:
    with pytest.raises(UsageError, match=r"pipeline: no task 'summary'. Tasks: text_generation\."):
        gw.pipeline("summary", model=model)
    with pytest.raises(UsageError, match=r"evaluate: no task 'bleu'. Tasks: heldout"):
        gw.evaluate(model, "x", task="bleu")


# Evaluate


def test_evaluate_is_the_held_out_loss(model: gw.GPT, folder: Path, small_store: Path) -> None:
    from gptworks.config.schema import DataConfig
    from gptworks.data.dataset import Dataset

    cfg = DataConfig(path=(str(small_store),), seq_len=CONTEXT)
    dataset = Dataset(cfg, vocab_size=512)
    for split, part in (("held-out", "held_out"), ("train", "train")):
        expected = held_out_loss(
            model, dataset.samples(part), dataset.eod_policy, micro_size=8, device=torch.device("cpu"),
            byte_lengths=model.tokenizer.byte_lengths,
        )  # fmt: skip
        got = gw.evaluate(folder, small_store, split=split, device="cpu")
        assert (got.tokens, got.text_bytes, got.samples) == (expected.tokens, expected.text_bytes, expected.samples)
        assert got.loss == pytest.approx(expected.loss, rel=1e-6)
    assert gw.evaluate(model, str(small_store)).tokens < gw.evaluate(model, small_store, shares="50,50").tokens
    everything = gw.evaluate(model, small_store, split="all")
    assert everything.samples == (len(dataset.stores[0].tokens) - 1) // CONTEXT
    assert gw.evaluate(model, small_store, seq_len=8).samples > gw.evaluate(model, small_store).samples


def test_evaluate_texts(model: gw.GPT, small_tokenizer: gw.Tokenizer) -> None:
    texts = ["Anna walked to the river.", "Tom took the letter home and read it."] * 4
    tokens = [i for text in texts for i in [*small_tokenizer.encode(text), small_tokenizer.eod_id]]
    rows = (len(tokens) - 1) // CONTEXT
    windows = torch.tensor([tokens[row * CONTEXT : (row + 1) * CONTEXT + 1] for row in range(rows)])
    result = gw.evaluate(model, texts)
    assert result.tokens == rows * CONTEXT
    assert result.loss == pytest.approx(model.loss(windows).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("data", "settings", "error", "said"),
    [
        ("nowhere", {}, DataError, "nowhere: no such dataset"),
        ("{store}", {"split": "half"}, UsageError, "split: got 'half'"),
        ("{store}", {"batch_size": 0}, UsageError, "batch_size: got 0"),
        ("{store}", {"seq_len": 99}, ConfigError, "data.seq_len: 99"),
        ([], {}, DataError, "an empty list"),
        (["Tom"], {}, DataError, "tokens"),
        (7, {}, UsageError, "data: got 7"),
    ],
)
def test_what_evaluate_refuses(
    model: gw.GPT, small_store: Path, data: Any, settings: dict[str, Any], error: type[Exception], said: str
) -> None:
    given = data.format(store=small_store) if isinstance(data, str) else data
    with pytest.raises(error, match=said):
        gw.evaluate(model, given, **settings)


def test_rows_draw_by_their_own_number_whatever_their_length(model: gw.GPT) -> None:
    """With max_length too: what a row draws does not depend on how long its neighbours are."""
    write = gw.pipeline(model=model, max_length=20, strategy="sampling", seed=5)
    texts = ["Tom", "Anna found a map by the river", "Tom"]
    together = [found["text_generation_text"][0] for found in write(texts)]
    other_lengths = [found["text_generation_text"][0] for found in write(["Mei and Tom", "Tom", "Tom"])]
    assert together[2] == other_lengths[2]
    assert together[0] != together[2]


def test_generation_leaves_dropout_out_and_the_mode_as_it_was(model: gw.GPT) -> None:
    greedy = {"strategy": "greedy", "max_new_tokens": 8}
    usual = gw.generate(model, "Tom", **greedy)
    model.train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    assert gw.generate(model, "Tom", **greedy) == usual
    assert model.training


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("runs/x", "Tom"), "the model is 'runs/x'; needs a gptworks.GPT"),
        ((None, [3]), "got the prompt 3; needs a text"),
    ],
)
def test_what_generate_cannot_take(model: gw.GPT, given: tuple[object, object], message: str) -> None:
    with pytest.raises(gw.GPTWorksError, match=message):
        gw.generate(given[0] or model, given[1])
