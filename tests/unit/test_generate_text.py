"""Text as it appears: whole characters, stop strings across token borders, the sliding window, several texts."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import GenerationError
from gptworks.generate.engine import continue_tokens, generate, generations, stream_text
from gptworks.generate.text import TextOut, continuation
from gptworks.launch.world import World
from gptworks.model import GPT, KVCache
from gptworks.parallel.build import FreshWeights, build_gpt
from gptworks.tokenizer import Tokenizer

CONTEXT = 24


@pytest.fixture(scope="module")
def model(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> PretrainedGPT:
    cfg = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, vocab_size=520, max_positions=CONTEXT, tied=False)
    weights = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.25), 2, seed=4))
    path = tmp_path_factory.mktemp("text")
    huggingface.save(path, cfg, dict(weights.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(path)
    return PretrainedGPT.from_pretrained(path)


# Characters


@pytest.mark.parametrize("text", ["naïve 中文 🎉!", "🎉🎉", "plain", "Grüße 你"])
def test_no_piece_is_half_a_character(small_tokenizer: Tokenizer, text: str) -> None:
    """Nearly every byte of these is a token of its own in a small English vocabulary."""
    tokens, prompt = small_tokenizer.encode(text), small_tokenizer.encode("Tom: ")
    out = TextOut(small_tokenizer, prompt)
    pieces = [out.add(token) for token in tokens]
    assert "".join(pieces) == text and out.close() == ""
    assert all("\ufffd" not in piece for piece in pieces)
    if not text.isascii():
        assert "" in pieces, "no character was in several tokens: this proves nothing"


def test_what_is_broken_at_the_end_is_shown_as_such(small_tokenizer: Tokenizer) -> None:
    tokens = small_tokenizer.encode("a🎉")[:-1]
    out = TextOut(small_tokenizer, [5])
    assert [out.add(token) for token in tokens] == ["a", "", "", ""]
    assert out.close() == "\ufffd" == out.text[1:]


def test_bytes_that_never_become_a_character_do_not_hold_back_what_follows(small_tokenizer: Tokenizer) -> None:
    half, letter = small_tokenizer.encode("🎉")[1], small_tokenizer.encode("a")[0]
    out = TextOut(small_tokenizer, [5])
    assert [out.add(token) for token in (half, half, letter)] == ["", "", "\ufffd\ufffda"]


@given(st.lists(st.integers(0, 511), max_size=30))
def test_pieces_make_up_the_text_whatever_the_tokens(small_tokenizer: Tokenizer, tokens: list[int]) -> None:
    out = TextOut(small_tokenizer, [70, 71])
    pieces = [out.add(token) for token in tokens] + [out.close()]
    assert "".join(pieces) == out.text == continuation(small_tokenizer, [70, 71], tokens)


def test_a_decoder_that_drops_the_first_space(small_tokenizer: Tokenizer) -> None:
    """As sentencepiece's does: the space between prompt and text must not be lost."""

    class Dropping:
        def decode(self, ids: Any) -> str:
            return small_tokenizer.decode(ids).removeprefix(" ")

    prompt, new = small_tokenizer.encode("Anna"), small_tokenizer.encode(" walked")
    assert continuation(Dropping(), prompt, new) == " walked"  # type: ignore[arg-type]


# Stop strings


