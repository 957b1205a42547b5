"""Greedy, beam search and every change of the logits equal to transformers; Paddle's and MindFormers' rules equal to
straightforward loops written from their description."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.generation import logits_process as theirs_list

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.config.schema import GenerateConfig
from gptworks.generate import logits as ours_list
from gptworks.generate.engine import continue_tokens
from gptworks.generate.result import Sequence
from gptworks.generate.rules import Past, adjusted, distribution

VOCAB = 101
EOD = 100
PROMPTS = [[5, 9, 33], [77], [30, 31, 32, 33, 34, 35, 36], [8, 8, 8, 9]]


@pytest.fixture(scope="module")
def pair(hf_folder: Callable[..., tuple[Path, GPT2LMHeadModel]]) -> tuple[PretrainedGPT, GPT2LMHeadModel]:
    """The same weights in both. The end of document is likely enough to end some texts and not all."""
    folder, theirs = hf_folder(tie_word_embeddings=False)
    ours = PretrainedGPT.from_pretrained(folder)
    for head in (theirs.lm_head, ours.head):
        with torch.no_grad():
            head.weight.mul_(1.5)
    return ours, theirs


def settings(**changes: object) -> GenerateConfig:
    return GenerateConfig.model_validate({"max_new_tokens": 12, "strategy": "greedy", **changes})


def our_tokens(model: PretrainedGPT, prompts: list[list[int]], **changes: object) -> list[list[Sequence]]:
    return continue_tokens(model, prompts, settings(**changes), eod_id=EOD)


def their_tokens(model: GPT2LMHeadModel, prompt: list[int], **options: Any) -> tuple[list[list[int]], list[float]]:
    """New tokens without the end of document, and the scores of the beams."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **{"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOD, **options},
        pad_token_id=EOD,
        return_dict_in_generate=True,
        output_scores=True,
    )
    rows = [row[len(prompt) :].tolist() for row in found.sequences]
    scores = found.sequences_scores.tolist() if "sequences_scores" in found else []
    return [row[: row.index(EOD)] if EOD in row else row for row in rows], scores


GREEDY = [
    ({}, {}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"no_repeat_ngram": 2}, {"no_repeat_ngram_size": 2}),
    ({"min_new_tokens": 9}, {"min_new_tokens": 9}),
    ({"logit_bias": ("7:2.5", "100:3")}, {"sequence_bias": [[[7], 2.5], [[100], 3.0]]}),
    (
        {"repetition_penalty": 0.8, "no_repeat_ngram": 3, "min_new_tokens": 3, "logit_bias": ("7:4",)},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 3, "sequence_bias": [[[7], 4.0]]},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), GREEDY)
def test_greedy_equals_transformers(pair: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    found = our_tokens(pair[0], PROMPTS, **ours)
    for prompt, (row,) in zip(PROMPTS, found, strict=True):
        expected, _ = their_tokens(pair[1], prompt, **theirs)
        assert row.tokens == expected[0]
        assert row.finish == ("length" if len(row.tokens) == 12 else "eod")


BEAMS: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4},
    {"num_beams": 5, "num_return_sequences": 5},
    {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": "never"},
    {"num_beams": 4, "length_penalty": 2.0, "early_stopping": "never", "num_return_sequences": 2},
    {"num_beams": 4, "length_penalty": 0.0, "num_return_sequences": 4},
    {"num_beams": 3, "length_penalty": -1.0, "num_return_sequences": 3},
    {"num_beams": 3, "repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_return_sequences": 3},
    {"num_beams": 4, "min_new_tokens": 6, "num_return_sequences": 4},
    {"num_beams": 4, "max_new_tokens": 1, "num_return_sequences": 4},
    {"num_beams": 12, "num_return_sequences": 12, "early_stopping": True},
]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [0.0, 1.5, 4.0])
@pytest.mark.parametrize("options", BEAMS)
def test_beam_search_equals_transformers(pair: Any, options: dict[str, Any], bias: float) -> None:
    """Without and with a bias towards the end: few, some and most beams end before the last token."""
    ours = {("no_repeat_ngram" if name == "no_repeat_ngram_size" else name): v for name, v in options.items()}
    found = our_tokens(pair[0], PROMPTS, strategy="beam", logit_bias=(f"{EOD}:{bias}",), **ours)
    for prompt, rows in zip(PROMPTS, found, strict=True):
        expected, scores = their_tokens(pair[1], prompt, sequence_bias=[[[EOD], bias]], **options)
        assert [row.tokens for row in rows] == expected
        assert [row.score for row in rows] == pytest.approx(scores, rel=1e-4, abs=1e-5)


