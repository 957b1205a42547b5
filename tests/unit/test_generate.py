"""From logits to tokens, and from prompts to text: against transformers, and against doing it without a cache."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import ConfigError, GenerationError, TokenizerError
from gptworks.generate.draw import Row, draw
from gptworks.generate.engine import continue_tokens, generate
from gptworks.generate.logits import keep_top_k, keep_top_p
from gptworks.generate.rules import Past, distribution
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel.apply import FreshWeights, build

VOCAB = 512  # of the tokenizer
ROWS = 520  # of the embedding: eight ids that no text has
CONTEXT = 40


@pytest.fixture(scope="module")
def folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A portable folder with weights large enough for clear choices."""
    cfg = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=ROWS, max_positions=CONTEXT, tied=False)
    model = build(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.25), 2, seed=4))
    path = tmp_path_factory.mktemp("generate")
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(path)
    return path


@pytest.fixture
def model(folder: Path) -> PretrainedGPT:
    return PretrainedGPT.from_pretrained(folder)


PROMPTS = [[5, 9, 200], [77], [300, 301, 302, 303, 304, 305, 306], [8, 8]]


def settings(**changes: object) -> GenerateConfig:
    return GenerateConfig.model_validate({"max_new_tokens": 12, "strategy": "greedy", **changes})


def run(
    model: GPT, prompts: list[list[int]], *, eod_id: int | None = None, vocab_size: int = VOCAB, **changes: object
) -> list[list[int]]:
    found = continue_tokens(model, prompts, settings(**changes), eod_id=eod_id, vocab_size=vocab_size)
    return [new.tokens for (new,) in found]


# Logits to a distribution


def random_logits(seed: int, size: int = 60) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [1, 2, 17, 59, 60])
def test_top_k_equals_transformers(k: int) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        expected = TopKLogitsWarper(k)(None, logits[None])[0]
        assert torch.equal(keep_top_k(logits, k), expected)
        assert torch.isfinite(expected).sum() == k


def test_top_k_keeps_ties_and_may_be_off_or_too_large() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 0.0])
    assert torch.isfinite(keep_top_k(logits, 2)).tolist() == [False, True, True, True, False]
    assert torch.equal(keep_top_k(logits, 0), logits)
    assert torch.equal(keep_top_k(logits, 99), logits)


@pytest.mark.parametrize("p", [0.001, 0.3, 0.75, 0.95, 0.999])
def test_top_p_equals_transformers(p: float) -> None:
    sizes = set()
    for seed in range(5):
        logits = random_logits(seed)
        expected = TopPLogitsWarper(p)(None, logits[None])[0]
        assert torch.equal(keep_top_p(logits, p), expected)
        sizes.add(int(torch.isfinite(expected).sum()))
    assert min(sizes) >= 1 and max(sizes) < 60


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = torch.tensor([0.1, 0.5, 0.4]).log()
    assert torch.isfinite(keep_top_p(logits, 0.45)).tolist() == [False, True, False]
    assert torch.isfinite(keep_top_p(logits, 0.55)).tolist() == [False, True, True]
    assert torch.equal(keep_top_p(logits, 1.0), logits)


@pytest.mark.parametrize(("temperature", "k", "p"), [(0.7, 0, 1.0), (1.5, 20, 0.8), (0.3, 5, 0.5), (2.0, 0, 0.9)])
def test_all_three_together_in_the_order_of_transformers(temperature: float, k: int, p: float) -> None:
    for seed in range(5):
        logits = random_logits(seed)
        scores = TemperatureLogitsWarper(temperature)(None, logits[None])
        scores = TopKLogitsWarper(k)(None, scores) if k else scores
        scores = TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        got = distribution(
            logits, Past([1], []), settings(strategy="sampling", temperature=temperature, top_k=k, top_p=p)
        )
        torch.testing.assert_close(got, scores[0].softmax(-1), rtol=1e-6, atol=0)
        assert got.sum().item() == pytest.approx(1.0, abs=1e-6)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 0.6, 0.3, 0.1]).log()
    cfg, generator = settings(strategy="sampling"), torch.Generator().manual_seed(0)
    row = Row(0, [1], generator, 12)
    drawn = torch.tensor([draw(logits, row, cfg, None).token for _ in range(4000)])
    shares = torch.bincount(drawn, minlength=4) / 4000
    torch.testing.assert_close(shares, torch.tensor([0.0, 0.6, 0.3, 0.1]), rtol=0, atol=0.03)
    assert draw(logits, row, settings(strategy="greedy"), None).token == 1


