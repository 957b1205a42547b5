"""Configuration: frozen sections, YAML with overrides, presets. Never imports torch."""

from gptworks.config.derive import BatchPlan, Layout, num_steps, plan_batch, solve_batch, solve_layout
from gptworks.config.load import from_dict, load, load_with_origins
from gptworks.config.schema import (
    BatchConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    GenerateConfig,
    InitConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    RunFolderConfig,
    ScalerConfig,
    TrainConfig,
)

__all__ = [
    "BatchConfig",
    "BatchPlan",
    "CheckpointConfig",
    "DataConfig",
    "EvaluateConfig",
    "GenerateConfig",
    "InitConfig",
    "Layout",
    "ModelConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "RunFolderConfig",
    "ScalerConfig",
    "TrainConfig",
    "from_dict",
    "load",
    "load_with_origins",
    "num_steps",
    "plan_batch",
    "solve_batch",
    "solve_layout",
]
