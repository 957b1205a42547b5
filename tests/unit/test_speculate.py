"""Tokens that are guessed and read ahead: the text stays the one that is written without them."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import GenerationError
from gptworks.generate import draft_model, fast_decode, sampler, speculate
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.engine import continue_tokens, settings_of
from gptworks.generate.speculate import ModelGuesser, NgramGuesser, Pace, Speculation
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.model.inference import WEIGHTS, store_weights
from gptworks.parallel.build import FreshWeights, build_gpt

CONFIG = ModelConfig(num_layers=2, hidden_size=48, num_heads=4, vocab_size=61, max_positions=128)
SMALL = CONFIG.model_copy(update={"num_layers": 1})
PROMPTS = [[5, 9, 20, 31, 5, 9, 20, 31, 5, 9], [7, 4, 18, 50, 3, 30]]
SETTINGS = {
    "greedy": {"strategy": "greedy"},
    "greedy with rules": {"strategy": "greedy", "repetition_penalty": 1.2, "no_repeat_ngram": 4, "min_new_tokens": 9},
    "sampling": {"strategy": "sampling", "temperature": 0.3},
    "nucleus": {"strategy": "sampling", "top_p": 0.8, "num_return_sequences": 3},
}


def model_of(cfg: ModelConfig = CONFIG, seed: int = 3) -> GPT:
    weights = FreshWeights(InitConfig(std=0.2), cfg.num_layers, seed=seed)
    return build_gpt(cfg, World(torch.device("cpu")), torch.float32, weights).eval()


@pytest.fixture(params=["C++", "torch"], autouse=True)
def computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(fast_decode, "why_not", lambda: "switched off")
    elif fast_decode.why_not() is not None:
        pytest.skip(f"no C++ function: {fast_decode.why_not()}")


def always(monkeypatch: pytest.MonkeyPatch) -> list[Speculation]:
    """Guess whatever it costs; the speculations that were begun."""
    begun: list[Speculation] = []
    real = Speculation.__init__

    def remembered(self: Speculation, *given: object) -> None:
        real(self, *given)  # type: ignore[arg-type]
        begun.append(self)

    monkeypatch.setattr(Pace, "may_guess", True)
    monkeypatch.setattr(Speculation, "__init__", remembered)
    return begun


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("guesser", ["ngram", "model"])
def test_the_text_is_the_one_without_guesses(
    guesser: str, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, begun = model_of(), always(monkeypatch)
    monkeypatch.setattr("gptworks.generate.engine.draft_model", lambda *_: model_of(SMALL))
    cfg = settings_of({"max_new_tokens": 60, "seed": 7} | settings)
    plain = continue_tokens(model, PROMPTS, cfg, eod_id=60)
    name = "ngram" if guesser == "ngram" else "a folder"
    found = continue_tokens(model, PROMPTS, cfg.model_copy(update={"speculate": name}), eod_id=60)
    for ours, theirs in zip(found, plain, strict=True):
        for mine, one in zip(ours, theirs, strict=True):
            assert (mine.tokens, mine.finish) == (one.tokens, one.finish)
            assert mine.logprobs == pytest.approx(one.logprobs, abs=1e-4)
    assert begun[0].num_guessed > 0
    if settings["strategy"] == "greedy" and guesser == "ngram" and len(settings) == 1:
        assert begun[0].num_right > 10


def test_a_model_that_guesses_for_itself_is_always_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where tokens are drawn: it draws with the same random numbers."""
    model, begun = model_of(), always(monkeypatch)
    monkeypatch.setattr("gptworks.generate.engine.draft_model", lambda *_: model)
    cfg = settings_of({"max_new_tokens": 60, "seed": 7, "speculate": "itself"})
    calls = []
    real = DecodeState.read_each
    monkeypatch.setattr(DecodeState, "read_each", lambda self, t: calls.append(t) or real(self, t))
    continue_tokens(model, PROMPTS[:1], cfg)
    assert begun[0].num_right == begun[0].num_guessed > 40
    assert len(calls) < 40


