"""What is to be trained, and one way to lay it out. The two objects that every question to the planner is about."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from gptworks import architecture
from gptworks.config.checks import fit_layout, suits
from gptworks.config.derive import BatchPlan, Layout, plan_batch, solve_layout
from gptworks.config.schema import ModelConfig, ParallelConfig, PrecisionConfig, RunConfig
from gptworks.errors import UsageError
from gptworks.plan.block_kinds import KNOWN
from gptworks.plan.sizes import COMPUTE_BYTES, FP32


@dataclass(frozen=True)
class Workload:
    """What stays as it is, however the work is laid out."""

    model: ModelConfig
    seq_len: int
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    compiled: bool = False
    kernels: str = "cuda"  # whose memory and time: of cuda or of cpu

    def __post_init__(self) -> None:
        architecture.require_known(self.model, KNOWN, "plan: it", UsageError)

    @classmethod
    def from_config(cls, cfg: RunConfig, kernels: str) -> "Workload":
        return cls(cfg.model, cfg.data.seq_len, cfg.precision, cfg.train.compile, kernels)

    @property
    def on_cpu(self) -> bool:
        return self.kernels == "cpu"

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number while it is computed with."""
        return COMPUTE_BYTES[self.precision.compute]

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a number of a gradient while data-parallel ranks add it up."""
        return FP32 if self.precision.reduce == "fp32" else self.compute_bytes


@dataclass(frozen=True)
class LayoutChoice:
    """One way to lay it out. All numbers are known."""

    parallel: ParallelConfig
    batch: BatchPlan
    recompute: str = "none"

    @classmethod
    def from_config(cls, cfg: RunConfig, world_size: int) -> "LayoutChoice":
        """The layout of the configuration, or the error by which a run of so many processes would refuse it."""
        layout = solve_layout(cfg.parallel, world_size, partial(suits, cfg))
        parallel = fit_layout(cfg, layout)
        return cls(parallel, plan_batch(cfg.batch, cfg.model, cfg.data.seq_len, parallel), cfg.train.recompute)

    @cached_property
    def layout(self) -> Layout:
        return Layout.from_config(self.parallel)

    @property
    def zero(self) -> int:
        """The sharding stage; 0 where there is nothing to shard over."""
        return self.parallel.zero if self.layout.fsdp > 1 else 0

    @property
    def shards(self) -> int:
        """How many ranks share the parameters that a stage and tensor-parallel rank has."""
        return self.layout.fsdp if self.zero else 1

    @property
    def splits_sequence(self) -> bool:
        """Whether tensor-parallel ranks share the tokens between the matrices."""
        return self.layout.tp > 1 and self.parallel.sequence

    def settings(self) -> dict[str, Any]:
        """All that it decides, in the words of a configuration."""
        parallel = self.parallel
        settings: dict[str, Any] = {f"parallel.{axis}": size for axis, size in vars(self.layout).items()}
        settings["parallel.zero"] = parallel.zero
        if parallel.offload:
            settings["parallel.offload"] = True
        if self.layout.pp > 1:
            settings["parallel.schedule"] = parallel.schedule
            settings["parallel.virtual_stages"] = parallel.virtual_stages
        settings["batch.global_size"] = self.batch.global_size
        settings["batch.micro_size"] = self.batch.micro_size
        settings["batch.accumulation"] = self.batch.accumulation
        settings["train.recompute"] = self.recompute
        return settings

    def __str__(self) -> str:
        """Such as pp2.fsdp4.tp2, zero 1, interleaved x 2, micro-batch 4, recompute full."""
        words = [degrees_in_words(self.parallel), f"micro-batch {self.batch.micro_size}"]
        if self.recompute != "none":
            words.append(f"recompute {self.recompute}")
        return ", ".join(words)


def degrees_in_words(parallel: ParallelConfig) -> str:
    """Such as pp2.fsdp4.tp2, zero 1, interleaved x 2."""
    layout = Layout.from_config(parallel)
    words = [str(layout) if layout.world_size > 1 else "one device"]
    if parallel.zero:
        words.append(f"zero {parallel.zero}" + (" offloaded" if parallel.offload else ""))
    if parallel.virtual_stages > 1:
        words.append(f"{parallel.schedule} x {parallel.virtual_stages}")
    return ", ".join(words)
