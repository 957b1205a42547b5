"""Every layout learns what one process learns: the real build, the real loader and the real step, on every rank.

Rows of the conformance list: S1-09, S1-13, S3-01, S3-04, S3-05, S4-05. Documents end at random places of the samples,
more in some than in others: what is scored differs between ranks and micro-batches, and positions and attention start
anew.
"""

import functools
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from steps import LENGTH as T
from steps import (
    ONE,
    ROWS,
    TOLERANCE,
    VOCAB,
    Case,
    assert_equal_to_one_process,
    build_part,
    differences,
    layouts,
    new_optimizer,
)

from gptworks.architecture import canonical_name
from gptworks.config.derive import BatchPlan, Layout
from gptworks.config.schema import GenerateConfig, ScalerConfig
from gptworks.data.loader import Batches, EodPolicy
from gptworks.data.windows import Sample
from gptworks.generate.decode_state import DecodeState
from gptworks.generate.engine import continue_tokens
from gptworks.launch.world import World
from gptworks.parallel import shard, tensor
from gptworks.parallel.pipeline import Pipeline
from gptworks.parallel.slices import slice_of
from gptworks.train.precision import LossScaler
from gptworks.train.step import StepReport, train_step
from gptworks.verify import reference
from gptworks.verify.reference import Compared

EOD = 0
ALONE = ("tp2", "pp2", "fsdp2", "dp2")
PAIRS = ("pp2.dp2", "pp2.fsdp2", "pp2.tp2", "dp2.fsdp2", "dp2.tp2", "fsdp2.tp2")
HYBRID = "pp2.fsdp2.tp2"
TRIPLES = ("pp2.dp2.tp2", "dp2.fsdp2.tp2", "pp2.dp2.fsdp2")
ALL_FOUR = "pp2.dp2.fsdp2.tp2"
PLAIN = Case(2, model={"num_layers": 2})


class Texts:
    """Samples that are a function of their number."""

    sources = ()
    per_epoch = 10**6

    def at(self, first: int, count: int) -> list[Sample]:
        return [Sample(self._tokens(number), None) for number in range(first, first + count)]

    @staticmethod
    def _tokens(number: int) -> np.ndarray:
        draw = np.random.default_rng(number)
        tokens = draw.integers(1, VOCAB, T + 1)
        tokens[draw.random(T + 1) < number % 4 / 8] = EOD
        return tokens


@dataclass(frozen=True)
class Trained:
    data_rank: int
    reports: list[StepReport]


def batches_of(world: World, accumulation: int) -> Batches:
    plan = BatchPlan(ROWS, ROWS // (accumulation * world.data_parallel), accumulation, world.data_parallel)
    return Batches(Texts(), plan, EodPolicy(EOD, True, True, True), vocab_size=VOCAB, data_rank=world.data_rank)


def trained(world: World, case: Case = PLAIN, part: Any = None, see: Callable[..., Any] | None = None) -> Trained:
    """`see` is given the gradients of the first step."""
    part = part or build_part(world, case)
    optimizer = new_optimizer(part)
    if see is not None:

        def look(*_: Any) -> None:
            hook.remove()
            see([(name, parameter.grad) for name, parameter in part.named_parameters()])

        hook = optimizer.register_step_pre_hook(look)
    scaler = LossScaler(ScalerConfig(init=1024.0), enabled=case.compute == torch.float16)
    batches = batches_of(world, case.accumulation)
    reports = [
        train_step(part, optimizer, batches.next_step(), world, scaler, clip=case.clip, seed=1, step=step)
        for step in range(1, case.steps + 1)
    ]
    return Trained(world.data_rank, reports)


@functools.cache
def one_process(compute: torch.dtype = torch.float32, accumulation: int = 2, **model: Any) -> list[StepReport]:
    return trained(ONE, Case(accumulation, model=PLAIN.model | model, compute=compute)).reports


@functools.cache
def first_weights() -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in build_part(ONE, PLAIN).named_parameters()}


def assert_first_weights(part: Any) -> None:
    """What is here is what lies at the same place of the one process's tensor."""
    for name, parameter in part.named_parameters():
        mine = slice_of(parameter.detach())
        wanted = first_weights()[canonical_name(name, tied=True)]
        assert mine.shape == wanted.shape, name
        for dim, (begin, size) in enumerate(zip(mine.offsets, mine.here.shape, strict=True)):
            wanted = wanted.narrow(dim, begin, size)
        assert torch.equal(mine.here, wanted), name


