"""Pipelines: dropout, generation, what they hold and what they refuse.

That every schedule learns what one process learns is proved in test_equals_one_process.py.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from steps import (
    ONE,
    VOCAB,
    assert_equal_to_one_process,
    build_part,
    differences,
    micro_batches,
    new_optimizer,
    run_steps,
    shape,
)
from test_equals_one_process import INTERLEAVED, ONE_STAGE, SCHEDULES, TWO_STAGES, piped
from torch import Tensor
from torch.distributed.pipelining import stage as torch_stage
from torch.multiprocessing.reductions import StorageWeakRef

from gptworks.architecture import canonical_name
from gptworks.config.derive import Layout
from gptworks.config.schema import ScalerConfig
from gptworks.config.stages import assign_layers, check_micro_batches
from gptworks.data.loader import Batch
from gptworks.errors import ConfigError, UsageError
from gptworks.generate.decode_state import DecodeState
from gptworks.launch.world import World
from gptworks.model import GPT
from gptworks.parallel import pipeline, stage_memory
from gptworks.parallel.parts import Part
from gptworks.parallel.pipeline import Pipeline
from gptworks.parallel.shard import NOT_SHARDED
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

DROPPING = {"dropout_embed": 0.1, "dropout_hidden": 0.1, "dropout_attention": 0.1}


def test_compiled_blocks_are_refused_where_gradients_come_in_two_turns(run_layout, compiler: None) -> None:
    def compiled(world: World) -> None:
        with pytest.raises(ConfigError, match=r"train\.compile: with parallel\.schedule: zero_bubble"):
            build_part(world, piped(ONE_STAGE, build={"compile_blocks": True, "recompute_mode": "full"}))

    run_layout(Layout(pp=2), compiled)


def test_dropout_does_not_depend_on_the_schedule(run_layout) -> None:
    cases = [piped(schedule, **DROPPING) for schedule in SCHEDULES]

    def learn(world: World) -> list[Any]:
        found = []
        for one in cases:
            torch.manual_seed(len(found))  # what was drawn before must not matter
            found.append(run_steps(world, one))
        return found

    gpipe, one_f_one_b, interleaved, one_stage, two_stages = run_layout(Layout(pp=2), learn)[0]
    assert_equal_to_one_process([one_f_one_b, one_stage], gpipe, "one stage on a rank")
    assert_equal_to_one_process([two_stages], interleaved, "two stages on a rank")
    assert differences([gpipe], run_steps(ONE, piped({})))[0] > 1e-3, "dropout does nothing here"


def test_cached_generation_with_several_stages_on_a_rank(run_layout) -> None:
    """What the stages of a rank keep is chosen and forgotten together. One stage on a rank: test_layouts.py."""
    prompts = [[5, 9, 2], [7], [3, 3, 8, 1, 4]]

    @torch.no_grad()
    def greedy(world: World) -> tuple[list[list[int]], list[float]]:
        part = build_part(world, piped(INTERLEAVED if world.layout.pp > 1 else {})).eval()
        contexts = DecodeState(part, prompts, new_tokens=14, vocab_size=VOCAB)
        following = contexts.read_prompts()
        seen = []
        for _ in range(14):  # beyond the 16 positions: rows leave the cache and are read anew
            seen.append(torch.stack(list(following)))
            chosen = {row: int(logits.argmax()) for row, logits in enumerate(following)}
            following = list(contexts.read(chosen).values())
        contexts.select([2, 0])
        seen.append(torch.cat(list(contexts.read({0: 1, 1: 2}).values())))
        return contexts.tokens, torch.cat([one.flatten() for one in seen]).tolist()

    tokens, logits = greedy(ONE)
    for found_tokens, found_logits in run_layout(Layout(pp=2), greedy):
        assert found_tokens == tokens
        assert found_logits == pytest.approx(logits, rel=0, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [SCHEDULES[1], TWO_STAGES], ids=lambda given: given["schedule"])
def test_received_tensors_are_held_no_longer_than_the_schedule_asks(run_layout, schedule: dict[str, Any]) -> None:
    num_micro_batches = 16

    def most_alive(world: World, keep: bool) -> tuple[int, int]:
        made: list[StorageWeakRef] = []
        most = 0

        def counted(make: Any) -> Any:
            def wrapped(*args: Any) -> Tensor:
                nonlocal most
                tensor = make(*args)
                made.append(StorageWeakRef(tensor.untyped_storage()))
                most = max(most, sum(not one.expired() for one in made))
                return tensor

            return wrapped

        for module in (stage_memory, torch_stage):  # ours, and torch's own that makes them all at once
            module._make_tensor_from_meta = counted(module._make_tensor_from_meta)
        if keep:
            stage_memory._let_go = lambda infos: None
        part: Any = build_part(world, piped(schedule))
        scaler = LossScaler(ScalerConfig(), enabled=False)
        optimizer, batches = new_optimizer(part), micro_batches(world, 1, num_micro_batches)
        for step in (1, 2):
            train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step)
        return most, asked_for(part)

    def asked_for(trained: Pipeline) -> int:
        """At most how many are received and not yet done with, read off the order of the schedule."""
        prepared = trained._prepared[1]
        held: set[tuple[str, int, int]] = set()
        most = 0
        for action in getattr(prepared, "pipeline_order_with_comms", prepared.pipeline_order)[trained.pp_rank]:
            if action is None:
                continue
            number, name, micro_batch = action.stage_index, action.computation_type.name, action.microbatch_index
            if name in {"RECV_F", "RECV_B"}:
                held.add((name, number, micro_batch))
            elif name == "FORWARD" and number > 0:  # an order without receives: one comes right before each use
                held.add(("RECV_F", number, micro_batch))
            elif name == "FULL_BACKWARD" and number < trained.num_stages - 1:
                held.add(("RECV_B", number, micro_batch))
            most = max(most, len(held))
            if name in {"FULL_BACKWARD", "BACKWARD_WEIGHT"}:
                held -= {(kind, number, micro_batch) for kind in ("RECV_F", "RECV_B")}
        return most

    for most, asked in run_layout(Layout(pp=2), lambda world: most_alive(world, keep=False)):
        assert most <= asked + 1 < num_micro_batches  # 1: the schedule still names the one it took last
    if schedule["schedule"] == "1f1b":
        for most, _ in run_layout(Layout(pp=2), lambda world: most_alive(world, keep=True)):
            assert most >= num_micro_batches  # the control: what torch's own stage holds


def test_a_step_of_another_size_or_shape_follows(run_layout) -> None:
    batches = micro_batches(ONE, 1, 4)
    short = [Batch(one.tokens[:2], one.labels[:2], None, None, one.sample_ids[:2]) for one in batches]
    reset = replace(batches[1], positions=torch.arange(16).expand(4, 16))
    steps = [batches[:2], batches[:3], short[:2]]

    def run(world: World) -> list[float]:
        part: Any = build_part(world, piped({}))
        found = [one.item() for step in steps for one in part.step(step, 1.0)]
        with pytest.raises(UsageError, match="1 of 2 micro-batches of a step have positions"):
            part.step([batches[0], reset], 1.0)
        with pytest.raises(UsageError, match="17 tokens in a row, but the model has 16 positions"):
            part(torch.zeros(1, 17, dtype=torch.long))
        with pytest.raises(UsageError, match=r"shapes \[\(2, 16\), \(4, 16\)\] in one step"):
            part.step([batches[0], short[1]], 1.0)
        return found

    model = build_part(ONE, piped({}))
    expected = [model(one.tokens, **one.keywords()).item() for step in steps for one in step]
    first, last = run_layout(Layout(pp=2), run)
    assert first == []
    assert last == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "sizes"),
    [(5, 2, [3, 2]), (5, 4, [1, 1, 2, 1]), (7, 4, [2, 2, 2, 1]), (8, 4, [2, 2, 2, 2]), (3, 3, [1, 1, 1])],
)
def test_layers_are_contiguous_and_the_last_stage_has_the_fewest(
    num_layers: int, num_stages: int, sizes: list[int]
) -> None:
    stages = assign_layers(num_layers, num_stages)
    assert [len(layers) for layers in stages] == sizes
    assert [layer for layers in stages for layer in layers] == list(range(num_layers))


class _Stages(Pipeline):
    """Those of all ranks, without the ranks."""

    def __init__(self, parts: Iterable[GPT]) -> None:
        Part.__init__(self, list(parts), ONE, NOT_SHARDED)


def test_a_stage_keeps_its_names_and_nothing_else() -> None:
    parts: Any = _Stages(GPT(shape(num_layers=3)) for _ in range(2))
    for number, part in enumerate(parts.parts):
        pipeline.keep_stage(part, number, 2)
    first, last = ({n.split(".attn.")[0] for n, _ in part.named_parameters()} for part in parts.parts)
    assert {"wte.weight", "wpe.weight", "blocks.0", "blocks.1"} <= first
    assert {"head.weight", "ln_f.weight", "blocks.2"} <= last
    assert "head.weight" not in first
    assert "blocks.0" not in last
    whole = {name for name, _ in GPT(shape(num_layers=3)).named_parameters()}
    assert len(parts.counted_parameters()) == len(whole)
    names = [canonical_name(name, tied=True) for name, _ in parts.named_parameters()]
    assert sorted(names) == sorted([*whole, "wte.weight"])
    assert parts.parts[1].new_cache(2, 4).keys_LBNSH.shape[0] == 1


def test_a_cut_of_the_sequence_advances_a_cache_by_all_tokens() -> None:
    part = GPT(shape())
    pipeline.keep_stage(part, 1, 2)
    cache = part.new_cache(1, 8)
    part(torch.zeros(1, 3, 32), positions=torch.arange(6)[None], cache=cache)
    assert (cache.used, cache.lengths_B.tolist()) == (6, [6])


def test_what_cannot_be_piped_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match="4 pipeline stages, but the model has 3 layers"):
        assign_layers(3, 4)
    with pytest.raises(ConfigError, match=r"3 micro-batches .* fewer than the 4 pipeline stages"):
        check_micro_batches("gpipe", 3, 4)
    with pytest.raises(ConfigError, match=r"6 micro-batches .* not a multiple of pp = 4.* Nearest: 4 or 8\."):
        check_micro_batches("interleaved", 6, 4)
    check_micro_batches("1f1b", 5, 4)
    with pytest.raises(
        ConfigError, match=r"virtual_stages: 2, but schedule 1f1b needs 1\. .* interleaved or zero_bubble"
    ):
        pipeline.stages_of(0, 2, 2, "1f1b")
    with pytest.raises(ConfigError, match="virtual_stages: 1, but schedule interleaved needs 2 or more"):
        pipeline.stages_of(0, 2, 1, "interleaved")
    with pytest.raises(ConfigError, match=r"parallel\.schedule: 2f2b is unknown"):
        pipeline.stages_of(0, 2, 1, "2f2b")
    with pytest.raises(UsageError, match="2 ranks or more in pp, but the layout is 1"):
        Pipeline([GPT(shape())], World(torch.device("cpu")))