def test_the_beams_above_end_in_different_ways(pair: Any) -> None:
    ends = set()
    for bias in (0.0, 1.5, 4.0):
        for rows in our_tokens(
            pair[0], PROMPTS, strategy="beam", num_beams=5, num_return_sequences=5, logit_bias=(f"{EOD}:{bias}",)
        ):
            ends |= {(row.finish, len(row.tokens)) for row in rows}
    assert ("length", 12) in ends and len({length for finish, length in ends if finish == "eod"}) > 4


def test_a_batch_of_ragged_beams_equals_each_prompt_alone(pair: Any) -> None:
    options = {"strategy": "beam", "num_beams": 3, "num_return_sequences": 3, "logit_bias": ("100:2",)}
    together = our_tokens(pair[0], PROMPTS, **options)
    for prompt, rows in zip(PROMPTS, together, strict=True):
        (alone,) = our_tokens(pair[0], [prompt], **options)
        assert [row.tokens for row in rows] == [row.tokens for row in alone]


@torch.no_grad()
def test_log_probabilities_are_those_of_transformers(pair: Any) -> None:
    for options in ({}, {"strategy": "sampling", "top_k": 5}, {"strategy": "beam", "num_beams": 3}):
        for prompt, (row,) in zip(PROMPTS, our_tokens(pair[0], PROMPTS, **options), strict=True):
            log = pair[1](torch.tensor([prompt + row.tokens])).logits[0].log_softmax(-1)
            expected = [log[len(prompt) - 1 + i, token].item() for i, token in enumerate(row.tokens)]
            assert row.logprobs == pytest.approx(expected, abs=1e-4)


@torch.no_grad()
def test_ragged_rows_have_the_logits_of_each_prompt_alone(pair: Any) -> None:
    ours, theirs = pair
    seen: list[Tensor] = []
    hook = ours.register_forward_hook(lambda module, args, output: seen.append(output))
    together = our_tokens(ours, PROMPTS, ignore_eod=True)
    hook.remove()
    for number, prompt in enumerate(PROMPTS):
        (alone,) = our_tokens(ours, [prompt], ignore_eod=True)
        assert alone[0].tokens == together[number][0].tokens
        wanted = theirs(torch.tensor([prompt + alone[0].tokens])).logits[0, len(prompt) - 1 :]
        for step, logits in enumerate(seen):
            assert (logits[number] - wanted[step]).abs().max() <= 1e-5 * max(1.0, wanted[step].abs().max().item())


# Groups: transformers has no group beam search of its own any more, so here is one, without a cache