def assert_all_samples_in_order(ranks: list[Trained], layout: Layout) -> None:
    """A micro-batch of all data ranks side by side is the next stretch of the samples; tp and pp read the same."""
    for number in range(len(ranks[0].reports)):
        of_rank = {rank.data_rank: np.array(rank.reports[number].sample_ids).reshape(2, -1) for rank in ranks}
        assert all(rank.reports[number].sample_ids == of_rank[rank.data_rank].reshape(-1).tolist() for rank in ranks), (
            "ranks of one model read different samples"
        )
        side_by_side = np.concatenate([of_rank[rank] for rank in range(layout.data_parallel)], axis=1)
        assert side_by_side.reshape(-1).tolist() == list(range(number * ROWS, (number + 1) * ROWS))


@pytest.fixture(scope="module")
def first_gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    trained(ONE, replace(PLAIN, steps=1), see=lambda named: reference.write(folder, "gradients", named))
    return folder


def assert_first_gradients(found: dict[str, Compared], folder: Path) -> None:
    """Of every tensor, all of it. One that is 1e-4 of the largest is rounding, such as that of a bias of the keys."""
    wanted = reference.describe(folder, "gradients")
    floor = 1e-4 * max(one.largest for one in wanted.values())
    assert {name: one.num_seen for name, one in found.items()} == {name: one.size for name, one in wanted.items()}
    wrong = [name for name, one in wanted.items() if found[name].difference > 1e-4 * max(one.largest, floor)]
    assert not wrong


@pytest.mark.parametrize("layout", layouts(*ALONE, HYBRID, slow=(*PAIRS, *TRIPLES, ALL_FOUR)))
def test_s3_01_s1_09_a_layout_learns_what_one_process_learns(run_layout, layout: Layout, first_gradients: Path) -> None:
    wanted = one_process()
    first_weights()

    def learn(world: World) -> tuple[Trained, dict[str, Compared]]:
        part = build_part(world, PLAIN)
        assert_first_weights(part)
        compared: dict[str, Compared] = {}
        see = lambda named: compared.update(reference.compare(first_gradients, "gradients", named, tied=True))  # noqa: E731
        return trained(world, PLAIN, part, see), compared

    found = run_layout(layout, learn)
    ranks = [rank for rank, _ in found]
    assert_first_gradients(reference.merge(compared for _, compared in found), first_gradients)
    assert_equal_to_one_process([rank.reports for rank in ranks], wanted, layout)
    assert_all_samples_in_order(ranks, layout)


@pytest.mark.slow
def test_s1_13_two_by_four_by_one_on_eight_processes(run_layout) -> None:
    """Tensor parallel 2 x pipeline 4 x data parallel 1: with stages between the first and the last."""
    case = Case(4, model={"num_layers": 4}, steps=3)
    wanted = trained(ONE, case).reports
    ranks = run_layout(Layout(tp=2, pp=4), lambda world: trained(world, case).reports)
    assert_equal_to_one_process(ranks, wanted, case)


@pytest.mark.slow
def test_s4_05_two_by_eight_on_sixteen_processes(run_layout) -> None:
    """The 13B example: model_parallel 8 x data_parallel 2 with optimizer_shard, so that the two are shards of it."""
    case = Case(1, model={"num_layers": 1, "num_heads": 8}, steps=2)
    wanted = trained(ONE, case).reports
    ranks = run_layout(Layout(tp=8, fsdp=2), lambda world: trained(world, case).reports)
    assert_equal_to_one_process(ranks, wanted, case)


def test_s3_01_what_is_scored_differs_between_ranks_and_micro_batches() -> None:
    counts = {
        tuple(batch.num_scored for batch in batches_of(World(ONE.device, Layout(dp=2, fsdp=2), rank), 2).next_step())
        for rank in range(4)
    }
    assert len({sum(of_rank) for of_rank in counts}) == 4
    assert any(first != second for first, second in counts)


def leave_out(axis: str) -> None:
    """In a rank's own process: it forgets one of its collectives."""
    if axis == "tp":
        tensor.finish_gradients = lambda *_: None
    elif axis == "pp":
        Pipeline.sum_tied_gradients = lambda _: None  # type: ignore[method-assign]
    elif axis == "dp":
        shard._sum_in_place = lambda *_: None
    else:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

        def keep_own(_: Any, output_tensor: Any, input_tensor: Any, group: Any, *__: Any, **___: Any) -> None:
            output_tensor.copy_(input_tensor.view(group.size(), -1)[group.rank()])

        DefaultReduceScatter.__call__ = keep_own  # type: ignore[method-assign]


@pytest.mark.parametrize("layout", layouts(*ALONE))
def test_s3_01_a_collective_left_out_is_noticed(run_layout, layout: Layout) -> None:
    wanted = one_process()

    def forgetful(world: World) -> list[StepReport]:
        leave_out(str(layout).rstrip("2"))
        return trained(world).reports

    losses, norms = differences(run_layout(layout, forgetful), wanted)
    assert losses > 10 * TOLERANCE and norms > 1e-3


