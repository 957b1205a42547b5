"""What each sharding stage keeps on a rank. Row of the conformance list: S3-03."""

from typing import Any
from unittest import mock

import pytest
import torch
from steps import ONE, Case, assert_equal_to_one_process, build_part, micro_batches, new_optimizer, run_steps

from gptworks.config.derive import Layout
from gptworks.config.schema import ParallelConfig, ScalerConfig
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.parallel.shard import ShardPolicy
from gptworks.train import optim
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

SHAPE = {"num_layers": 4, "hidden_size": 64}


def live_bytes(part: Any, optimizer: torch.optim.Optimizer) -> int:
    """Of the storages behind parameters, gradients and moments: whole, gathered or sharded, each counted once."""
    tensors: list[Any] = [parameter for _, parameter in part.named_parameters()]
    for state in optimizer.state.values():
        tensors += state.values()
    for module in shard.sharded_modules(part.gpt, part.sharding):
        for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
            for value in vars(parameter).values():
                tensors += value if isinstance(value, list) else [value]
    tensors += [tensor.grad for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.is_leaf]
    storages = [shard.local(tensor).untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def held(world: World, zero: int) -> list[int]:
    """Live bytes before each forward pass and before the update of the second step, when there are moments."""
    part = build_part(world, Case(model=SHAPE, parallel={"zero": zero}))
    optimizer = new_optimizer(part)
    scaler = LossScaler(ScalerConfig(), enabled=False)
    found: list[int] = []
    part.gpt.register_forward_pre_hook(lambda *_: found.append(live_bytes(part, optimizer)), prepend=True)
    optimizer.register_step_pre_hook(lambda *_: found.append(live_bytes(part, optimizer)))
    for step in (1, 2):
        found.clear()
        train_step(part, optimizer, micro_batches(world, step, 4), world, scaler, clip=1.0, seed=1, step=step)
    return found


@pytest.mark.slow
def test_s3_03_each_stage_keeps_less_than_the_one_before(run_layout) -> None:
    """Two ranks, P bytes of fp32 parameters, before the last of 4 micro-batches and before the update."""
    whole = sum(p.numel() * p.element_size() for _, p in build_part(ONE, Case(model=SHAPE)).named_parameters())
    # moments, gradients, parameters (with shards, what is gathered lies beside this rank's half)
    before_last = {0: (2, 1, 1), 1: (1, 1, 1.5), 2: (1, 0.5, 1.5), 3: (1, 0.5, 0.5)}
    for found in run_layout(Layout(fsdp=2), lambda world: {zero: held(world, zero) for zero in range(4)}):
        bytes_of = {zero: looks[3] for zero, looks in found.items()}
        assert bytes_of[0] > bytes_of[1] > bytes_of[2] > bytes_of[3]
        for zero, parts in before_last.items():
            assert bytes_of[zero] == pytest.approx(sum(parts) * whole, rel=0.01), zero
        at_update = {zero: looks[4] / whole for zero, looks in found.items()}
        assert at_update[0] == pytest.approx(4, rel=0.01)
        assert all(at_update[zero] == pytest.approx(2, rel=0.01) for zero in (1, 2, 3))


@pytest.mark.slow
def test_s3_03_offload_trains_the_same_on_the_cpu(run_layout) -> None:
    """The three stages all allow it: what is offloaded is the shard, which each of them has."""
    wanted = run_steps(ONE, Case(4))

    def steps(world: World) -> Any:
        from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

        found = []
        for zero in (1, 2, 3):
            case = Case(4, parallel={"zero": zero, "offload": True})
            part = build_part(world, case)
            groups = [
                fully_shard.state(module)._fsdp_param_group for module in shard.sharded_modules(part.gpt, part.sharding)
            ]
            assert len(groups) == 4 and all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
            kept = [*part.gpt.parameters(), *optim.moments(part, new_optimizer(part)).values()]
            assert {str(tensor.device) for tensor in kept} == {"cpu"}
            found.append(run_steps(world, case))
        return found

    ranks = run_layout(Layout(fsdp=2), steps)
    for number in range(3):
        assert_equal_to_one_process([reports[number] for reports in ranks], wanted, f"stage {number + 1}")


def test_memory_is_pinned_only_where_there_is_cuda(run_layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(world: World) -> list[bool]:
        from torch.distributed import fsdp

        found = []
        monkeypatch.setattr(
            fsdp, "fully_shard", lambda _, offload_policy, **__: found.append(offload_policy.pin_memory)
        )
        monkeypatch.setattr(shard, "sharded_modules", lambda *_: [])
        gpt = build_part(ONE, Case()).gpt
        for kind in ("cpu", "cuda"):
            elsewhere = World(torch.device(kind), world.layout, world.rank, world.mesh)
            shard.apply(gpt, elsewhere, ShardPolicy(zero=1), torch.float32, offload_to_cpu=True)
        return found

    assert run_layout(Layout(fsdp=2), asked) == [[False] * 4 + [True] * 4] * 2


def test_gathers_and_sums_of_each_stage(run_layout) -> None:
    """How often parameters are gathered and gradients scattered in a step of 4 micro-batches, over 4 groups."""

    def counted(world: World) -> dict[int, tuple[int, int]]:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        counts = {}
        for zero in (1, 2, 3):
            with (
                mock.patch.object(groups, "foreach_all_gather", wraps=groups.foreach_all_gather) as gather,
                mock.patch.object(groups, "foreach_reduce", wraps=groups.foreach_reduce) as scatter,
            ):
                run_steps(world, Case(4, parallel={"zero": zero}, steps=1))
            counts[zero] = (gather.call_count, scatter.call_count)
        return counts

    root, blocks, micro = 1, 3, 4
    expected = {
        1: (root + blocks, root + blocks),
        2: (root + blocks, micro * (root + blocks)),
        3: (micro * (root + 2 * blocks), micro * (root + blocks)),
    }
    for found in run_layout(Layout(fsdp=2), counted):
        assert found[1] == expected[1] and found[2] == expected[2]
        # The last block may still be there when its backward pass begins.
        assert found[3][1] == expected[3][1] and micro * (root + 2 * blocks - 1) <= found[3][0] <= expected[3][0]


def test_stage_3_with_a_pipeline_is_said_to_cost_traffic() -> None:
    said = shard.note(ParallelConfig(pp=2, fsdp=2, zero=3))
    assert said is not None and "parallel.zero: 3 with pp=2: every micro-batch gathers" in said
    assert shard.note(ParallelConfig(pp=2, fsdp=2)) is None
    assert shard.note(ParallelConfig(fsdp=2, zero=3)) is None


def test_shards_of_nothing_are_mentioned() -> None:
    said = shard.note(ParallelConfig(fsdp=8, zero=0))
    assert said is not None and "parallel.zero: 0 with fsdp=8: nothing is sharded" in said
    assert shard.note(ParallelConfig(dp=8)) is None