def naive_groups(model: PretrainedGPT, prompt: list[int], cfg: GenerateConfig) -> list[tuple[float, list[int]]]:
    size, limit = cfg.num_beams // cfg.num_beam_groups, cfg.max_new_tokens
    live: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(cfg.num_beam_groups)]
    done: list[list[tuple[float, list[int]]]] = [[] for _ in range(cfg.num_beam_groups)]
    for length in range(1, limit + 1):
        chosen: list[int] = []
        for group in range(cfg.num_beam_groups):
            everything = []
            for total, text in live[group]:
                log = model(torch.tensor([prompt + text]))[0, -1].log_softmax(-1).tolist()
                for token, value in enumerate(log):
                    value += total + cfg.biases.get(token, 0.0) - cfg.diversity_penalty * chosen.count(token)
                    everything.append((value, [*text, token]))
            everything.sort(key=lambda item: -item[0])
            following = []
            for rank, (total, text) in enumerate(everything[: 2 * size]):
                ends = text[-1] == EOD or length == limit
                if ends and rank < size:
                    done[group].append((total / length**cfg.length_penalty, text))
                if not ends:
                    following.append((total, text))
            live[group] = following[:size]
            done[group] = sorted(done[group], key=lambda item: -item[0])[:size]
            if len(done[group]) == size and live[group]:
                best_left = live[group][0][0] / length**cfg.length_penalty
                if cfg.early_stopping is True or best_left <= done[group][-1][0]:
                    live[group] = []
            chosen += [text[-1] for _, text in live[group]]
    return sorted((item for group in done for item in group), key=lambda item: -item[0])


@torch.no_grad()
@pytest.mark.parametrize(
    ("groups", "beams", "penalty", "early", "bias"),
    [(2, 4, 0.5, False, 2.0), (3, 3, 5.0, False, 0.0), (2, 6, 1.5, True, 4.0), (4, 4, 100.0, False, 3.0)],
)
def test_group_beam_search_equals_a_naive_one(
    pair: Any, groups: int, beams: int, penalty: float, early: bool, bias: float
) -> None:
    options = {
        "strategy": "beam",
        "num_beams": beams,
        "num_beam_groups": groups,
        "diversity_penalty": penalty,
        "early_stopping": early,
        "num_return_sequences": beams,
        "max_new_tokens": 6,
        "logit_bias": (f"{EOD}:{bias}",),
    }
    found = our_tokens(pair[0], PROMPTS, **options)
    for prompt, rows in zip(PROMPTS, found, strict=True):
        expected = naive_groups(pair[0], prompt, settings(**options))
        assert [row.tokens for row in rows] == [[t for t in text if t != EOD] for _, text in expected]
        assert [row.score for row in rows] == pytest.approx([score for score, _ in expected], rel=1e-4, abs=1e-5)
    if groups == beams:
        assert len({row.tokens[0] for row in found[0] if row.tokens}) > 1, "the groups did not avoid each other"


# One processor at a time, on random logits