# Precision, recomputation, compiling

RECOMPUTED = {
    mode: replace(PLAIN, build={"recompute_mode": mode}, model={**PLAIN.model, "attention": "math"}, steps=2)
    for mode in ("full", "full_attn", "core_attn")
}


@pytest.mark.parametrize("layout", layouts("fsdp2", "pp2", slow=("tp2", "dp2", HYBRID)))
def test_s3_04_amp_and_recompute(run_layout, layout: Layout) -> None:
    """In half precision micro-batches have the rows they have on one process, whose gradients are rounded alike."""
    half = [replace(PLAIN, compute=compute, steps=3) for compute in (torch.bfloat16, torch.float16)]
    wanted = one_process()
    in_half = [one_process(case.compute, 2 * layout.data_parallel)[:3] for case in half]

    def learn(world: World) -> list[list[StepReport]]:
        return [trained(world, case).reports for case in [*half, *RECOMPUTED.values()]]

    ranks = run_layout(layout, learn)
    for number, one in enumerate(in_half):
        found = [of_rank[number] for of_rank in ranks]
        losses, norms = differences(found, one)
        assert losses < 2e-3 and norms < 1e-2, half[number].compute
        assert differences([one], wanted[:3])[0] > 2 * TOLERANCE, "it was computed in fp32 after all"
        assert all(report.updated for reports in found for report in reports)
        assert all(reports[0].loss_scale == (1024.0 if number else 1.0) for reports in found)
    for number, mode in enumerate(RECOMPUTED, start=2):
        assert_equal_to_one_process([of_rank[number] for of_rank in ranks], wanted[:2], mode)


# Dynamo asks every tensor whether it has a gradient and hides the answer's warning only from the screen.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("layout", layouts("fsdp2", slow=("tp2", "pp2", "dp2", HYBRID)))
def test_s3_04_s3_05_compiled_blocks_give_the_same_losses(run_layout, compiler: None, layout: Layout) -> None:
    wanted = one_process()[:2]

    def learn(world: World) -> list[StepReport]:
        torch.compiler.set_default_backend("aot_eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            reports = trained(world, replace(PLAIN, build={"compile_blocks": True}, steps=2)).reports
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 1, "nothing was compiled"
        return reports

    assert_equal_to_one_process(run_layout(layout, learn), wanted, layout)


# Dropout, held-out loss, generation


@pytest.mark.slow
def test_dropout_repeats_itself(run_layout) -> None:
    """Also after other numbers were drawn, and where blocks are recomputed."""
    dropping = {"dropout_embed": 0.1, "dropout_hidden": 0.1, "dropout_attention": 0.1}
    case = replace(PLAIN, model=PLAIN.model | dropping, steps=2)

    def learn(world: World) -> list[list[StepReport]]:
        first = trained(world, case).reports
        torch.rand(random.Random(world.rank).randrange(1, 99))
        return [
            first,
            *(trained(world, replace(case, build=build)).reports for build in ({}, RECOMPUTED["full"].build)),
        ]

    ranks = run_layout(Layout(tp=2, pp=2), learn)
    for first, again, recomputed in ranks:
        assert first == again == recomputed == ranks[0][0]
        assert differences([first], one_process()[:2])[0] > 1e-3, "dropout does nothing here"


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts("tp2", "pp2", slow=("pp2.tp2", "fsdp2")))
def test_generation_between_steps_gives_the_tokens_of_one_process(run_layout, layout: Layout) -> None:
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4]]
    greedy = GenerateConfig(strategy="greedy", max_new_tokens=T, window="slide", ignore_eod=True)

    def write(world: World) -> tuple[Any, list[float], list[StepReport]]:
        part = build_part(world, PLAIN)
        with torch.no_grad():
            following = torch.stack(DecodeState(part.eval(), prompts, 1, VOCAB).read_prompts())
        written = [[new.tokens for new in news] for news in continue_tokens(part, prompts, greedy, vocab_size=VOCAB)]
        part.reshard_all()
        return written, following.flatten().tolist(), trained(world, PLAIN, part.train()).reports

    tokens, logits, wanted = write(ONE)
    for found_tokens, found_logits, reports in run_layout(layout, write):
        assert found_tokens == tokens
        assert found_logits == pytest.approx(logits, rel=0, abs=1e-5)
        assert_equal_to_one_process([reports], wanted, layout)
    assert len({token for news in tokens for new in news for token in new}) > 4, "it repeats itself: nothing is shown"