@given(
    st.text(st.sampled_from("abc"), max_size=12),
    st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_in_letters(small_tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    """One letter at a time, so that every stop string crosses the borders of tokens."""
    out = TextOut(small_tokenizer, [70], stops)
    pieces = []
    for letter in text:
        pieces.append(out.add(small_tokenizer.encode(letter)[0]))
        if out.is_stopped:
            break
    pieces.append(out.close())
    # By definition: the shortest beginning that has a stop string in it, without the first one there.
    expected = text
    for length in range(len(text) + 1):
        places = [text[:length].find(stop) for stop in stops if stop in text[:length]]
        if places:
            expected = text[: min(places)]
            break
    assert "".join(pieces) == expected == out.text
    assert out.is_stopped == any(stop in text for stop in stops)


def test_a_stop_string_ends_the_text_and_is_not_in_it(model: PretrainedGPT) -> None:
    whole = generations(model, "Anna walked", strategy="greedy", max_new_tokens=12)[0]
    border = len(model.tokenizer.decode(whole.tokens[:5]))  # type: ignore[union-attr]
    stop = whole.text[border - 1 : border + 1]  # the end of one token and the beginning of the next
    cut = generations(model, "Anna walked", strategy="greedy", max_new_tokens=12, stop=["never seen", stop])[0]
    assert cut.finish == "stop" and cut.text == whole.text[: whole.text.index(stop)]
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) < 12
    streamed = "".join(stream_text(model, "Anna walked", strategy="greedy", max_new_tokens=12, stop=stop))
    assert streamed == cut.text
    (beam,) = generations(model, "Anna walked", strategy="beam", num_beams=2, max_new_tokens=12)
    place = beam.text[4:6]
    (cut_beam,) = generations(model, "Anna walked", strategy="beam", num_beams=2, max_new_tokens=12, stop=place)
    assert place not in cut_beam.text


def test_streamed_pieces_are_the_text(model: PretrainedGPT) -> None:
    for seed in range(5):
        settings: dict[str, Any] = {"seed": seed, "max_new_tokens": 15, "temperature": 1.5}
        pieces = list(stream_text(model, "The river", **settings))
        assert "".join(pieces) == generate(model, "The river", **settings)[0]
        assert len(pieces) > 5 and "" not in pieces


def test_only_one_drawn_text_can_be_streamed(model: PretrainedGPT) -> None:
    for settings in ({"strategy": "beam", "num_beams": 2}, {"num_return_sequences": 2}, {"best_of": 3}):
        with pytest.raises(GenerationError, match="streaming needs one text"):
            list(stream_text(model, "The river", max_new_tokens=3, **settings))


# Several texts, scores, ends


def test_best_of_gives_the_likeliest_of_those_drawn(model: PretrainedGPT) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 6, "seed": 3}
    drawn = generations(model, ["The river", "Tom"], num_return_sequences=5, **settings)
    assert [found.prompt for found in drawn] == ["The river"] * 5 + ["Tom"] * 5
    assert len({found.text for found in drawn[:5]}) == 5
    best = generations(model, ["The river", "Tom"], best_of=5, num_return_sequences=2, **settings)
    expected = [sorted(part, key=lambda found: -found.score)[:2] for part in (drawn[:5], drawn[5:])]
    assert best == [found for part in expected for found in part]
    assert drawn[0].tokens == generations(model, "The river", **settings)[0].tokens, (
        "the first text depends on how many there are"
    )


def test_scores_and_ends(model: PretrainedGPT) -> None:
    (found,) = generations(model, "The river", strategy="greedy", max_new_tokens=8)
    assert found.finish == "length" and len(found.tokens) == len(found.logprobs) == 8
    assert found.score == pytest.approx(sum(found.logprobs) / 8)
    assert all(logprob <= 0 for logprob in found.logprobs)
    eod_id = model.tokenizer.eod_id  # type: ignore[union-attr]
    (ended,) = generations(model, "The river", strategy="greedy", max_new_tokens=8, logit_bias={eod_id: 100.0})
    assert (ended.finish, ended.text, ended.tokens, ended.logprobs) == ("eod", "", [], [])
    assert ended.score < 0
    (later,) = generations(
        model, "The river", strategy="greedy", max_new_tokens=8, min_new_tokens=3, logit_bias={eod_id: 100.0}
    )
    assert (later.finish, len(later.tokens)) == ("eod", 3)
    (ignored,) = generations(
        model, "The river", strategy="greedy", max_new_tokens=4, ignore_eod=True, logit_bias={eod_id: 100.0}
    )
    assert (ignored.finish, ignored.tokens) == ("length", [eod_id] * 4)
    assert ignored.text == "<|endoftext|>" * 4


def test_a_flat_list_of_texts(model: PretrainedGPT) -> None:
    texts = generate(model, ["Anna", "Tom"], strategy="beam", num_beams=3, num_return_sequences=3, max_new_tokens=4)
    assert len(texts) == 6
    assert texts[3:] == generate(model, "Tom", strategy="beam", num_beams=3, num_return_sequences=3, max_new_tokens=4)


# The sliding window


def settings(**changes: object) -> GenerateConfig:
    return GenerateConfig.model_validate({"strategy": "greedy", "window": "slide", **changes})