def random_logits(seed: int, size: int = VOCAB) -> Tensor:
    return 3 * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def random_tokens(seed: int, length: int = 30, size: int = 12) -> list[int]:
    """Few different ones, so that they repeat each other."""
    return torch.randint(0, size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def theirs(processor: Any, tokens: list[int], logits: Tensor) -> Tensor:
    return processor(torch.tensor([tokens]), logits[None].clone())[0]


PROCESSORS = [
    (
        lambda x, t: ours_list.add_bias(x, {3: 1.5, 90: -4.0}),
        lambda: theirs_list.SequenceBiasLogitsProcessor([[[3], 1.5], [[90], -4.0]]),
    ),
    (
        lambda x, t: ours_list.penalize_repetition(x, t, 1.3),
        lambda: theirs_list.RepetitionPenaltyLogitsProcessor(1.3),
    ),
    (
        lambda x, t: ours_list.penalize_repetition(x, t, 0.7),
        lambda: theirs_list.RepetitionPenaltyLogitsProcessor(0.7),
    ),
    (lambda x, t: ours_list.forbid_repeated_ngrams(x, t, 1), lambda: theirs_list.NoRepeatNGramLogitsProcessor(1)),
    (lambda x, t: ours_list.forbid_repeated_ngrams(x, t, 2), lambda: theirs_list.NoRepeatNGramLogitsProcessor(2)),
    (lambda x, t: ours_list.forbid_repeated_ngrams(x, t, 3), lambda: theirs_list.NoRepeatNGramLogitsProcessor(3)),
    (lambda x, t: ours_list.forbid_repeated_ngrams(x, t, 40), lambda: theirs_list.NoRepeatNGramLogitsProcessor(40)),
    (lambda x, t: ours_list.forbid(x, EOD), lambda: theirs_list.MinNewTokensLengthLogitsProcessor(29, 5, [EOD])),
    (lambda x, t: ours_list.keep_top_k(x, 7), lambda: theirs_list.TopKLogitsWarper(7)),
    (lambda x, t: ours_list.keep_top_p(x, 0.6), lambda: theirs_list.TopPLogitsWarper(0.6)),
    (lambda x, t: ours_list.keep_min_p(x, 0.05), lambda: theirs_list.MinPLogitsWarper(0.05)),
    (lambda x, t: ours_list.keep_min_p(x, 1.0), lambda: theirs_list.MinPLogitsWarper(1.0)),
    (lambda x, t: ours_list.keep_typical(x, 0.3), lambda: theirs_list.TypicalLogitsWarper(0.3)),
    (lambda x, t: ours_list.keep_typical(x, 0.9), lambda: theirs_list.TypicalLogitsWarper(0.9)),
]


@pytest.mark.parametrize("number", range(len(PROCESSORS)))
def test_each_processor_equals_that_of_transformers(number: int) -> None:
    ours, make = PROCESSORS[number]
    for seed in range(20):
        logits, tokens = random_logits(seed), random_tokens(seed)
        before = logits.clone()
        assert torch.equal(ours(logits, tokens), theirs(make(), tokens, logits))
        assert torch.equal(logits, before), "the logits given were changed"


@pytest.mark.parametrize("tokens", [[8], [8, 8], [8, 8, 8], [8, 9, 8], [8, 8, 9, 8], [8, 9, 8, 9]])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ngrams_of_short_texts(tokens: list[int], size: int) -> None:
    logits = random_logits(0)
    expected = theirs(theirs_list.NoRepeatNGramLogitsProcessor(size), tokens, logits)
    assert torch.equal(ours_list.forbid_repeated_ngrams(logits, tokens, size), expected)


COMBINATIONS = [
    {},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.4, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
    {"repetition_penalty": 1.2, "no_repeat_ngram": 2, "top_k": 30},
    {"logit_bias": ("3:2", "50:-1"), "repetition_penalty": 1.5, "temperature": 0.5, "min_p": 0.1},
    {"min_new_tokens": 40, "no_repeat_ngram": 1, "typical_p": 0.5, "temperature": 2.0, "top_k": 60},
    {"logit_bias": ("100:9",), "min_new_tokens": 40, "top_p": 0.3, "repetition_penalty": 0.9},
]


@pytest.mark.parametrize("chosen", COMBINATIONS)
def test_combinations_have_the_distribution_of_transformers(chosen: dict[str, Any]) -> None:
    """The processors in the order in which transformers' generate puts them together itself."""
    from transformers import GenerationConfig, GPT2Config

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=VOCAB, n_positions=64))
    cfg = settings(max_new_tokens=50, strategy="sampling", **chosen)
    named = {
        "temperature": cfg.temperature,
        "top_k": cfg.top_k,
        "top_p": cfg.top_p,
        "min_p": cfg.min_p or None,
        "typical_p": cfg.typical_p,
        "repetition_penalty": cfg.repetition_penalty,
        "no_repeat_ngram_size": cfg.no_repeat_ngram,
        "min_new_tokens": cfg.min_new_tokens or None,
        "sequence_bias": [[[token], bias] for token, bias in cfg.biases.items()] or None,
    }
    theirs_cfg = GenerationConfig(do_sample=True, eos_token_id=EOD, **named)
    theirs_cfg._eos_token_tensor = torch.tensor([EOD])
    for seed in range(20):
        logits, tokens = random_logits(seed), random_tokens(seed)
        processors = model._get_logits_processor(theirs_cfg, input_ids_seq_length=10, device="cpu")
        expected = theirs(processors, tokens, logits).softmax(-1)
        got = distribution(logits, Past(tokens[:10], tokens[10:], EOD), cfg)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)