def test_what_is_drawn_has_the_distribution_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second and third token, over many texts: chi-square against what the model says."""
    cfg = ModelConfig(num_layers=1, hidden_size=16, num_heads=2, vocab_size=5, max_positions=16)
    model, small = model_of(cfg, seed=1), model_of(cfg, seed=2)
    always(monkeypatch)
    monkeypatch.setattr("gptworks.generate.engine.draft_model", lambda *_: small)
    number = 1500
    asked = settings_of({"max_new_tokens": 3, "num_return_sequences": number, "seed": 5, "speculate": "small"})
    (found,) = continue_tokens(model, [[1, 2]], asked)
    counts = Counter(tuple(each.tokens) for each in found)
    expected: dict[tuple[int, ...], float] = {}
    with torch.no_grad():
        for text in torch.cartesian_prod(*[torch.arange(5)] * 3).tolist():
            logits = model(torch.tensor([[1, 2, *text]]))[0, 1:4].log_softmax(-1)
            expected[tuple(text)] = float(logits[range(3), text].sum().exp())
    common = {text: mass for text, mass in expected.items() if mass * number >= 5}
    rest = 1 - sum(common.values())
    statistic = sum((counts[text] - mass * number) ** 2 / (mass * number) for text, mass in common.items())
    others = number - sum(counts[text] for text in common)
    statistic += (others - rest * number) ** 2 / (rest * number)
    freedom = len(common)
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_a_guess_is_what_followed_the_last_tokens_before() -> None:
    row = sampler.Row(0, [1, 2, 3, 4, 5, 1, 2, 3], torch.Generator(), 9)
    guesser = NgramGuesser()
    assert guesser.guesses({0: (row, 4)}) == {0: [4, 5, 1, 2]}
    row.tokens = [9, 9]
    assert guesser.guesses({0: (row, 4)}) == {0: []}
    row.tokens = [9, 9, 9, 9]
    assert guesser.guesses({0: (row, 3)}) == {0: [9, 9, 9]}  # runs on into itself


def test_guessing_that_is_slower_rests_longer_and_longer() -> None:
    pace = Pace()
    rests = []
    for _ in range(3):
        steps = 0
        while not pace.may_guess:
            pace.record(1.0, 1, was_guessed=False)
            steps += 1
        rests.append(steps)
        pace.record(1.3, 1, was_guessed=True)
        pace.record(1.3, 1, was_guessed=True)
    assert rests == [speculate.PLAIN_FIRST, speculate.SHORTEST_REST, 2 * speculate.SHORTEST_REST]


def test_guessing_that_is_faster_goes_on() -> None:
    pace = Pace()
    for _ in range(speculate.PLAIN_FIRST):
        pace.record(1.0, 1, was_guessed=False)
    for _ in range(50):
        assert pace.may_guess
        pace.record(1.3, 2, was_guessed=True)


def test_useless_guesses_cost_few_steps() -> None:
    """A clock on which reading n tokens takes 1 + 0.3 n: of 200 steps hardly any are made longer."""
    model = model_of()
    cfg = GenerateConfig(strategy="greedy", max_new_tokens=110)
    now = 0.0

    class Wrong:
        first_length = 3

        def guesses(self, rows: dict[int, tuple[sampler.Row, int]]) -> dict[int, list[int]]:
            return {number: [60] * most for number, (_, most) in rows.items()}

    class Timed(DecodeState):
        def read_each(self, tokens):  # type: ignore[no-untyped-def]
            nonlocal now
            now += 0.7 + 0.3 * max(map(len, tokens.values()))
            return super().read_each(tokens)

    def drawn() -> Iterator[int]:
        prompts = PROMPTS[1:]
        rows = sampler.rows_of(prompts, [110], cfg)
        with torch.no_grad():
            yield from Speculation(rows, Timed(model, prompts, 110, 60), Wrong(), lambda: now).run(
                cfg, eod_id=None, is_stop=lambda *_: False
            )

    assert sum(1 for _ in drawn()) == 110
    assert now < 109 / 0.95


def test_a_guesser_with_a_shorter_context_stops_guessing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, short = model_of(), model_of(SMALL.model_copy(update={"max_positions": 24}))
    always(monkeypatch)
    monkeypatch.setattr("gptworks.generate.engine.draft_model", lambda *_: short)
    cfg = settings_of({"strategy": "greedy", "max_new_tokens": 60})
    plain = continue_tokens(model, PROMPTS, cfg)
    found = continue_tokens(model, PROMPTS, cfg.model_copy(update={"speculate": "short"}))
    assert [[each.tokens for each in row] for row in found] == [[each.tokens for each in row] for row in plain]


def test_a_window_that_slides_is_not_guessed_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(CONFIG.model_copy(update={"max_positions": 24}))
    always(monkeypatch)
    cfg = settings_of({"strategy": "greedy", "max_new_tokens": 40, "window": "slide"})
    plain = continue_tokens(model, PROMPTS, cfg)
    found = continue_tokens(model, PROMPTS, cfg.model_copy(update={"speculate": "ngram"}))
    assert [[each.tokens for each in row] for row in found] == [[each.tokens for each in row] for row in plain]


def test_no_folder_and_beams_are_refused(tmp_path: Path) -> None:
    cfg = settings_of({"strategy": "greedy", "speculate": str(tmp_path / "none")})
    with pytest.raises(GenerationError, match=r"generate\.speculate: got '.*none', which is not a folder"):
        continue_tokens(model_of(), PROMPTS, cfg)
    with pytest.raises(Exception, match="speculate: ngram needs strategy: greedy or sampling, got beam"):
        settings_of({"strategy": "beam", "num_beams": 2, "speculate": "ngram"})


def test_another_vocabulary_is_refused() -> None:
    class Draft:
        tokenizer = None
        cfg = CONFIG.model_copy(update={"vocab_size": 60})

    with pytest.raises(GenerationError, match=r"the model of small has 60 tokens, this one 61"):
        draft_model.require_same_vocabulary("small", Draft(), model_of(), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_draft_is_kept_as_the_model_is(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, asked = model_of(), []
    store_weights(model, kind)
    monkeypatch.setattr(draft_model, "_loaded", lambda name, device, weights: asked.append(weights) or model)
    monkeypatch.setattr(draft_model, "require_same_vocabulary", lambda *_: None)
    draft_model.draft_model(str(tmp_path), model, None)
    assert asked == [kind]


def test_a_state_forgets_what_it_has_read() -> None:
    model = model_of()
    with torch.no_grad():
        state, again = (DecodeState(model, PROMPTS, 20, 61) for _ in range(2))
        for each in (state, again):
            each.read_prompts()
        state.read_each({0: [1, 2, 3], 1: [4]})
        state.forget(0, 2)
        again.read_each({0: [1], 1: [4]})
        found, expected = state.read_each({0: [8, 9], 1: [5]}), again.read_each({0: [8, 9], 1: [5]})
    assert state.tokens == again.tokens
    for row in (0, 1):
        torch.testing.assert_close(found[row], expected[row], atol=1e-5, rtol=1e-5)


def test_a_model_guesser_forgets_wrong_guesses() -> None:
    model = model_of()
    cfg = GenerateConfig(strategy="greedy", max_new_tokens=20)
    with torch.no_grad():
        (row,) = sampler.rows_of(PROMPTS[:1], [20], cfg)
        row.tokens = [3]
        guesser = ModelGuesser(DecodeState(model, PROMPTS[:1], 20, 61), [row], cfg, None)
        guesser.guesses({0: (row, 4)})
        row.tokens = [3, 44]
        found = guesser.guesses({0: (row, 4)})
        fresh = ModelGuesser(DecodeState(model, PROMPTS[:1], 20, 61), [row], cfg, None).guesses({0: (row, 4)})
    assert found == fresh