# Prompts to tokens


def test_greedy_equals_transformers(model: PretrainedGPT, folder: Path) -> None:
    theirs = GPT2LMHeadModel.from_pretrained(folder).eval()
    theirs.generation_config.eos_token_id = None
    ours = run(model, PROMPTS, vocab_size=ROWS)
    for prompt, row in zip(PROMPTS, ours, strict=True):
        ids = torch.tensor([prompt])
        expected = theirs.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert row == expected[0, len(prompt) :].tolist()
    assert len({token for row in ours for token in row}) > 12, "a model that says one thing proves little"


@torch.no_grad()
def uncached(model: GPT, prompts: list[list[int]], steps: int) -> tuple[list[list[int]], list[Tensor]]:
    """The greedy tokens and the logits they were taken from, reading everything again at each step."""
    rows, all_logits = [list(prompt) for prompt in prompts], []
    for _ in range(steps):
        logits = torch.stack([model(torch.tensor([row]))[0, -1] for row in rows])
        all_logits.append(logits)
        for row, token in zip(rows, logits[:, :VOCAB].argmax(-1).tolist(), strict=True):
            row.append(token)
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)], all_logits


def test_cached_equals_uncached(model: PretrainedGPT) -> None:
    seen = []
    hook = model.register_forward_hook(lambda module, args, output: seen.append(output))
    cached = run(model, PROMPTS)
    hook.remove()
    expected, logits = uncached(model, PROMPTS, 12)
    assert cached == expected
    assert len(seen) == len(logits) == 12
    for got, wanted in zip(seen, logits, strict=True):
        assert (got - wanted).abs().max() <= 1e-5 * max(1.0, wanted.abs().max().item())


def test_the_cache_reads_each_token_once(model: PretrainedGPT) -> None:
    lengths = []
    hook = model.register_forward_pre_hook(lambda module, args: lengths.append(args[0].shape[1]))
    run(model, PROMPTS)
    hook.remove()
    assert lengths == [7] + [1] * 11


def test_the_same_seed_gives_the_same_tokens(model: PretrainedGPT) -> None:
    first = run(model, PROMPTS, strategy="sampling", seed=3)
    torch.rand(5)
    assert run(model, PROMPTS, strategy="sampling", seed=3) == first
    assert run(model, PROMPTS, strategy="sampling", seed=4) != first
    assert (
        run(model, [[5, 9]] * 3, strategy="sampling", seed=3)[0]
        != run(model, [[5, 9]] * 3, strategy="sampling", seed=3)[1]
    ), "rows with the same prompt must not repeat each other"


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_a_row_does_not_depend_on_its_neighbours(model: PretrainedGPT, strategy: str) -> None:
    together = run(model, PROMPTS, strategy=strategy)
    assert run(model, PROMPTS[:1], strategy=strategy)[0] == together[0]
    others = [[1, 2], PROMPTS[1], [3] * 20, PROMPTS[3]]
    changed = run(model, others, strategy=strategy)
    assert changed[1] == together[1] and changed[3] == together[3]
    assert changed[0] != together[0] and changed[2] != together[2]


