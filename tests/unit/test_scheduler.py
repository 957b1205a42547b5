"""Continuous batching: a row among others is the row alone; places, shared beginnings, order, cancelling, faults."""

import copy
import math
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gptworks.checkpoint.pretrained import PretrainedGPT
from gptworks.checkpoint.systems import huggingface
from gptworks.config.schema import GenerateConfig, InitConfig, ModelConfig
from gptworks.errors import GenerationError
from gptworks.generate import fast_decode, token_reader
from gptworks.generate import scheduler as scheduling
from gptworks.generate.engine import continue_tokens, generations_up_to
from gptworks.generate.engine_thread import EngineThread
from gptworks.generate.row_request import Progress, RowRequest
from gptworks.generate.sampler import rows_of
from gptworks.generate.scheduler import Scheduler
from gptworks.generate.slots import common_length
from gptworks.generate.text import TextOut, continuation
from gptworks.generate.token_reader import TorchReader, reader_of
from gptworks.launch.world import World
from gptworks.parallel.build import FreshWeights, build_gpt

CONTEXT, VOCAB, ROWS = 96, 512, 520


@pytest.fixture(scope="module")
def folder(small_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = ModelConfig(num_layers=2, hidden_size=64, num_heads=4, vocab_size=ROWS, max_positions=CONTEXT)
    model = build_gpt(cfg, World(torch.device("cpu")), torch.float32, FreshWeights(InitConfig(std=0.2), 2, seed=4))
    path = tmp_path_factory.mktemp("scheduler")
    huggingface.save(path, cfg, dict(model.named_parameters()), eod_id=small_tokenizer.eod_id)
    small_tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> PretrainedGPT:
    return PretrainedGPT.from_pretrained(folder)


class RecordingReader:
    """The reader in use, and how many tokens each pass had."""

    def __init__(self, model: PretrainedGPT) -> None:
        self.inner = reader_of(model)
        self.sizes: list[int] = []
        self.slots: list[list[int]] = []

    def read(self, tokens: Tensor, slots: Tensor, *more: Any) -> Tensor:
        self.sizes.append(len(tokens))
        self.slots.append(slots.tolist())
        return self.inner.read(tokens, slots, *more)


def scheduler_of(model: PretrainedGPT, slots: int = 4, reader: Any = None) -> Scheduler:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    cache = model.new_cache(slots, CONTEXT)
    return Scheduler(reader or reader_of(model), cache, vocab_size=tokenizer.vocab_size, eod_id=tokenizer.eod_id)


def settings(**changes: object) -> GenerateConfig:
    return GenerateConfig.model_validate({"max_new_tokens": 12, "strategy": "greedy", **changes})


def requests_of(prompts: list[list[int]], cfg: GenerateConfig, **more: Any) -> list[RowRequest]:
    limits = [cfg.max_new_tokens] * len(prompts)
    return [RowRequest(row, cfg, wants_logprobs=True, **more) for row in rows_of(prompts, limits, cfg)]


def finish(scheduler: Scheduler, requests: list[RowRequest]) -> list[Progress]:
    for request in requests:
        scheduler.submit(request)
    progress = []
    while scheduler.has_work:
        progress += scheduler.step()
    return progress


def prompts(number: int, seed: int = 0, longest: int = 70) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(number)]


# The reader


def test_torch_reads_rows_of_any_length_as_the_model_alone(model: PretrainedGPT) -> None:
    reader, cache = TorchReader(model), model.new_cache(5, CONTEXT)
    texts = prompts(3, seed=1)
    done = [0, 0, 0]
    slots = [4, 0, 2]
    draw = random.Random(2)
    last: dict[int, Tensor] = {}
    while any(done[i] < len(texts[i]) for i in range(3)):
        tokens, places, positions, wanted, whose = [], [], [], [], []
        for i in draw.sample(range(3), 3):
            size = draw.randint(0, min(9, len(texts[i]) - done[i]))
            tokens += texts[i][done[i] : done[i] + size]
            places += [slots[i]] * size
            positions += range(done[i], done[i] + size)
            done[i] += size
            if size:
                wanted.append(len(tokens) - 1)
                whose.append(i)
        if not tokens:
            continue
        given = (torch.tensor(each, dtype=torch.long) for each in (tokens, places, positions, wanted))
        for i, logits in zip(whose, reader.read(*given, cache), strict=True):
            last[i] = logits
    for i, text in enumerate(texts):
        with torch.no_grad():
            expected = model(torch.tensor([text]))[0, -1]
        torch.testing.assert_close(last[i], expected, rtol=1e-4, atol=1e-4)


