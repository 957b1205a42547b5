"""What plan/memory.py says of a step is what the tensors of a real step take, counted operator by operator."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from gptworks.config.derive import BatchPlan
from gptworks.config.schema import (
    InitConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    ScalerConfig,
)
from gptworks.data.loader import Batch
from gptworks.parallel.apply import FreshWeights, build
from gptworks.parallel.launch import World
from gptworks.plan import activations
from gptworks.plan.activations import Ledger
from gptworks.plan.memory import RankMemory, memory, order
from gptworks.simulate.tracker import Tracker
from gptworks.train import optim
from gptworks.train.precision import DTYPES, LossScaler
from gptworks.train.step import train_step

LENGTH = 128
SHAPE = {"num_layers": 3, "hidden_size": 128, "num_heads": 4, "vocab_size": 1000, "max_positions": LENGTH}


def shape(**changes: Any) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | changes)


def predict(
    model: ModelConfig | None = None,
    rows: int = 4,
    accumulation: int = 1,
    *,
    compute: str = "fp32",
    recompute: str = "none",
    kernels: str = "cpu",
    **parallel: Any,
) -> list[RankMemory]:
    known = ParallelConfig(**parallel)
    data = known.dp * known.fsdp  # type: ignore[operator]
    batch = BatchPlan(rows * accumulation * data, rows, accumulation, data)
    precision = PrecisionConfig.model_validate({"compute": compute})
    model = model or shape()
    return memory(model, known, batch, LENGTH, precision=precision, recompute=recompute, kernels=kernels)


def most_bytes(model: ModelConfig, rows: int, accumulation: int, compute: str, recompute: str) -> int:
    """Of the second step: Adam's moments are there from the end of the first."""
    world = World(torch.device("cpu"))
    weights = FreshWeights(InitConfig(), model.num_layers, seed=1)
    with Tracker() as tracker:
        part = build(model, world, DTYPES[compute], weights, recompute_mode=recompute).train()
        optimizer = optim.build(part, OptimConfig())
        scaler = LossScaler(ScalerConfig(), enabled=False)
        windows = torch.randint(0, model.vocab_size, (accumulation, rows, LENGTH + 1))
        batches = [
            Batch(one[:, :-1].contiguous(), one[:, 1:].contiguous(), None, None, torch.arange(rows)) for one in windows
        ]
        for step in (1, 2):
            tracker.peak = 0
            train_step(part, optimizer, batches, world, scaler, clip=1.0, seed=1, step=step)
    return tracker.peak