def test_a_row_ends_with_the_end_of_document_and_the_others_go_on(model: PretrainedGPT) -> None:
    endless = run(model, PROMPTS)
    eod_id = endless[2][4]
    ended = run(model, PROMPTS, eod_id=eod_id)
    expected = [row[: row.index(eod_id)] if eod_id in row else row for row in endless]
    assert ended == expected
    assert len(ended[2]) <= 4 and max(len(row) for row in ended) == 12


def test_it_stops_when_every_row_has_ended(model: PretrainedGPT) -> None:
    calls = []
    hook = model.register_forward_hook(lambda *_: calls.append(1))
    first = run(model, PROMPTS[:1])[0][0]
    calls.clear()
    assert run(model, PROMPTS[:1], eod_id=first) == [[]]
    hook.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_ids_beyond_the_tokenizer_are_never_drawn(model: PretrainedGPT, strategy: str) -> None:
    with torch.no_grad():  # make them by far the likeliest
        model.ln_f.bias.fill_(1.0)
        model.head.weight[VOCAB:] = 2.0
        logits = model(torch.tensor([[5, 9]]))[0]
    assert (logits.argmax(-1) >= VOCAB).all()
    drawn = run(model, PROMPTS, strategy=strategy)
    assert max(token for row in drawn for token in row) < VOCAB
    beyond = run(model, PROMPTS, strategy=strategy, vocab_size=ROWS)
    assert min(token for row in beyond for token in row) >= VOCAB


def test_the_context_can_be_filled_to_the_last_place(model: PretrainedGPT) -> None:
    prompt = list(range(30))
    row = run(model, [prompt, [7]], max_new_tokens=CONTEXT - 30)[0]
    assert len(row) == 10
    assert row == uncached(model, [prompt], 10)[0][0]


# Text


def test_generate_gives_the_continuation_of_each_prompt(model: PretrainedGPT, small_tokenizer: Any) -> None:
    prompts = ["Anna walked to the river", "Tom"]
    texts = generate(model, prompts, strategy="greedy", max_new_tokens=6)
    ids = run(model, [small_tokenizer.encode(p) for p in prompts], eod_id=small_tokenizer.eod_id, max_new_tokens=6)
    assert texts == [small_tokenizer.decode(row) for row in ids]
    assert generate(model, prompts[0], strategy="greedy", max_new_tokens=6) == texts[:1]


@pytest.mark.parametrize(
    ("prompts", "new_tokens", "said"),
    [
        ([], 5, "no prompt"),
        ([[1], []], 5, "prompt 2 is empty"),
        ([[1], [2] * 30], 11, "prompt 2 has 30 tokens and 11 more were asked for, but the model's context is 40"),
        ([[1], [2] * 30], 11, "at most 10"),
        ([[2] * 50], 1, "Shorten it to 39"),
    ],
)
def test_prompts_that_cannot_be_continued(
    model: PretrainedGPT, prompts: list[list[int]], new_tokens: int, said: str
) -> None:
    with pytest.raises(GenerationError, match=said):
        run(model, prompts, max_new_tokens=new_tokens)


def test_an_empty_text_is_refused(model: PretrainedGPT) -> None:
    with pytest.raises(GenerationError, match="prompt 1 is empty"):
        generate(model, "")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("temperature", 0.0),
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -3),
        ("max_new_tokens", 0),
        ("strategy", "beams"),
        ("seed", -1),
    ],
)
def test_settings_that_cannot_be_honoured(model: PretrainedGPT, setting: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        generate(model, "Anna", **{setting: value})
    assert f"{setting}: got {value!r};" in str(caught.value)


def test_an_unknown_setting_is_answered_with_the_nearest(model: PretrainedGPT) -> None:
    with pytest.raises(ConfigError, match="temperatur: unknown key; did you mean 'temperature'"):
        generate(model, "Anna", temperatur=0.5)


def test_without_a_tokenizer_there_is_no_text(model: PretrainedGPT) -> None:
    model.tokenizer = None
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        generate(model, "Anna")