def test_presence_and_frequency_by_their_definition() -> None:
    logits, prompt, generated = random_logits(1), [5, 5, 6], [7, 7, 7, 8]
    cfg = settings(presence_penalty=0.5, frequency_penalty=0.25)
    got = adjusted(logits, Past(prompt, generated), cfg)
    expected = logits.clone()
    expected[7] -= 0.5 + 3 * 0.25
    expected[8] -= 0.5 + 0.25
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


# Paddle and MindFormers, in plain loops


def paddle_probabilities(logits: np.ndarray, seen: list[int], early: bool, cfg: GenerateConfig) -> np.ndarray:
    x = logits.astype(np.float64).copy()
    if early:
        x[EOD] = -np.inf
    for token in set(seen):
        x[token] = x[token] / cfg.repetition_penalty if x[token] > 0 else x[token] * cfg.repetition_penalty
    x = x / cfg.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    if cfg.top_k:
        p[p < np.sort(p)[-cfg.top_k]] = 0
    mass, kept = 0.0, np.zeros_like(p)
    for token in np.argsort(-p, kind="stable"):  # p does not sum to 1 any more, and that is the point
        kept[token] = p[token]
        mass += p[token]
        if mass > cfg.top_p:
            break
    return kept / kept.sum()


@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"top_k": 5, "top_p": 0.75},
        {"top_k": 8, "top_p": 0.6, "temperature": 1.5},
        {"top_p": 0.5, "repetition_penalty": 1.4, "min_new_tokens": 25},
        {"top_k": 3, "top_p": 0.999},
    ],
)
def test_rules_of_paddle(chosen: dict[str, Any]) -> None:
    cfg = settings(max_new_tokens=30, strategy="sampling", rules="paddle", **chosen)
    hugging = settings(max_new_tokens=30, strategy="sampling", **chosen)
    differs = 0
    for seed in range(20):
        logits, tokens = random_logits(seed), random_tokens(seed)
        past = Past(tokens[:10], tokens[10:], EOD)
        expected = paddle_probabilities(logits.numpy(), tokens, cfg.min_new_tokens > 20, cfg)
        got = distribution(logits, past, cfg)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-7)
        differs += int((got > 0).sum() != (distribution(logits, past, hugging) > 0).sum())
    assert (differs > 0) == ("top_k" in chosen and cfg.top_p < 0.9), "top-p after top-k is where the two differ"


def mindformers_probabilities(logits: np.ndarray, generated: list[int], cfg: GenerateConfig) -> np.ndarray:
    x = logits.astype(np.float64)
    log = x - x.max() - np.log(np.exp(x - x.max()).sum())
    if cfg.repetition_penalty != 1:
        for token in set(generated):
            log[token] -= generated.count(token) * cfg.repetition_penalty + cfg.repetition_penalty
    p = np.exp(log)
    order = np.argsort(-p, kind="stable")
    if cfg.top_p < 1:
        order = order[:5000]
        order = order[: int((np.cumsum(p[order]) < cfg.top_p).sum()) + 1]
    elif cfg.top_k:
        order = order[: cfg.top_k]
    kept = np.zeros_like(p)
    kept[order] = p[order]
    return kept / kept.sum()