@torch.no_grad()
def by_definition(model: GPT, prompt: list[int], steps: int) -> list[int]:
    """Each token from the last CONTEXT tokens and nothing else."""
    text = list(prompt)
    for _ in range(steps):
        text.append(int(model(torch.tensor([text[-CONTEXT:]]))[0, -1, :512].argmax()))
    return text[len(prompt) :]


def test_a_sliding_window_equals_reading_the_last_tokens_anew(model: PretrainedGPT) -> None:
    prompts = [[5, 6, 7], list(range(100, 120)), list(range(40)), list(range(200, 200 + CONTEXT)), [9]]
    found = continue_tokens(model, prompts, settings(max_new_tokens=40), vocab_size=512)
    assert [new.tokens for (new,) in found] == [by_definition(model, prompt, 40) for prompt in prompts]


def test_within_the_context_a_sliding_window_changes_nothing(model: PretrainedGPT) -> None:
    prompts = [[5, 6, 7], list(range(100, 112))]
    slide = continue_tokens(model, prompts, settings(max_new_tokens=12), vocab_size=512)
    refuse = continue_tokens(model, prompts, settings(max_new_tokens=12, window="refuse"), vocab_size=512)
    assert slide == refuse


def test_rows_that_end_before_others_overflow(model: PretrainedGPT) -> None:
    prompts = [[5, 6, 7], list(range(300, 322))]
    endless = [by_definition(model, prompt, 30) for prompt in prompts]
    eod_id = next(token for token in endless[1][:20] if token not in endless[0][:25])
    found = continue_tokens(model, prompts, settings(max_new_tokens=30), eod_id=eod_id, vocab_size=512)
    cut = [row[: row.index(eod_id)] if eod_id in row else row for row in endless]
    assert [new.tokens for (new,) in found] == cut


def test_beams_in_a_sliding_window(model: PretrainedGPT) -> None:
    """As many beams as there is one likeliest text of: the same search over a model that only sees its last tokens."""
    prompt = list(range(60, 60 + CONTEXT - 2))
    (found,) = continue_tokens(
        model, [prompt], settings(strategy="beam", num_beams=2, max_new_tokens=6), vocab_size=512
    )
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(6):
        following = []
        for total, text in live:
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *text][-CONTEXT:]]))[0, -1, :512]
            log = logits.log_softmax(-1).tolist()
            following += [(total + value, [*text, token]) for token, value in enumerate(log)]
        live = sorted(following, key=lambda item: -item[0])[:2]
    assert found[0].tokens == live[0][1]


# The cache


def test_cache_rows_can_be_chosen_again(model: PretrainedGPT) -> None:
    def filled() -> KVCache:
        cache = model.new_cache(3, 10)
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), cache=cache)
        return cache

    rows = {row: [3 * row + 1, 3 * row + 2, 3 * row + 3] for row in range(3)}
    for chosen in ([2, 1, 0], [0, 0, 0], [1], [2, 2, 0, 1, 1]):
        cache = filled()
        cache.select(chosen)
        with torch.no_grad():
            got = model(torch.tensor([[50 + place] for place in range(len(chosen))]), cache=cache, last_only=True)
            wanted = [model(torch.tensor([[*rows[row], 50 + place]]))[0, -1] for place, row in enumerate(chosen)]
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-4, atol=1e-5)


def test_prompts_are_read_once_for_all_their_texts(model: PretrainedGPT) -> None:
    for chosen in ({"strategy": "sampling", "num_return_sequences": 4}, {"strategy": "beam", "num_beams": 4}):
        shapes: list[tuple[int, ...]] = []
        hook = model.register_forward_pre_hook(lambda module, args, seen=shapes: seen.append(tuple(args[0].shape)))
        continue_tokens(model, [[5, 6, 7], [8]], settings(max_new_tokens=3, **chosen), vocab_size=512)
        hook.remove()
        assert shapes == [(2, 3), (8, 1), (8, 1)]


def test_draws_of_a_row_do_not_depend_on_other_rows_texts(model: PretrainedGPT) -> None:
    chosen: dict[str, Any] = {"max_new_tokens": 5, "num_return_sequences": 3, "seed": 8}
    both = generations(model, ["Anna", "Tom"], **chosen)
    alone = generations(model, "Anna", **chosen)
    assert [found.tokens for found in both[:3]] == [found.tokens for found in alone]
    assert all(a.tokens != b.tokens for a, b in itertools.combinations(alone, 2))
