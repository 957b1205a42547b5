"""The held-out loss of a layout is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from steps import ONE, Case, build_part, layouts, micro_batches, new_optimizer

from gptworks.config.derive import Layout
from gptworks.config.schema import DataConfig, ScalerConfig
from gptworks.data.dataset import Dataset
from gptworks.evaluate.heldout import HeldOut, held_out_loss
from gptworks.launch.world import World
from gptworks.parallel import shard
from gptworks.train.precision import LossScaler
from gptworks.train.step import train_step

VOCAB = 512


def measure(world: World, part: Any, dataset: Dataset, **which: Any) -> HeldOut:
    return held_out_loss(
        part, dataset.samples("held_out"), dataset.eod_policy, device=world.device, world=world, **which
    )


@pytest.fixture
def dataset(small_store: Path) -> Dataset:
    cfg = DataConfig(path=(str(small_store),), split=(90.0, 10.0), seq_len=16, mask_eod=True)
    return Dataset(cfg, vocab_size=VOCAB, seed=1)


@pytest.mark.parametrize("layout", layouts("dp2", "fsdp2", "tp2", "pp2", slow=("dp2.fsdp2", "pp2.tp2")))
def test_ranks_share_the_batches_and_agree_on_the_sum(run_layout, dataset: Dataset, layout: Layout) -> None:
    total = dataset.samples("held_out").per_epoch
    which: list[dict[str, Any]] = [
        {"micro_size": 4, "num_samples": 20},  # a number that the ranks do not divide
        {"micro_size": 4, "num_samples": 4},  # fewer batches than ranks
        {"micro_size": total - 1},  # a last batch of one row
    ]
    stages = (1, 3) if layout.fsdp > 1 else (0,)
    model = {"vocab_size": VOCAB}
    wanted = [measure(ONE, build_part(ONE, Case(model=model)), dataset, **kind) for kind in which]

    def found(world: World) -> Any:
        parts = [build_part(world, Case(model=model, parallel={"zero": zero})) for zero in stages]
        return [[measure(world, part, dataset, **kind) for kind in which] for part in parts]

    for of_rank in run_layout(layout, found):
        for of_stage in of_rank:
            for got, one in zip(of_stage, wanted, strict=True):
                assert (got.samples, got.tokens) == (one.samples, one.tokens)
                assert got.loss == pytest.approx(one.loss, abs=5e-6)


def test_training_goes_on_as_if_nothing_had_been_measured(run_layout, dataset: Dataset) -> None:
    def losses(world: World, measured: bool, zero: int) -> Any:
        part = build_part(world, Case(model={"vocab_size": VOCAB}, parallel={"zero": zero}))
        optimizer = new_optimizer(part)
        scaler = LossScaler(ScalerConfig(), enabled=False)
        reports = []
        for step in (1, 2, 3):
            batches = micro_batches(world, step, 2)
            reports.append(train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step))
            if measured:
                measure(world, part, dataset, micro_size=4, num_samples=12)
                assert part.training
                assert all(hasattr(p, "placements") for _, p in part.named_parameters()), "parameters are left gathered"
        assert torch.equal(*(shard.local(module.weight) for module in (part.parts[0].wte, part.parts[0].head)))
        return reports

    def same(world: World) -> list[bool]:
        return [losses(world, True, zero) == losses(world, False, zero) for zero in (1, 3)]

    assert run_layout(Layout(fsdp=2), same) == [[True, True]] * 2