def test_logits_come_in_the_order_in_which_they_are_wanted(model: PretrainedGPT) -> None:
    text = prompts(1, seed=3, longest=30)[0]
    numbers = torch.arange(len(text))
    slots = torch.zeros(len(text), dtype=torch.long)
    wanted = torch.tensor([len(text) - 1, 0, len(text) // 2])
    found = TorchReader(model).read(torch.tensor(text), slots, numbers, wanted, model.new_cache(1, CONTEXT))
    with torch.no_grad():
        expected = model(torch.tensor([text]))[0, wanted]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(fast_decode.why_not() is not None, reason=f"no C++ function: {fast_decode.why_not()}")
@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
def test_a_model_from_a_folder_is_read_by_the_function(folder: Path, weights: str) -> None:
    assert not isinstance(reader_of(PretrainedGPT.from_pretrained(folder, weights=weights)), TorchReader)


# A row among others


def is_alone_or_tied(among: RowRequest, alone: RowRequest) -> bool:
    """The same tokens up to one that is as likely as the one it is alone, within rounding; after it texts differ."""
    pairs = zip(among.scores, alone.scores, strict=False)
    place = next((number for number, (a, b) in enumerate(pairs) if a.token != b.token), None)
    if place is None:
        return among.row.tokens == alone.row.tokens and among.finish == alone.finish
    likelihoods = dict(alone.scores[place].alternatives)
    chosen = likelihoods.get(among.scores[place].token, -math.inf)
    return alone.scores[place].logprob - chosen < 1e-4


def test_a_tie_is_told_from_another_token(model: PretrainedGPT) -> None:
    (alone,) = requests_of([[1, 2]], settings(), num_alternatives=2)
    finish(scheduler_of(model), [alone])
    among = copy.deepcopy(alone)
    place, second = 3, alone.scores[3].alternatives[1]
    among.scores[place] = replace(among.scores[place], token=second[0])
    assert is_alone_or_tied(alone, alone) and not is_alone_or_tied(among, alone)
    nearly = (alone.scores[place].alternatives[0], (second[0], alone.scores[place].logprob - 1e-5))
    alone.scores[place] = replace(alone.scores[place], alternatives=nearly)
    assert is_alone_or_tied(among, alone)


@pytest.mark.parametrize("weights", ["fp32", "int8", "bf16"])
@pytest.mark.parametrize("kernels", ["on", "off"])
def test_a_row_among_31_others_is_the_row_alone(
    folder: Path, weights: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random arrivals, more rows than places, some cancelled half-way; greedy. In bf16 a tie may fall either way."""
    if kernels == "off":
        monkeypatch.setattr(token_reader, "reader_of", TorchReader)
        monkeypatch.setattr("test_scheduler.reader_of", TorchReader)
    model = PretrainedGPT.from_pretrained(folder, weights=weights)
    texts, cfg = prompts(32, seed=7), settings(max_new_tokens=20)
    alone = []
    for text in texts:
        (request,) = requests_of([text], cfg, num_alternatives=4)
        finish(scheduler_of(model, slots=1), [request])
        alone.append(request)
    draw = random.Random(11)
    for slots in (32, 9):
        scheduler = scheduler_of(model, slots=slots)
        together = requests_of(texts, cfg)
        coming = draw.sample(together, 32)
        quitting, gone = requests_of(prompts(6, seed=8), cfg), list[RowRequest]()
        while coming or scheduler.has_work:
            for _ in range(draw.randint(0, 5)):
                if coming:
                    scheduler.submit(coming.pop())
            if quitting and draw.random() < 0.3:
                scheduler.submit(quitting[-1])
                gone.append(quitting.pop())
            if gone and draw.random() < 0.3:
                scheduler.cancel(gone.pop())
            scheduler.step()
        for one, among in zip(alone, together, strict=True):
            if weights == "bf16" and isinstance(scheduler.reader, TorchReader):
                assert is_alone_or_tied(among, one)
                continue
            assert among.row.tokens == one.row.tokens and among.finish == one.finish
            assert among.row.logprobs == pytest.approx(one.row.logprobs, abs=1e-4)
            if not isinstance(scheduler.reader, TorchReader):  # the function promises the same bits
                assert among.row.logprobs == one.row.logprobs
    assert len({tuple(one.row.tokens) for one in alone}) > 16  # the model does not say the same to all


@pytest.mark.parametrize(
    "changes",
    [
        {"strategy": "greedy"},
        {"strategy": "greedy", "repetition_penalty": 1.4, "min_new_tokens": 5},
        {"strategy": "sampling", "seed": 5, "temperature": 0.8, "top_p": 0.9},
        {"strategy": "sampling", "seed": 6, "top_k": 20, "num_return_sequences": 3},
        {"strategy": "sampling", "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": ("9:4",)},
        {"strategy": "sampling", "seed": 8, "rules": "paddle", "top_p": 0.7},
    ],
)
def test_the_tokens_are_those_of_generate(model: PretrainedGPT, changes: dict[str, Any]) -> None:
    texts, cfg = prompts(4, seed=21), settings(**changes)
    expected = [new.tokens for found in continue_tokens(model, texts, cfg, tokenizer=model.tokenizer) for new in found]
    requests = requests_of(texts, cfg)
    finish(scheduler_of(model, slots=3), requests)
    assert [request.row.tokens for request in requests] == expected


def test_a_stop_string_ends_a_row_as_it_does_in_generate(model: PretrainedGPT) -> None:
    tokenizer = model.tokenizer
    assert tokenizer is not None
    (plain,) = generations_up_to(model, ["The river"], settings(max_new_tokens=30, ignore_eod=True), None)
    stop = plain.text[8:11]
    cfg = settings(max_new_tokens=30, ignore_eod=True, stop=(stop,))
    (expected,) = generations_up_to(model, ["The river"], cfg, None)
    prompt = tokenizer.encode("The river")
    (request,) = requests_of([prompt], cfg, text=TextOut(tokenizer, prompt, cfg.stop), is_streamed=True)
    progress = finish(scheduler_of(model), [request])
    assert expected.finish == "stop" and request.finish == "stop"
    assert "".join(each.text for each in progress) == expected.text
    assert request.row.tokens == expected.tokens


def test_text_grows_as_if_all_tokens_were_decoded_each_time(small_tokenizer: Any) -> None:
    """Also half characters and bytes that are none."""
    draw = random.Random(5)
    for _ in range(60):
        ids = small_tokenizer.encode("naïve 河流 🎈 text") + [draw.randrange(511) for _ in range(30)]
        draw.shuffle(ids)
        prompt, new = ids[:10], ids[10:]
        out = TextOut(small_tokenizer, prompt)
        for number, token in enumerate(new, start=1):
            out.add(token)
            assert out.text == continuation(small_tokenizer, prompt, new[:number]).rstrip("\ufffd")
        out.close()
        assert out.text == continuation(small_tokenizer, prompt, new)


# Scores


def test_prompts_are_scored_as_the_model_scores_them(model: PretrainedGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "SCORED_TOKENS_PER_STEP", 7)  # several pieces
    texts = prompts(3, seed=31)
    requests = requests_of(texts, settings(max_new_tokens=2), score_prompt=True, num_alternatives=3)
    finish(scheduler_of(model), requests)
    for text, request in zip(texts, requests, strict=True):
        with torch.no_grad():
            log_TV = model(torch.tensor([text]))[0, :, :VOCAB].log_softmax(-1)
        expected = [float(log_TV[i, token]) for i, token in enumerate(text[1:])]
        assert [score.token for score in request.prompt_scores] == text[1:]
        assert [score.logprob for score in request.prompt_scores] == pytest.approx(expected, abs=1e-4)
        for i, score in enumerate(request.prompt_scores):
            assert [token for token, _ in score.alternatives] == log_TV[i].topk(3).indices.tolist()
        assert len(request.scores) == len(request.row.tokens)


def test_a_prompt_can_be_scored_without_a_new_token(model: PretrainedGPT) -> None:
    cfg = settings()
    (row,) = rows_of([[5, 6, 7]], [0], cfg)
    request = RowRequest(row, cfg, score_prompt=True, wants_logprobs=True)
    (last,) = finish(scheduler_of(model), [request])
    assert last.finish == "length" and request.row.tokens == [] and len(request.prompt_scores) == 2


# Shared beginnings


def test_a_shared_beginning_is_read_once(model: PretrainedGPT) -> None:
    reader = RecordingReader(model)
    scheduler = scheduler_of(model, reader=reader)
    system = list(range(100, 150))
    first, second, third = [*system, 7, 8], [*system, 9], [*system, 7, 8, 1, 2]
    expected = {}
    for text in (first, second, third):
        (alone,) = requests_of([text], settings(max_new_tokens=4))
        finish(scheduler_of(model), [alone])
        expected[tuple(text)] = alone.row.tokens
    for text, num_shared in ((first, 0), (second, 50), (third, 52)):
        before, shared = sum(reader.sizes), scheduler.counts.shared
        (request,) = requests_of([text], settings(max_new_tokens=4))
        finish(scheduler, [request])
        assert scheduler.counts.shared - shared == num_shared
        assert sum(reader.sizes) - before == len(text) - num_shared + len(request.row.tokens) - 1
        assert request.row.tokens == expected[tuple(text)]


def test_rows_of_one_prompt_wait_for_the_first_to_read_it(model: PretrainedGPT) -> None:
    reader = RecordingReader(model)
    text = list(range(200, 260))
    cfg = settings(strategy="sampling", seed=3, num_return_sequences=3, max_new_tokens=5, ignore_eod=True)
    requests = requests_of([text], cfg)
    finish(scheduler_of(model, reader=reader), requests)
    assert sum(reader.sizes) == 60 + 2 + 3 * 4  # the prompt once, its last token again for the two others
    (found,) = continue_tokens(model, [text], cfg, tokenizer=model.tokenizer)
    assert [request.row.tokens for request in requests] == [new.tokens for new in found]


def test_what_a_taken_place_is_overwritten_with_does_not_reach_others(model: PretrainedGPT) -> None:
    """One place only: every new prompt overwrites the last one."""
    scheduler = scheduler_of(model, slots=1)
    system = list(range(50, 90))
    for text in ([*system, 1], [*system[:20], 3, 4], [*system, 1, 2], [9], [*system, 1]):
        (among,), (alone,) = requests_of([text], settings()), requests_of([text], settings())
        finish(scheduler, [among])
        finish(scheduler_of(model), [alone])
        assert among.row.tokens == alone.row.tokens


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1], [1], 1), ([1, 2, 3], [1, 2, 4, 5], 2), ([2], [1], 0)]
)
def test_common_length(a: list[int], b: list[int], length: int) -> None:
    assert common_length(a, b) == length == common_length(b, a)


# Order, bounds, ends


def test_a_long_prompt_does_not_keep_others_from_writing(model: PretrainedGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS_PER_STEP", 8)
    reader = RecordingReader(model)
    scheduler = scheduler_of(model, reader=reader)
    cfg = settings(max_new_tokens=30, ignore_eod=True)
    (short,), (long,) = requests_of([[1, 2]], cfg, is_streamed=True), requests_of([list(range(66))], cfg)
    scheduler.submit(short)
    scheduler.step()
    scheduler.submit(long)
    written = []
    while not long.row.tokens:
        scheduler.step()
        written.append(len(short.row.tokens))
    assert written == list(range(2, 2 + len(written))) and len(written) == 9  # a token in each of the 9 steps
    assert max(reader.sizes) <= 8 + 1


def test_a_prompt_that_is_read_alone_has_the_whole_step(model: PretrainedGPT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS_PER_STEP", 16)
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS_PER_ROW", 8)
    cfg = settings(max_new_tokens=1)
    for texts, sizes in (([range(40)], [16, 16, 8]), ([range(20), range(100, 124)], [16, 16, 4 + 8])):
        reader = RecordingReader(model)
        finish(scheduler_of(model, reader=reader), requests_of([list(text) for text in texts], cfg))
        assert reader.sizes == sizes


def test_calls_take_turns(model: PretrainedGPT) -> None:
    scheduler = scheduler_of(model, slots=1)
    cfg = settings(max_new_tokens=2)
    many = requests_of([[i] for i in range(10, 16)], cfg, call="many")
    one = requests_of([[1]], cfg, call="one")
    ended = [each.request for each in finish(scheduler, [*many, *one]) if each.finish]
    assert ended.index(one[0]) <= 1 and [each for each in ended if each in many] == many


def test_who_is_cancelled_leaves_within_a_step(model: PretrainedGPT) -> None:
    scheduler = scheduler_of(model, slots=1)
    cfg = settings(max_new_tokens=50, ignore_eod=True)
    going, waiting, quitter = (requests_of([[i]], cfg)[0] for i in (1, 2, 3))
    for request in (going, quitter, waiting):
        scheduler.submit(request)
    scheduler.step()
    assert going.slot is not None and waiting.slot is None
    scheduler.cancel(going)
    scheduler.cancel(quitter)  # that is still waiting
    ended = [each for each in scheduler.step() if each.finish]
    assert [(each.request, each.finish) for each in ended] == [(going, "cancelled"), (quitter, "cancelled")]
    assert waiting.row.tokens  # it has the place and has drawn, in that same step


def test_a_deadline_ends_a_row(model: PretrainedGPT) -> None:
    scheduler = scheduler_of(model, slots=1)
    (late,), (fine,) = requests_of([[1]], settings()), requests_of([[2]], settings())
    late.deadline, fine.deadline = time.monotonic() - 1, time.monotonic() + 3600
    finish(scheduler, [late, fine])
    assert (late.finish, fine.finish) == ("deadline", "length")


def test_a_row_that_leaves_no_choice_fails_alone(model: PretrainedGPT) -> None:
    scheduler = scheduler_of(model)
    eod = scheduler.eod_id
    biases = tuple(f"{token}:-inf" for token in range(VOCAB))
    (bad,), (good,) = requests_of([[1]], settings(logit_bias=biases)), requests_of([[2]], settings())
    finish(scheduler, [bad, good])
    assert bad.finish == "error" and isinstance(bad.error, GenerationError) and "no token is left" in str(bad.error)
    assert good.finish in ("length", "eod") and eod is not None


class FailingReader(RecordingReader):
    fails = True

    def read(self, *given: Any) -> Tensor:
        found = super().read(*given)
        if self.fails:
            self.fails = False
            raise MemoryError("no room")
        return found


def test_a_fault_reaches_all_who_wait_and_the_thread_goes_on(model: PretrainedGPT, capsys: Any) -> None:
    scheduler = scheduler_of(model, reader=FailingReader(model))
    delivered: list[Progress] = []
    thread = EngineThread(delivered.extend)
    thread.add(scheduler)
    first, later = requests_of(prompts(2, seed=51), settings()), requests_of(prompts(2, seed=51), settings())
    thread.start()
    thread.submit(scheduler, first)
    while not all(request.finish for request in first):
        time.sleep(0.01)
    thread.submit(scheduler, later)
    while not all(request.finish for request in later):
        time.sleep(0.01)
    thread.end()
    failed = [request for request in first if request.finish == "error"]
    assert failed and all(isinstance(request.error, MemoryError) for request in failed)
    alone = requests_of(prompts(2, seed=51), settings())
    finish(scheduler_of(model), alone)
    assert [request.row.tokens for request in later] == [request.row.tokens for request in alone]
    assert "no room" in capsys.readouterr().err


def test_a_thread_lets_go_of_a_scheduler_that_has_finished(model: PretrainedGPT) -> None:
    delivered: list[Progress] = []
    thread, scheduler = EngineThread(delivered.extend), scheduler_of(model)
    thread.add(scheduler)
    requests = requests_of(prompts(3, seed=61), settings())
    thread.start()
    thread.submit(scheduler, requests)
    thread.remove_when_idle(scheduler)
    while thread._schedulers:
        time.sleep(0.01)
    thread.end()
    assert all(request.finish in ("length", "eod") for request in requests)
