"""A block of Llama's kind learns on every layout what it learns in one process: norms by root mean square, turned
queries and keys, gates, groups of heads that share a key, a window. The steps are those of test_layouts.py for GPT-2:
documents end at random places, and ranks score different numbers of tokens.
"""

import functools
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from steps import LENGTH as T
from steps import ONE, TOLERANCE, VOCAB, Case, assert_equal_to_one_process, build_part, differences, layouts, run_steps
from test_layouts import HYBRID, PAIRS, assert_first_gradients, leave_out, trained

from gptworks.config.derive import Layout
from gptworks.config.schema import GenerateConfig
from gptworks.generate.engine import continue_tokens
from gptworks.launch.world import World
from gptworks.train.step import StepReport
from gptworks.verify import reference
from gptworks.verify.reference import Compared

KIND = {"num_layers": 2, "norm": "rmsnorm", "positions": "rope", "mlp": "swiglu", "bias": "none"}
LLAMA = Case(2, model=KIND | {"num_kv_heads": 2, "qk_norm": True, "sliding_window": 6})
QWEN2 = Case(2, model=KIND | {"num_kv_heads": 2, "bias": "qkv", "tied": False}, steps=3)
YARN = Case(
    2,
    model=KIND | {"head_size": 6, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_positions": 8}},
    steps=3,
)
CASES = [LLAMA, QWEN2, YARN]


@functools.cache
def one_process() -> list[list[StepReport]]:
    return [trained(ONE, case).reports for case in CASES]


@pytest.fixture(scope="module")
def first_gradients(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    trained(ONE, replace(LLAMA, steps=1), see=lambda named: reference.write(folder, "gradients", named))
    return folder


@pytest.mark.parametrize("layout", layouts("tp2", "pp2", "fsdp2", slow=("dp2", *PAIRS, HYBRID)))
def test_a_layout_learns_what_one_process_learns(run_layout, layout: Layout, first_gradients: Path) -> None:
    wanted = one_process()

    def learn(world: World) -> tuple[list[list[StepReport]], dict[str, Compared]]:
        compared: dict[str, Compared] = {}
        part = build_part(world, LLAMA)
        see = lambda named: compared.update(  # noqa: E731
            reference.compare(first_gradients, "gradients", part.as_stored(named), tied=True)
        )
        first = trained(world, LLAMA, part, see).reports
        return [first, *(trained(world, case).reports for case in CASES[1:])], compared

    found = run_layout(layout, learn)
    assert_first_gradients(reference.merge(compared for _, compared in found), first_gradients)
    for number, case in enumerate(CASES):
        assert_equal_to_one_process([reports[number] for reports, _ in found], wanted[number], (layout, case))


# Fewer heads of keys and values than tensor-parallel ranks

SHARED = Case(2, model=KIND | {"num_kv_heads": 1, "qk_norm": True}, steps=3)
SHARED_BIASED = Case(2, model=KIND | {"num_kv_heads": 1, "bias": "qkv", "tied": False}, steps=3)
IN_PAIRS = Case(2, model=KIND | {"num_kv_heads": 2}, steps=3)


@pytest.mark.parametrize("layout", layouts("tp2", slow=("tp4", "fsdp2.tp2", "fsdp4.tp2", "pp2.tp2", "dp2.tp4")))
def test_heads_of_keys_that_several_ranks_hold(run_layout, layout: Layout, tmp_path: Path) -> None:
    cases = [SHARED, SHARED_BIASED, *([IN_PAIRS] if layout.tp == 4 else [])]
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        for kind in ("weights", "gradients"):
            see = lambda named, f=folder, k=kind: reference.write(f, k, named)  # noqa: E731
            if kind == "weights":
                see([(name, parameter.detach()) for name, parameter in build_part(ONE, case).named_parameters()])
            else:
                trained(ONE, replace(case, steps=1), see=see)

    def learn(world: World) -> list[Any]:
        found = []
        for number, case in enumerate(cases):
            folder, part, compared = tmp_path / str(number), build_part(world, case), {}
            compare = functools.partial(reference.compare, folder, tied=part.cfg.tied)
            named = [(name, parameter.detach()) for name, parameter in part.named_parameters()]
            compared["weights"] = compare("weights", part.as_stored(named))

            def see(named: Any, part: Any = part, compared: Any = compared, compare: Any = compare) -> None:
                compared["gradients"] = compare("gradients", part.as_stored(named))

            found.append((trained(world, case, part, see).reports, compared))
        return found

    ranks = run_layout(layout, learn)
    for number, case in enumerate(cases):
        assert_equal_to_one_process([rank[number][0] for rank in ranks], trained(ONE, case).reports, (layout, case))
        folder = tmp_path / str(number)
        weights = reference.merge(rank[number][1]["weights"] for rank in ranks)
        sizes = {name: one.size for name, one in reference.describe(folder, "weights").items()}
        assert {name: one.num_seen for name, one in weights.items()} == sizes
        assert all(one.difference == 0.0 for one in weights.values())
        assert_first_gradients(reference.merge(rank[number][1]["gradients"] for rank in ranks), folder)


def test_copies_that_are_not_summed_are_noticed(run_layout) -> None:
    case = replace(SHARED, parallel={"sequence": False})
    wanted = trained(ONE, case).reports

    def forgetful(world: World) -> list[StepReport]:
        leave_out("tp")
        return trained(world, case).reports

    assert differences(run_layout(Layout(tp=2), forgetful), wanted)[1] > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts("tp2", "pp2", slow=("pp2.tp2", HYBRID)))
def test_without_borders_of_documents(run_layout, layout: Layout) -> None:
    """Nobody says positions then: a stage in the middle has to know them, though it sees a cut of the sequence."""
    cases = [replace(case, steps=3, parallel={"sequence": on}) for case in (LLAMA, QWEN2) for on in (True, False)]
    ranks = run_layout(layout, lambda world: [run_steps(world, case) for case in cases])
    for number, case in enumerate(cases):
        wanted = run_steps(ONE, replace(case, parallel={}))
        assert_equal_to_one_process([found[number] for found in ranks], wanted, (layout, case))


@pytest.mark.parametrize("layout", layouts("tp2", slow=("dp2", "fsdp2", "pp2")))
def test_a_collective_left_out_is_noticed(run_layout, layout: Layout) -> None:
    wanted = one_process()[0]

    def forgetful(world: World) -> list[StepReport]:
        leave_out(str(layout).rstrip("2"))
        return trained(world, LLAMA).reports

    losses, norms = differences(run_layout(layout, forgetful), wanted)
    assert losses > 10 * TOLERANCE and norms > 1e-3


def test_gains_of_heads_are_summed_without_a_cut_sequence_too(run_layout) -> None:
    """Each rank has seen its own heads only."""
    case = replace(LLAMA, parallel={"sequence": False})
    wanted = one_process()[0]

    def learn(world: World) -> list[list[StepReport]]:
        right = trained(world, case).reports
        leave_out("tp")
        return [right, trained(world, case).reports]

    ranks = run_layout(Layout(tp=2), learn)
    assert_equal_to_one_process([right for right, _ in ranks], wanted, case)
    assert differences([wrong for _, wrong in ranks], wanted)[1] > 1e-4


# Precision, recomputation, compiling

RECOMPUTED = [
    replace(LLAMA, build={"recompute_mode": mode}, model=LLAMA.model | {"attention": "math"}, steps=2)
    for mode in ("full", "full_attn", "core_attn")
]


@pytest.mark.slow
@pytest.mark.parametrize("layout", layouts("tp2", slow=("fsdp2", "pp2", HYBRID)))
def test_half_precision_and_recomputation(run_layout, layout: Layout) -> None:
    half = [replace(LLAMA, compute=compute, steps=3) for compute in (torch.bfloat16, torch.float16)]
    wanted = one_process()[0]
    in_half = [trained(ONE, replace(case, accumulation=2 * layout.data_parallel)).reports for case in half]
    ranks = run_layout(layout, lambda world: [trained(world, case).reports for case in [*half, *RECOMPUTED]])
    for number, one in enumerate(in_half):
        losses, norms = differences([of_rank[number] for of_rank in ranks], one)
        assert losses < 2e-3 and norms < 1e-2, half[number].compute
        assert differences([one], wanted[:3])[0] > 2 * TOLERANCE, "it was computed in fp32 after all"
    for number, case in enumerate(RECOMPUTED, start=2):
        assert_equal_to_one_process([of_rank[number] for of_rank in ranks], wanted[:2], case.build)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("layout", layouts("fsdp2", slow=("tp2", HYBRID)))
def test_compiled_blocks(run_layout, compiler: None, layout: Layout) -> None:
    wanted = one_process()[0][:2]

    def learn(world: World) -> list[StepReport]:
        torch.compiler.set_default_backend("aot_eager")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning)
            reports = trained(world, replace(LLAMA, build={"compile_blocks": True}, steps=2)).reports
        assert torch._dynamo.utils.counters["frames"]["ok"] >= 1, "nothing was compiled"
        return reports

    assert_equal_to_one_process(run_layout(layout, learn), wanted, layout)


# Generation


@pytest.mark.parametrize("layout", layouts("tp2", "pp2", slow=("pp2.tp2",)))
def test_generation_gives_the_tokens_of_one_process(run_layout, layout: Layout) -> None:
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4, 6, 7, 2]]
    settings = [
        GenerateConfig(strategy="greedy", max_new_tokens=T, window="slide", ignore_eod=True),
        GenerateConfig(strategy="beam", num_beams=3, max_new_tokens=5, ignore_eod=True),
    ]

    def write(world: World) -> list[Any]:
        part = build_part(world, replace(LLAMA, model=LLAMA.model | {"tied": False})).eval()
        found = []
        for each in settings:
            written = continue_tokens(part, prompts, each, vocab_size=VOCAB)  # type: ignore[arg-type]
            found.append([[new.tokens for new in news] for news in written])
        return found

    wanted = write(ONE)
    assert len({token for news in wanted[0] for new in news for token in new}) > 4, "it repeats itself"
    assert all(found == wanted for found in run_layout(layout, write))