@pytest.mark.parametrize(
    "chosen",
    [
        {"top_k": 5},
        {"top_k": 2, "top_p": 0.9},
        {"top_k": 10, "repetition_penalty": 1.2},
        {"top_p": 0.7, "repetition_penalty": 0.3},
        {"repetition_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("size", [VOCAB, 6000])
def test_rules_of_mindformers(chosen: dict[str, Any], size: int) -> None:
    cfg = settings(max_new_tokens=30, strategy="sampling", rules="mindformers", **chosen)
    for seed in range(10):
        # flat: with a large vocabulary even 5000 tokens do not reach the mass asked for
        logits, tokens = random_logits(seed, size) / (1 if size == VOCAB else 10), random_tokens(seed)
        expected = mindformers_probabilities(logits.numpy(), tokens[10:], cfg)
        got = distribution(logits, Past(tokens[:10], tokens[10:], EOD), cfg)
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float32), rtol=1e-3, atol=1e-7)


def test_mindformers_counts_the_prompt_and_is_greedy_after_its_penalty(pair: Any) -> None:
    rows = our_tokens(pair[0], PROMPTS, rules="mindformers", max_new_tokens=10, repetition_penalty=3.0, ignore_eod=True)
    for prompt, (row,) in zip(PROMPTS, rows, strict=True):
        text: list[int] = []
        while len(prompt) + len(text) < 10:
            with torch.no_grad():
                logits = pair[1](torch.tensor([prompt + text])).logits[0, -1].numpy()
            text.append(int(mindformers_probabilities(logits, text, settings(repetition_penalty=3.0)).argmax()))
        assert row.tokens == text


def naive_paddle_beams(model: PretrainedGPT, prompt: list[int], cfg: GenerateConfig) -> list[tuple[float, list[int]]]:
    def scored(total: float, length: int) -> float:
        return total / ((5 + length) / 6) ** cfg.length_penalty

    size, live, done = cfg.num_beams, [(0.0, list[int]())], list[tuple[float, list[int]]]()
    for length in range(cfg.max_new_tokens):
        everything = []
        for total, text in live:
            log = model(torch.tensor([prompt + text]))[0, -1].log_softmax(-1).tolist()
            for token in set(prompt + text):
                log[token] *= cfg.repetition_penalty  # a log-probability is never positive
            if length < cfg.min_new_tokens:
                log[EOD] = -math.inf
            everything += [(total + value, [*text, token]) for token, value in enumerate(log)]
        everything = sorted(everything, key=lambda item: -item[0])[: 2 * size]
        done += [(scored(total, length), text[:-1]) for total, text in everything[:size] if text[-1] == EOD]
        done = sorted(done, key=lambda item: -item[0])[:size]
        live = [(total, text) for total, text in everything if text[-1] != EOD][:size]
        if len(done) == size and (cfg.early_stopping is True or done[-1][0] >= scored(everything[0][0], length)):
            return done
    done += [(scored(total, len(text)), text) for total, text in live]
    return sorted(done, key=lambda item: -item[0])[:size]


@torch.no_grad()
@pytest.mark.parametrize(
    "chosen",
    [
        {"num_beams": 3},
        {"num_beams": 4, "length_penalty": 0.0},
        {"num_beams": 4, "early_stopping": True},
        {"num_beams": 2, "length_penalty": 2.5, "repetition_penalty": 1.2, "min_new_tokens": 2},
    ],
)
def test_beams_by_the_rules_of_paddle(pair: Any, chosen: dict[str, Any]) -> None:
    model = pair[0]
    with torch.no_grad():
        before = model.head.weight[EOD].clone()
        model.head.weight[EOD] *= 1.6  # paddle has no bias: make the end likelier in another way
    options = {"strategy": "beam", "rules": "paddle", "max_new_tokens": 7, **chosen}
    try:
        for prompt in PROMPTS:
            (rows,) = our_tokens(model, [prompt], **options, num_return_sequences=chosen["num_beams"])
            expected = naive_paddle_beams(model, prompt, settings(**options))
            assert [row.tokens for row in rows] == [text for _, text in expected]
            assert [row.score for row in rows] == pytest.approx([score for score, _ in expected], rel=1e-4, abs=1e-5)
    finally:
        model.head.weight[EOD] = before
